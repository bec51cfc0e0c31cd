"""Where each document of a corpus came from, kept next to its shards; and documents taken out by
what they are called.

    corpus/
      documents/NAME.parquet   row i is document i of tokens/NAME.npy: its source (input file), its
                               place there (byte offset or row), its id (--id_key), its label and
                               its characters before tokenizing (of one in parts: at the first)
      documents/manifest.json  size and xxh3-128 of each; written before the corpus's own manifest

They take no part in the corpus's content_hash: equal shards are equal, whatever they came from.

Documents are taken out of a finished corpus without redoing the rest. The result is a new corpus
next to the old one: shards without these documents are hard links to the old files (copies on
another file system), the others are written and planned again. Its content differs, so a run
notices that its rows have changed.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deberta_ds.base.errors import UserError, listed, naming
from deberta_ds.base.files import MANIFEST, atomic_path, link, write_atomic, xxh3
from deberta_ds.corpus.encode import add_up
from deberta_ds.corpus.pack import manifest_of, pack_shard, plan_description
from deberta_ds.corpus.units import job, run_units, write_plan
from deberta_ds.data import shards
from deberta_ds.data.corpus import open_shard
from deberta_ds.tokenizer import Tokenizer

DIRECTORY = "documents"
_SCHEMA = pa.schema([("source", pa.string()), ("place", pa.int64()), ("id", pa.string()),
                     ("label", pa.string()), ("characters", pa.int64())])
_GROUP_DOCUMENTS = 1 << 15
_TAKEN_VERSION = 1
_AGAIN = "copy it again from its source, or make the corpus again"


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, tuple[int, str]]  # shard: size and xxh3
    bad_files: dict[str, str] = field(default_factory=dict)  # input that was left out: why


class Origin(NamedTuple):
    """Where a document came from. `id` is "" without --id_key."""

    source: str
    place: int
    id: str
    label: str
    characters: int

    @property
    def name(self) -> str:
        """Return what take_down.py and find.py call it: its id, else SOURCE@PLACE."""
        return self.id or f"{self.source}@{self.place}"


class OriginWriter:
    """Writes the origins of one shard; memory is one group of documents."""

    def __init__(self, corpus: str | Path, name: str):
        self._path = origins_path(corpus, name)
        self._context = atomic_path(self._path)
        self._temporary = self._context.__enter__()
        self._file = open(self._temporary, "wb")  # pyarrow takes "~" and "s3:" in a path for more
        self._table = pq.ParquetWriter(self._file, _SCHEMA, compression="zstd")
        self._pending: list[list] = [[] for _ in _SCHEMA]

    def add(self, *columns: list) -> None:
        """Add documents: their sources, places, ids, labels and characters."""
        for pending, column in zip(self._pending, columns, strict=True):
            pending += column
        while len(self._pending[0]) >= _GROUP_DOCUMENTS:
            self._write()

    def _write(self) -> None:
        group = [column[:_GROUP_DOCUMENTS] for column in self._pending]
        with naming(self._path):
            self._table.write_table(pa.table(group, schema=_SCHEMA))
        for column in self._pending:
            del column[:_GROUP_DOCUMENTS]

    def finish(self) -> list:
        """Complete the file and return [its size, its xxh3-128]."""
        if self._pending[0]:
            self._write()
        with naming(self._path):
            self._table.close()
            self._file.close()
        self._context.__exit__(None, None, None)
        return [self._path.stat().st_size, xxh3(self._path)]

    def abandon(self) -> None:
        """Remove the unfinished file."""
        with suppress(OSError):  # of a full disk
            self._table.close()
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def origins_path(corpus: str | Path, name: str) -> Path:
    """Return the file with the origins of a shard's documents."""
    return Path(corpus) / DIRECTORY / f"{name}.parquet"


def write_origins_manifest(corpus: str | Path, files: Mapping[str, Sequence],
                           bad_files: Mapping[str, str]) -> None:
    """Write a _Manifest; `files` are those of the shards that have origins."""
    values = {"version": 1, "files": files} | ({"bad_files": bad_files} if bad_files else {})
    text = json.dumps(values, sort_keys=True, indent=1) + "\n"
    write_atomic(Path(corpus) / DIRECTORY / MANIFEST, text)


class Origins:
    """The origins of a corpus's documents, opened for looking things up."""

    def __init__(self, corpus: str | Path):
        """UserError if the corpus has none, or a damaged list of them."""
        self._corpus = Path(corpus)
        manifest: _Manifest = shards.read_checked(
            self._corpus / DIRECTORY, _Manifest, 1, "no list of documents", _AGAIN)[0]
        self.files, self.bad_files = manifest.files, manifest.bad_files
        self.table = cache(self._read)

    def _read(self, name: str) -> pa.Table:
        if name not in self.files:
            raise UserError(f"{self._corpus}: no origins of the documents of shard {name}")
        path = origins_path(self._corpus, name)
        shards.check_file(path, *self.files[name], _AGAIN)
        with naming(path), open(path, "rb") as file:
            # By no thread, which might outlive the interpreter.
            return pq.ParquetFile(file).read(use_threads=False)

    def verify(self, mode: str) -> int:
        """Check every file's size and, for "full", its checksum; return how many there are."""
        for name, (size, digest) in self.files.items():
            shards.check_file(origins_path(self._corpus, name), size,
                              digest if mode == "full" else None, _AGAIN)
        return len(self.files)

    def of(self, name: str, document: int) -> Origin:
        """Return the origin of a document of shard `name`."""
        return Origin(**self.table(name).slice(document, 1).to_pylist()[0])

    def find(self, names: list[str]) -> dict[str, dict[int, str]]:
        """Return {shard: {document in it: its name}} of documents called by id or SOURCE@PLACE."""
        found: dict[str, dict[int, str]] = {}
        for shard in self.files:
            for document, name in _matching(self._read(shard), names):
                found.setdefault(shard, {})[document] = name
        return found


def _matching(table: pa.Table, names: list[str]) -> Iterator[tuple[int, str]]:
    wanted = pa.array(names, pa.string())
    places = pc.binary_join_element_wise(table["source"], pc.cast(table["place"], pa.string()), "@")
    called = pc.if_else(pc.equal(table["id"], ""), places, table["id"])
    for column in (called, places):
        which = pc.indices_nonzero(pc.is_in(column, value_set=wanted)).to_pylist()
        yield from ((index, column[index].as_py()) for index in which)


def take_down(corpus: str | Path, names: list[str], out: str | Path, tokenizer: Tokenizer, *,
              workers: int = 1) -> dict[str, int]:
    """Write the corpus `out`: `corpus` without the documents called `names` (ids, or
    SOURCE@PLACE). Return {"documents": taken out, "shards": written again}.

    UserError if a name is unknown, if the tokenizer is another one, or if `out` holds anything
    else; nothing is written then.
    """
    if os.path.realpath(corpus) == os.path.realpath(out):
        raise UserError(f"{out}: the corpus itself; give another directory, the old one stays")
    manifest, content_hash = manifest_of(corpus, tokenizer)
    origins = Origins(corpus)
    found = origins.find(names)
    if unknown := set(names) - {name for gone in found.values() for name in gone.values()}:
        raise UserError(f"{corpus}: holds no document {listed(sorted(unknown))} ({len(unknown)} of "
                        f"{len(names)} names); look with data_prep/find.py")
    digest = hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()
    plans = {length: shards.read_rows_manifest(shards.rows_directory(corpus, length))[0]
             for length in shards.planned_lengths(corpus)}
    description = {"version": _TAKEN_VERSION, "corpus": content_hash, "names": digest,
                   "lengths": list(plans), "packer_version": shards.PACKER_VERSION}
    with job(out, description, finished=MANIFEST) as is_done:
        if not is_done:
            units = {shard.name: (str(corpus), str(out), shard, sorted(found.get(shard.name, {})),
                                  {length: plan.shards[number] for length, plan in plans.items()},
                                  tokenizer.stored_word_starts())
                     for number, shard in enumerate(manifest.shards)}
            results = run_units(out, take_down_shard, units, workers=workers, label="take down")
            _finish(Path(out), manifest, plans, origins, results)
    taken = (shards.read_manifest(one)[0].counts.get("taken_down", 0) for one in (out, corpus))
    return {"documents": next(taken) - next(taken), "shards": len(found)}


def take_down_shard(corpus: str, out: str, shard: shards.ShardInfo, gone: list[int],
                    plans: dict[int, shards.RowShardInfo], word_starts: np.ndarray) -> dict:
    """Link or rewrite a shard and its plans; return the fields of their infos, None if empty."""
    if not gone:
        planned = [shards.plan_files_of(shards.rows_directory(corpus, length), shard.name)
                   for length in plans]
        for path in map(Path, chain(shards.files_of(corpus, shard.name), *planned,
                                    [str(origins_path(corpus, shard.name))])):
            link(path, Path(out) / path.relative_to(corpus))
        return {"shard": asdict(shard), "labels": {}, "origins": None,
                "plans": {str(length): asdict(plan) for length, plan in plans.items()},
                "hard_cuts": {}}
    tokens, ends = open_shard(corpus, shard)
    cuts = {str(length): -shards.cut_documents(
        ends, tokens, word_starts, length - shards.FRAME_TOKENS)[2] for length in plans}
    table, begins = Origins(corpus).table(shard.name), np.append(0, ends)
    labels: dict[str, list[int]] = {}
    before = None  # a long document may lie here in several parts, which count as one
    for number in gone:
        origin = Origin(**table.slice(number, 1).to_pylist()[0])
        add_up(labels, {origin.label: [origin[:2] != before, origin.characters,
                                       int(begins[number + 1] - begins[number])]})
        before = origin[:2]
    if len(gone) == shard.documents:
        return {"shard": None, "labels": labels, "origins": None, "plans": {}, "hard_cuts": cuts}
    stays = np.ones(shard.documents, bool)
    stays[gone] = False
    writer = shards.ShardWriter(out, shard.name, tokens.dtype)
    origins = OriginWriter(out, shard.name)
    for number in np.flatnonzero(stays).tolist():
        writer.append(tokens[begins[number] : begins[number + 1]])
    for batch in table.filter(pa.array(stays)).to_batches(_GROUP_DOCUMENTS):
        origins.add(*(column.to_pylist() for column in batch.columns))
    info, file = writer.finish(), origins.finish()
    packed = {str(length): pack_shard(out, info, word_starts, length) for length in plans}
    for length, plan in packed.items():
        cuts[length] += plan.pop("hard_cuts")
    return {"shard": asdict(info), "labels": labels, "origins": file, "plans": packed,
            "hard_cuts": cuts}


def _finish(out: Path, old: shards.Manifest, plans: dict[int, shards.RowsManifest],
            origins: Origins, results: list[dict]) -> None:
    """Write the manifests: documents, the corpus's, and one for each length, in this order."""
    kept = [result for result in results if result["shard"]]
    if not kept:
        raise UserError(f"{out}: no document would be left")
    gone: dict[str, list[int]] = {}
    for result in results:
        add_up(gone, result["labels"])
    documents, characters, _ = map(sum, zip((0, 0, 0), *gone.values(), strict=True))
    labels = {label: [before - taken for before, taken in zip(
        counts, gone.get(label, (0, 0, 0)), strict=True)] for label, counts in old.labels.items()}
    left = tuple(shards.ShardInfo(**result["shard"]) for result in kept)
    counts = old.counts | {
        "documents": sum(shard.documents for shard in left),  # each part of a cut one counts
        "characters": old.counts.get("characters", 0) - characters,
        "tokens": sum(shard.tokens for shard in left),
        "taken_down": old.counts.get("taken_down", 0) + documents}
    write_origins_manifest(out, {shard.name: result["origins"] or origins.files[shard.name]
                                 for shard, result in zip(left, kept, strict=True)},
                           origins.bad_files)
    new = replace(old, counts=counts, shards=left,
                  labels={label: found for label, found in labels.items() if found[0]})
    content_hash = shards.content_hash_of(new)
    for length, plan in plans.items():
        infos = tuple(shards.RowShardInfo(**result["plans"][str(length)]) for result in kept)
        cuts = sum(result["hard_cuts"].get(str(length), 0) for result in results)
        write_plan(shards.rows_directory(out, length), plan_description(content_hash, length))
        shards.write_manifest(shards.rows_directory(out, length), replace(
            plan, corpus=content_hash, hard_cuts=plan.hard_cuts + cuts, shards=infos))
    shards.write_manifest(out, new)
