"""All files of a corpus against its manifests."""

from pathlib import Path

from deberta_ds.data.corpus import Corpus
from deberta_ds.data.prep.identity import DIRECTORY, Origins
from deberta_ds.data.shards import read_manifest
from deberta_ds.errors import UserError


def verify_corpus(path: str | Path, mode: str, tokenizer_sha256: str = "") -> list[str]:
    """Return a line for each part of a packed corpus; UserError names the first bad file.

    `mode` as of Corpus.verify. `tokenizer_sha256`: of the tokenizer that it must be made with.
    """
    read_manifest(path)
    lengths = sorted(int(plan.parent.name[5:]) for plan in Corpus.row_plans(path))
    if not lengths:
        raise UserError(f"{path}: no finished row plan; run data_prep/pack.py")
    files = Origins(path).verify(mode)
    lines = [f"{path}/{DIRECTORY}: {files:,} files agree ({mode})"]
    for seq_len in lengths:
        corpus = Corpus(path, seq_len=seq_len)
        if tokenizer_sha256:
            corpus.check_tokenizer(tokenizer_sha256)
        files = corpus.verify(mode)
        lines.append(f"{path}/rows-{seq_len}: {files:,} files agree ({mode}), "
                     f"{corpus.num_rows:,} rows, fingerprint {corpus.fingerprint[:16]}")
    return lines
