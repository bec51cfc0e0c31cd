"""What a corpus holds: counts, lengths, fill, labels, frequent tokens; whether it is whole."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.encode import left_out
from deberta_ds.corpus.origins import DIRECTORY, Origins
from deberta_ds.corpus.pack import manifest_of
from deberta_ds.data import shards
from deberta_ds.data.corpus import Corpus, open_shard
from deberta_ds.tokenizer import Tokenizer, unknown_tokens
from deberta_ds.tokenizer.words import byte_of

_CHUNK_TOKENS = 1 << 18
# Of all tokens: more than this is said. Text in the tokenizer's languages stays far below.
_MANY_BYTES = 0.02


@dataclass(frozen=True)
class CorpusStats:
    """Figures of one corpus. `lengths` counts documents of 2**i .. 2**(i+1) - 1 tokens;
    `frequencies` counts each id.
    """

    path: str
    manifest: shards.Manifest
    lengths: np.ndarray
    frequencies: np.ndarray
    plans: list[shards.RowsManifest]
    longest: int
    word_starts: int


def corpus_stats(path: str | Path, tokenizer: Tokenizer) -> CorpusStats:
    """Return the figures of the corpus at `path`; reads every shard once, in bounded memory."""
    manifest, _ = manifest_of(path, tokenizer)
    lengths, frequencies = np.zeros(40, np.int64), np.zeros(2 * tokenizer.size, np.int64)
    longest = 0
    for shard in manifest.shards:
        tokens, ends = open_shard(path, shard)
        sizes = np.diff(np.concatenate([[0], ends]))
        lengths += np.bincount(np.log2(sizes).astype(np.int64), minlength=40)
        longest = max(longest, int(sizes.max()))
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            chunk = tokens[start : start + _CHUNK_TOKENS]
            frequencies += np.bincount(chunk, minlength=len(frequencies))
    plans = [shards.read_rows_manifest(shards.rows_directory(path, seq_len))[0]
             for seq_len in shards.planned_lengths(path)]
    starts = int(frequencies[tokenizer.stored_word_starts()].sum())
    frequencies = frequencies.reshape(2, -1).sum(0)
    return CorpusStats(str(path), manifest, lengths, frequencies, plans, longest, starts)


def stats_text(stats: CorpusStats, tokenizer: Tokenizer, top: int = 20) -> str:
    """Return the figures as a table for a terminal."""
    counts = stats.manifest.counts
    documents, tokens = counts["documents"], counts["tokens"]
    lines = [stats.path, f"  documents   {documents:>15,}   longest {stats.longest:,} tokens",
             f"  tokens      {tokens:>15,}   {tokens / max(1, documents):,.1f} per document, "
             f"{tokens / max(1, stats.word_starts):.2f} per word",
             f"  characters  {counts['characters']:>15,}   "
             f"{counts['characters'] / max(1, tokens):.2f} per token"]
    lines += [f"  WARNING: {text}" for text in _unfit(stats, tokenizer)]
    if listed := left_out(counts):
        lines.append(f"  left out    {listed}")
    for plan in stats.plans:
        rows, segments, used = (sum(getattr(shard, name) for shard in plan.shards)
                                for name in ("rows", "pieces", "tokens"))
        fill = (used + shards.FRAME_TOKENS * segments) / max(1, rows * plan.seq_len)
        lines.append(f"  rows-{plan.seq_len:<6} {rows:>15,}   {fill:.2%} full, "
                     f"{segments / max(1, rows):.2f} document segments each, "
                     f"{plan.hard_cuts:,} cuts inside a word")
    if set(stats.manifest.labels) - {""}:
        lines += ["", "  label        documents         tokens   share  characters per token"]
        for label, (docs, characters, label_tokens) in stats.manifest.labels.items():
            lines.append(f"  {label or '(none)':<10} {docs:>11,} {label_tokens:>14,}  "
                         f"{label_tokens / max(1, tokens):6.2%}  {characters / label_tokens:>6.2f}")
    lines += ["", "  tokens per document      documents"]
    largest = max(1, int(stats.lengths.max()))
    for power in range(int(np.flatnonzero(stats.lengths).max(initial=0)) + 1):
        count = int(stats.lengths[power])
        lines.append(f"  {2**power:>9,} .. {2 ** (power + 1) - 1:<9,} {count:>9,} "
                     + "#" * round(40 * count / largest))
    order = np.argsort(-stats.frequencies, kind="stable")[:top].tolist()
    pairs = zip(tokenizer.subwords(order), stats.frequencies[order].tolist(), strict=True)
    frequent = "  ".join(f"{piece} {count / max(1, tokens):.2%}" for piece, count in pairs)
    lines += ["", f"  top {top} tokens: {frequent}"]
    return "\n".join(lines)


def _unfit(stats: CorpusStats, tokenizer: Tokenizer) -> list[str]:
    """Return what shows that the tokenizer was not made for this text."""
    pieces = tokenizer.subwords(range(len(stats.frequencies)))
    tokens = max(1, int(stats.frequencies.sum()))
    in_bytes = sum(int(count) for piece, count in zip(pieces, stats.frequencies, strict=True)
                   if byte_of(piece) is not None) / tokens  # a byte-level BPE has no such
    unknown = 0 if tokenizer.unk_id is None else int(stats.frequencies[tokenizer.unk_id])
    remedy = "another language or script than the tokenizer's? Train one on text like this"
    found = []
    if in_bytes > _MANY_BYTES:
        found.append(f"{in_bytes:.1%} of the tokens are single bytes of characters that are not "
                     f"in its vocabulary; {remedy}")
    if lost := unknown_tokens(unknown, tokens):
        found.append(f"{lost}; {remedy}")
    return found


def verify_corpus(path: str | Path, mode: str, tokenizer_sha256: str = "") -> list[str]:
    """Return a line for each part of a packed corpus; UserError names the first bad file.

    `mode` as of Corpus.verify. `tokenizer_sha256`: of the tokenizer that it must be made with.
    """
    shards.read_manifest(path)
    lengths = shards.planned_lengths(path)
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
