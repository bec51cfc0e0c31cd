"""Plan the rows of a tokenized corpus for one sequence length: one unit per shard."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import xxh3
from deberta_ds.corpus.units import Part, begin_again, job, run_units
from deberta_ds.data import shards
from deberta_ds.data.corpus import open_shard
from deberta_ds.data.shards import MANIFEST, Manifest, RowShardInfo, RowsManifest, ShardInfo
from deberta_ds.tokenizer import Tokenizer

MIN_SEQ_LEN = 8


def pack_corpus(corpus: str | Path, tokenizer: Tokenizer, seq_len: int, *, workers: int = 1,
                part: Part = None) -> RowsManifest | None:
    """Write rows-L of `corpus`, unless they are complete; return its manifest, None for a part."""
    manifest, content_hash = manifest_of(corpus, tokenizer)
    if seq_len < MIN_SEQ_LEN:
        raise UserError(f"seq_len {seq_len} is too short; it must be at least {MIN_SEQ_LEN}")
    directory = shards.rows_directory(corpus, seq_len)
    description = plan_description(content_hash, seq_len)

    def is_stale() -> bool:
        with suppress(UserError):  # there is no plan; one that is damaged is named at the end
            return shards.read_rows_manifest(directory)[0].corpus != content_hash
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
            if part:
                return None
            hard_cuts = sum(result.pop("hard_cuts") for result in results)
            infos = tuple(RowShardInfo(**result) for result in results)
            for path in directory.glob("*.npy"):
                if path.name.partition(".")[0] not in units:  # of an earlier state of the corpus
                    path.unlink()
            rows = RowsManifest(seq_len, shards.PACKER_VERSION, content_hash, hard_cuts, infos)
            shards.write_manifest(directory, rows)
    return shards.read_rows_manifest(directory)[0]


def manifest_of(corpus: str | Path, tokenizer: Tokenizer) -> tuple[Manifest, str]:
    """Return (manifest, content hash); UserError if another tokenizer has made the corpus."""
    manifest, content_hash = shards.read_manifest(corpus)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{corpus}: made with tokenizer {manifest.tokenizer_sha256[:16]}..., not with "
            f"{tokenizer.path} ({tokenizer.sha256[:16]}...); give the corpus's own tokenizer")
    return manifest, content_hash


def plan_description(content_hash: str, seq_len: int) -> dict:
    """Return what decides a row plan: the corpus, the length and the packer."""
    return {"corpus": content_hash, "seq_len": seq_len, "packer_version": shards.PACKER_VERSION}


def pack_shard(corpus: str, shard: ShardInfo, word_starts: np.ndarray, seq_len: int) -> dict:
    """Plan one shard and return the fields of its RowShardInfo, and its hard cuts."""
    tokens, ends = open_shard(corpus, shard)
    plan = shards.plan_rows(ends, tokens, word_starts, seq_len)
    files = shards.plan_files_of(shards.rows_directory(corpus, seq_len), shard.name)
    segments_path, starts_path = map(Path, files)
    shards.save_array(segments_path, plan.segments)
    shards.save_array(starts_path, plan.starts)
    return {"name": shard.name, "rows": len(plan.starts) - 1, "pieces": len(plan.segments),
            "tokens": int(plan.segments[:, 1].sum(dtype=np.int64)),
            "bytes": segments_path.stat().st_size, "xxh3": xxh3(segments_path),
            "starts_bytes": starts_path.stat().st_size, "starts_xxh3": xxh3(starts_path),
            "hard_cuts": int(plan.hard_cuts)}
