"""Where each document of a corpus came from, kept next to its shards.

    corpus/
      documents/NAME.parquet   row i is document i of tokens/NAME.npy: its source (input file), its
                               place there (byte offset or row), its id (--id_key), its label and
                               its characters before tokenizing (of one in parts: at the first)
      documents/manifest.json  size and xxh3-128 of each; written before the corpus's own manifest

They take no part in the corpus's content_hash: equal shards are equal, whatever they came from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.files import atomic_path, write_atomic, xxh3
from deberta_ds.corpus.documents import Document
from deberta_ds.data.shards import MANIFEST, check_file, read_checked

DIRECTORY = "documents"
_SCHEMA = pa.schema([("source", pa.string()), ("place", pa.int64()), ("id", pa.string()),
                     ("label", pa.string()), ("characters", pa.int64())])
_GROUP_DOCUMENTS = 1 << 15
_AGAIN = "copy it again from its source, or make the corpus again"


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, tuple[int, str]]  # shard: size and xxh3


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

    def add(self, documents: list[Document], characters: list[int]) -> None:
        """Write where documents are from, and how many characters they have."""
        self.extend([[document.path for document in documents],
                     [document.where for document in documents],
                     [document.id for document in documents],
                     [document.label for document in documents], characters])

    def extend(self, columns: list[list]) -> None:
        """Add documents; `columns`: those of the file."""
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
                           bad_files: Mapping[str, str] | None = None) -> None:
    """`files`: {shard: [bytes, xxh3]} of those shards that have origins. `bad_files`: {input that
    was left out: why}.
    """
    values = {"version": 1, "files": files} | ({"bad_files": bad_files} if bad_files else {})
    text = json.dumps(values, sort_keys=True, indent=1) + "\n"
    write_atomic(Path(corpus) / DIRECTORY / MANIFEST, text)


class Origins:
    """The origins of a corpus's documents, opened for looking things up."""

    def __init__(self, corpus: str | Path):
        """UserError if the corpus has none, or a damaged list of them."""
        self._corpus = Path(corpus)
        manifest: _Manifest = read_checked(
            self._corpus / DIRECTORY, _Manifest, 1, "no list of documents", _AGAIN)[0]
        self.files = manifest.files
        self.table = cache(self._read)

    def _read(self, name: str) -> pa.Table:
        """Return the table of one shard."""
        if name not in self.files:
            raise UserError(f"{self._corpus}: no origins of the documents of shard {name}")
        path = origins_path(self._corpus, name)
        check_file(path, *self.files[name], _AGAIN)
        with naming(path), open(path, "rb") as file:
            # By no thread, which might outlive the interpreter.
            return pq.ParquetFile(file).read(use_threads=False)

    def verify(self, mode: str) -> int:
        """Check every file's size and, for "full", its checksum; return how many there are."""
        for name, (size, digest) in self.files.items():
            check_file(origins_path(self._corpus, name), size, digest if mode == "full" else None,
                       _AGAIN)
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
