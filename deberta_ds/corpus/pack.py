"""Plan the rows of a tokenized corpus for one sequence length: one unit per shard."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import xxh3
from deberta_ds.corpus.origins import DIRECTORY, Origins
from deberta_ds.corpus.units import Part, begin_again, job, run_units
from deberta_ds.data.corpus import Corpus, open_shard
from deberta_ds.data.shards import (
    MANIFEST,
    PACKER_VERSION,
    Manifest,
    RowShardInfo,
    RowsManifest,
    ShardInfo,
    plan_files_of,
    plan_rows,
    planned_lengths,
    read_manifest,
    read_rows_manifest,
    rows_directory,
    save_array,
    write_manifest,
)
from deberta_ds.tokenizer import Tokenizer

MIN_SEQ_LEN = 8


def pack_corpus(corpus: str | Path, tokenizer: Tokenizer, seq_len: int, *, workers: int = 1,
                part: Part = None) -> RowsManifest | None:
    """Write rows-L of `corpus`, unless they are complete; return its manifest, None for a part."""
    manifest, content_hash = manifest_of(corpus, tokenizer)
    if seq_len < MIN_SEQ_LEN:
        raise UserError(f"seq_len {seq_len} is too short; it must be at least {MIN_SEQ_LEN}")
    directory = rows_directory(corpus, seq_len)
    description = plan_description(content_hash, seq_len)

    def is_stale() -> bool:
        with suppress(UserError):  # there is no plan; one that is damaged is named at the end
            return read_rows_manifest(directory)[0].corpus != content_hash
        return False

    begin_again(directory, description, finished=MANIFEST, part=part, is_stale=is_stale)
    with job(directory, description, finished=MANIFEST, part=part) as is_done:
        if not is_done:
            word_starts = tokenizer.stored_word_starts()
            units = {shard.name: (str(corpus), shard, word_starts, seq_len)
                     for shard in manifest.shards}
            results = run_units(
                directory, pack_shard, units, workers=workers, label=f"pack {seq_len}",
                part=part)
            if results is None:
                return None
            hard_cuts = sum(result.pop("hard_cuts") for result in results)
            shards = tuple(RowShardInfo(**result) for result in results)
            for path in directory.glob("*.npy"):
                if path.name.partition(".")[0] not in units:  # of an earlier state of the corpus
                    path.unlink()
            rows = RowsManifest(seq_len, PACKER_VERSION, content_hash, hard_cuts, shards)
            write_manifest(directory, rows)
    return read_rows_manifest(directory)[0]


def manifest_of(corpus: str | Path, tokenizer: Tokenizer) -> tuple[Manifest, str]:
    """Return (manifest, content hash); UserError if another tokenizer has made the corpus."""
    manifest, content_hash = read_manifest(corpus)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{corpus}: made with tokenizer {manifest.tokenizer_sha256[:16]}..., not with "
            f"{tokenizer.path} ({tokenizer.sha256[:16]}...); give the corpus's own tokenizer")
    return manifest, content_hash


def plan_description(content_hash: str, seq_len: int) -> dict:
    """Return what decides a row plan: the corpus, the length and the packer."""
    return {"corpus": content_hash, "seq_len": seq_len, "packer_version": PACKER_VERSION}


def pack_shard(corpus: str, shard: ShardInfo, word_starts: np.ndarray, seq_len: int) -> dict:
    """Plan one shard and return the fields of its RowShardInfo, and its hard cuts."""
    tokens, ends = open_shard(corpus, shard)
    plan = plan_rows(ends, tokens, word_starts, seq_len)
    files = plan_files_of(rows_directory(corpus, seq_len), shard.name)
    segments_path, starts_path = map(Path, files)
    save_array(segments_path, plan.segments)
    save_array(starts_path, plan.starts)
    return {"name": shard.name, "rows": len(plan.starts) - 1, "pieces": len(plan.segments),
            "tokens": int(plan.segments[:, 1].sum(dtype=np.int64)),
            "bytes": segments_path.stat().st_size, "xxh3": xxh3(segments_path),
            "starts_bytes": starts_path.stat().st_size, "starts_xxh3": xxh3(starts_path),
            "hard_cuts": int(plan.hard_cuts)}


# All files of a corpus against its manifests.
def verify_corpus(path: str | Path, mode: str, tokenizer_sha256: str = "") -> list[str]:
    """Return a line for each part of a packed corpus; UserError names the first bad file.

    `mode` as of Corpus.verify. `tokenizer_sha256`: of the tokenizer that it must be made with.
    """
    read_manifest(path)
    lengths = planned_lengths(path)
    if not lengths:
        raise UserError(f"{path}: no finished sequence plan; run data_prep/pack.py")
    lines = []
    for seq_len in lengths:
        corpus = Corpus(path, seq_len=seq_len)
        if tokenizer_sha256:
            corpus.check_tokenizer(tokenizer_sha256)
        files = corpus.verify(mode)
        lines.append(f"{path}/rows-{seq_len}: {files:,} files agree ({mode}), "
                     f"{corpus.num_rows:,} sequences, content hash {corpus.content_hash[:16]}")
    files = Origins(path).verify(mode)
    return [f"{path}/{DIRECTORY}: {files:,} files agree ({mode})", *lines]
