"""Documents taken out of a finished corpus by id, without redoing the rest.

The result is a new corpus next to the old one: shards without these documents are hard links to the
old files (copies on another file system), the others are written and planned again. Its content
differs, so a run notices that its rows have changed.
"""

import hashlib
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import link
from deberta_ds.corpus.encode import add_up
from deberta_ds.corpus.origins import (
    Origins,
    OriginWriter,
    origins_path,
    write_origins_manifest,
)
from deberta_ds.corpus.pack import manifest_of, pack_shard, plan_description
from deberta_ds.corpus.units import job, run_units, write_plan
from deberta_ds.data.corpus import open_shard
from deberta_ds.data.shards import (
    FRAME_TOKENS,
    MANIFEST,
    PACKER_VERSION,
    Manifest,
    RowShardInfo,
    RowsManifest,
    ShardInfo,
    ShardWriter,
    content_hash_of,
    cut_documents,
    files_of,
    plan_files_of,
    planned_lengths,
    read_manifest,
    read_rows_manifest,
    rows_directory,
    write_manifest,
)
from deberta_ds.tokenizer import Tokenizer

_VERSION = 1
_BATCH_DOCUMENTS = 1 << 12


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
    unknown = sorted(set(names) - {name for gone in found.values() for name in gone.values()})
    if unknown:
        more = ", ..." if len(unknown) > 5 else ""
        raise UserError(f"{corpus}: holds no document {', '.join(unknown[:5])}{more} "
                        f"({len(unknown)} of {len(names)} names); look with data_prep/find.py")
    lengths = planned_lengths(corpus)
    digest = hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()
    description = {"version": _VERSION, "corpus": content_hash, "names": digest,
                   "lengths": lengths, "packer_version": PACKER_VERSION}
    plans = {length: read_rows_manifest(rows_directory(corpus, length))[0] for length in lengths}
    with job(out, description, finished=MANIFEST) as is_done:
        if not is_done:
            units = {shard.name: (str(corpus), str(out), shard, sorted(found.get(shard.name, {})),
                                  {length: plan.shards[number] for length, plan in plans.items()},
                                  tokenizer.stored_word_starts())
                     for number, shard in enumerate(manifest.shards)}
            results = run_units(out, take_down_shard, units, workers=workers, label="take down")
            assert results is not None, "all units are done, not a part"
            _finish(Path(out), manifest, plans, origins, results)
    taken = (read_manifest(one)[0].counts.get("taken_down", 0) for one in (out, corpus))
    return {"documents": next(taken) - next(taken), "shards": len(found)}


def take_down_shard(corpus: str, out: str, shard: ShardInfo, gone: list[int],
                    plans: dict[int, RowShardInfo], word_starts: np.ndarray) -> dict:
    """Link or rewrite a shard and its plans; return the fields of their infos, None if empty."""
    if not gone:
        files = [*files_of(corpus, shard.name), str(origins_path(corpus, shard.name))]
        for seq_len in plans:
            files += plan_files_of(rows_directory(corpus, seq_len), shard.name)
        for path in map(Path, files):
            link(path, Path(out) / path.relative_to(corpus))
        return {"shard": asdict(shard), "labels": {}, "origins": None,
                "plans": {str(length): asdict(plan) for length, plan in plans.items()},
                "hard_cuts": {}}
    tokens, ends = open_shard(corpus, shard)
    cuts = {str(length): -cut_documents(ends, tokens, word_starts, length - FRAME_TOKENS)[2]
            for length in plans}
    table, begins = Origins(corpus).table(shard.name), np.append(0, ends)
    labels: dict[str, list[int]] = {}
    before = None  # a long document may lie here in several parts, which count as one
    for number, origin in zip(gone, table.take(pa.array(gone)).to_pylist(), strict=True):
        add_up(labels, {origin["label"]: [
            (origin["source"], origin["place"]) != before, origin["characters"],
            int(begins[number + 1] - begins[number])]})
        before = (origin["source"], origin["place"])
    if len(gone) == shard.documents:
        return {"shard": None, "labels": labels, "origins": None, "plans": {}, "hard_cuts": cuts}
    stays = np.ones(shard.documents, bool)
    stays[gone] = False
    writer, origins = ShardWriter(out, shard.name, tokens.dtype), OriginWriter(out, shard.name)
    for number in np.flatnonzero(stays).tolist():
        writer.append(tokens[begins[number] : begins[number + 1]])
    for batch in table.filter(pa.array(stays)).to_batches(_BATCH_DOCUMENTS):
        origins.extend([column.to_pylist() for column in batch.columns])
    info, file = writer.finish(), origins.finish()
    packed = {str(length): pack_shard(out, info, word_starts, length) for length in plans}
    for length, plan in packed.items():
        cuts[length] += plan.pop("hard_cuts")
    return {"shard": asdict(info), "labels": labels, "origins": file, "plans": packed,
            "hard_cuts": cuts}


def _finish(out: Path, old: Manifest, plans: dict[int, RowsManifest], origins: Origins,
            results: list[dict]) -> None:
    """Write the manifests: documents, the corpus's, and one for each length, in this order."""
    kept = [result for result in results if result["shard"]]
    if not kept:
        raise UserError(f"{out}: no document would be left")
    labels = {label: list(counts) for label, counts in old.labels.items()}
    gone = [0, 0, 0]
    for result in results:
        for label, counts in result["labels"].items():
            gone = [a + b for a, b in zip(gone, counts, strict=True)]
            if label in labels:
                labels[label] = [a - b for a, b in zip(labels[label], counts, strict=True)]
    shards = tuple(ShardInfo(**result["shard"]) for result in kept)
    counts = old.counts | {
        "documents": sum(shard.documents for shard in shards),  # each part of a cut one counts
        "characters": old.counts.get("characters", 0) - gone[1],
        "tokens": sum(shard.tokens for shard in shards),
        "taken_down": old.counts.get("taken_down", 0) + gone[0]}
    write_origins_manifest(out, {
        result["shard"]["name"]: result["origins"] or origins.files[result["shard"]["name"]]
        for result in kept})
    labels = {label: found for label, found in labels.items() if found[0]}
    new = replace(old, counts=counts, labels=labels, shards=shards)
    content_hash = content_hash_of(new)
    for length, plan in plans.items():
        infos = tuple(RowShardInfo(**result["plans"][str(length)]) for result in kept)
        cuts = sum(result["hard_cuts"].get(str(length), 0) for result in results)
        write_plan(rows_directory(out, length), plan_description(content_hash, length))
        write_manifest(rows_directory(out, length), replace(
            plan, corpus=content_hash, hard_cuts=plan.hard_cuts + cuts, shards=infos))
    write_manifest(out, new)
