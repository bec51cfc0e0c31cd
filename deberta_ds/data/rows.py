"""RowDataset[g]: row number g of the run, a pure function of (seed, g).

    g -> mixture -> source s, index j
    first_sequence + j -> epoch e, position p -> Permutation(rows_s, key=(seed, s, e)) -> its row
    row -> document segments, each framed as [CLS] segment [SEP]
    masks from Philox(key=(seed, g)): new ones in every epoch, and no generator state anywhere;
    their rate is a function of g and of the run's number of rows
    rows -> Batch, a micro-batch

Shape suffixes: B batch, L length, M target slots, T real targets.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.splitmix import Permutation
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.masking import IGNORE, mask_row
from deberta_ds.data.mixture import build_mixture
from deberta_ds.data.replaced import Replacements
from deberta_ds.files.remote import DEFAULT_CACHE, Cache

_permutation = lru_cache(4096)(Permutation)
# Slots beyond those that a row foresees come by this many, so that few shapes exist.
_MORE_SLOTS = 16


@dataclass(frozen=True)
class Row:
    """One packed and masked row.

    row: global row number g. input_ids i64[L]. labels i64[L]: original id at masked positions, -100
    elsewhere. segments i32[L]: 0 = padding, 1.. = document segment. positions i32[L]. slots: for
    how many targets a batch has room, whatever the row has; 0: for those that there are.
    """

    row: int
    input_ids: np.ndarray
    labels: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    slots: int = 0


class RowDataset:
    """Rows of a weighted mixture of corpora.

    Attributes: content_hashes {path: hex}, num_rows {path: rows in one epoch}, seq_len, seed.
    """

    def __init__(self, sources: Sequence[SourceConfig], tokenizer, *, seq_len: int, seed: int,
                 mask: MaskConfig, attend_across_documents: bool = False, verify: str = "sizes",
                 verify_rank: int = 0, verify_world_size: int = 1, sample_by: str = "epoch",
                 rows_of_run: int = 0, cache: Cache = DEFAULT_CACHE):
        """Open and check every source.

        UserError for a missing, damaged or stale corpus and for one of another tokenizer.
        """
        self.sources = tuple(sources)
        self.seq_len, self.seed, self.mask = seq_len, seed, mask
        self.attend_across_documents = attend_across_documents
        paths = [os.path.realpath(source.path) for source in sources]
        for source, path in zip(sources, paths, strict=True):
            if paths.count(path) > 1:
                raise UserError(f"data.sources names {source.path} twice; add up its weights")
        self._mixture = build_mixture([source.weight for source in sources])
        self._corpora = [Corpus(source.path, seq_len=seq_len, part=source.part, cache=cache)
                         for source in sources]
        for corpus in self._corpora:
            corpus.check_tokenizer(tokenizer.sha256)
            corpus.verify(verify, rank=verify_rank, world_size=verify_world_size)
        self._replaced = [Replacements(source.replaced, corpus, attend_across_documents)
                          if source.replaced else None
                          for source, corpus in zip(sources, self._corpora, strict=True)]
        for replaced in self._replaced:
            if replaced and verify_rank == 0:
                replaced.verify(verify)
        self._draws_by, self._rows_of_run = sample_by, rows_of_run
        official = mask.selection == "deberta_window"
        self._own_words = tokenizer.word_starts()  # where a corpus has `words`
        self._word_start = tokenizer.official_word_starts() if official else self._own_words
        self._character_start = tokenizer.character_starts()
        self._special, self._mask_id = tokenizer.is_special(), tokenizer.mask_id
        self._rare = self._special | tokenizer.is_part()
        self._cls_id, self._sep_id, self._pad_id = (tokenizer.cls_id, tokenizer.sep_id,
                                                    tokenizer.pad_id)

    @property
    def content_hashes(self) -> dict[str, str]:
        """Return {source path: hex}: what a checkpoint stores to reject another corpus."""
        return {source.path: corpus.content_hash
                + (f", replaced {replaced.content_hash}" if replaced else "")
                for source, corpus, replaced in zip(self.sources, self._corpora, self._replaced,
                                                    strict=True)}

    @property
    def num_rows(self) -> dict[str, int]:
        """Return {source path: rows in one epoch of it}."""
        pairs = zip(self.sources, self._corpora, strict=True)
        return {source.path: corpus.num_rows for source, corpus in pairs}

    def epochs(self, sequences_seen: int) -> dict[str, float]:
        """Return {source path: epochs of it used after rows 0 .. sequences_seen - 1 of the run}."""
        counts = self._mixture.consumed(sequences_seen)
        return {source.path: (source.first_sequence + count) / corpus.num_rows
                for source, count, corpus in zip(self.sources, counts, self._corpora, strict=True)}

    def _place(self, g: int) -> tuple[int, int, int]:
        """Return (source number, epoch of that source, position in the epoch's order) of row g."""
        source, index = self._mixture.locate(g)
        return source, *divmod(index + self.sources[source].first_sequence,
                               self._corpora[source].num_rows)

    def locate(self, g: int) -> tuple[int, int]:
        """Return (source number, row of that corpus) of row g."""
        source, epoch, position = self._place(g)
        order = self.sources[source].order or (self.seed, source)
        return source, _permutation(self._corpora[source].num_rows, (*order, epoch))[position]

    def __getitem__(self, g: int) -> Row:
        return self.build(g, self.read(g))

    def read(self, g: int) -> list[np.ndarray]:
        """Return the stored segments of row g: all of a row that needs the disk; thread-safe."""
        source, row = self.locate(g)
        return self._corpora[source].stored_row(row)

    def build(self, g: int, stored: list[np.ndarray]) -> Row:
        """Return row g from the segments that `read` has given."""
        if self.mask.final_rate is not None and not self._rows_of_run:
            raise UserError("objective.mask.final_rate: the rate depends on the place of a "
                            "sequence in a run, and this is none; name a run file, or leave it out")
        last = self._rows_of_run - 1
        return self._build(stored, g, self.locate(g), g / last if last > 0 else 0.0, self.draw(g))

    def draw(self, g: int) -> int:
        """Return which stored sample row g takes: by its epoch, or by its place in the run."""
        source, epoch, _ = self._place(g)
        replaced = self._replaced[source]
        if not replaced:
            return 0
        draws = len(replaced.manifest.temperatures)
        if self._draws_by == "run":
            return min(draws - 1, g * draws // max(1, self._rows_of_run))
        return epoch % draws

    def natural_row(self, row: int) -> Row:
        """Return row `row` of the first source as stored; masks are keyed by (seed, row)."""
        return self._build(self._corpora[0].stored_row(row), row, (0, row), run_fraction=1.0)

    def _build(self, stored: list[np.ndarray], g: int, place: tuple[int, int], run_fraction: float,
               draw: int = 0) -> Row:
        source, row = place
        corpus, replaced, size = self._corpora[source], self._replaced[source], len(self._special)
        ids, segments, positions = frame_segments(stored, self.seq_len, self._cls_id, self._sep_id,
                                                  self.attend_across_documents, self._pad_id)
        word_start, flipped = self._word_start, None
        if corpus.manifest.words:
            word_start, flipped = self._own_words, ids >= size
            ids[flipped] -= size
        largest = int(ids.max())
        if largest >= size or (ids == self._mask_id).any():
            raise UserError(
                f"{corpus.place(row)}: token id {largest if largest >= size else self._mask_id} is "
                f"not one of the {size} ids of the tokenizer (sequence {g} of the run); run "
                f"data_prep/verify.py {corpus.path} --verify full and copy the damaged shard again")
        if replaced:
            return Row(g, *replaced.apply(draw, *corpus.shard_row(row), ids), segments, positions,
                       slots=self.seq_len)
        rate = self.mask.rate_at(run_fraction)
        slots = self.mask.slots(self.seq_len, rate)
        rng = np.random.Generator(np.random.Philox(key=[self.seed, g]))
        input_ids, labels = mask_row(
            ids, word_start, self._character_start, self._special, self.mask, self._mask_id, rng,
            pad_id=self._pad_id, rate=rate, flipped_L=flipped, rare=self._rare)
        return Row(g, input_ids, labels, segments, positions, slots)


def frame_segments(stored: list[np.ndarray], seq_len: int, cls_id: int, sep_id: int,
                   attend_across_documents: bool, pad_id: int = 0
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids i64[L], segments i32[L], positions i32[L]) of [CLS] segment [SEP] [CLS] ...

    `segments` numbers them and positions restart in each, unless `attend_across_documents`: then
    the row is one segment with positions 0, 1, 2, ... as in the official preparation.
    """
    ids = np.full(seq_len, pad_id, dtype=np.int64)
    segments = np.zeros(seq_len, dtype=np.int32)
    positions = np.zeros(seq_len, dtype=np.int32)
    offset = 0
    for number, segment in enumerate(stored, start=1):
        end = offset + len(segment) + 2
        ids[offset] = cls_id
        ids[offset + 1 : end - 1] = segment
        ids[end - 1] = sep_id
        segments[offset:end] = number
        positions[offset:end] = np.arange(end - offset)
        offset = end
    if attend_across_documents:
        segments[:offset] = 1
        positions[:offset] = np.arange(offset)
    return ids, segments, positions


def eval_sequences(path: str, tokenizer, *, eval_seed: int, num_rows: int | None = None,
                   replaced: str = "", **options) -> list[Row]:
    """Return `num_rows` rows of a held-out corpus, spread evenly over it, with fixed masks.

    They are the same for every checkpoint and world size. None means all; UserError if the corpus
    has fewer than `num_rows`. Options: see `RowDataset`.
    """
    dataset = RowDataset([SourceConfig(path=path, replaced=replaced)], tokenizer, seed=eval_seed,
                         **options)
    available = dataset.num_rows[path]
    count = available if num_rows is None else num_rows
    if count > available:
        raise UserError(
            f"{path}: {num_rows} evaluation sequences asked for, but it has {available} of "
            f"{dataset.seq_len} tokens; ask for fewer (train.eval_sequences = {available}, "
            "evaluate.py --sequences), or hold out more documents (tokenize_corpus.py "
            "--heldout_share)")
    rows = [(2 * number + 1) * available // (2 * count) for number in range(count)]
    return [dataset.natural_row(row) for row in rows]


@dataclass
class Batch:
    """A micro-batch. rows i64[B]; input_ids, labels, positions i64[B, L]; segments i32[B, L];
    target_positions i64[B, M]: columns of the masked positions in order, then that of a column
    without a target, whose label is -100: batches of one shape, whatever is masked.
    run_fraction: how much of the run is done before its step; 1 outside of a run, as at its end.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    target_positions: torch.Tensor
    num_targets: int
    num_tokens: int
    run_fraction: float = 1.0

    def to(self, device, copy: bool = False) -> "Batch":
        """Return the batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True, copy=copy))

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory, which a copy to a GPU does not wait for."""
        return self._map(torch.Tensor.pin_memory)

    def as_arrays(self) -> "Batch":
        """Return the batch with NumPy arrays for tensors: how it travels between processes."""
        return self._map(torch.Tensor.numpy)

    def as_tensors(self) -> "Batch":
        """Return the batch with tensors again."""
        return self._map(torch.from_numpy, np.ndarray)

    def _map(self, function, kind: type = torch.Tensor) -> "Batch":
        return replace(self, **{field.name: function(value) for field in fields(self)
                                if isinstance(value := getattr(self, field.name), kind)})


def collate(rows: list[Row]) -> Batch:
    """Return the batch of `rows`, in their order."""
    labels_BL = np.stack([row.labels for row in rows])
    segments_BL = np.stack([row.segments for row in rows])
    row_T, column_T = np.nonzero(labels_BL != IGNORE)
    counts_B = np.bincount(row_T, minlength=len(rows))
    slots, most = max(1, *(row.slots for row in rows)), int(counts_B.max())
    if most > slots:
        more = _MORE_SLOTS if slots > 1 else 1
        slots = min(slots + -(-(most - slots) // more) * more, labels_BL.shape[1])
    before_B = np.cumsum(counts_B) - counts_B
    slot_T = np.arange(len(row_T)) - before_B[row_T]
    unlabeled_B1 = (labels_BL == IGNORE).argmax(1)[:, None]
    target_positions_BM = np.repeat(unlabeled_B1, slots, axis=1)
    target_positions_BM[row_T, slot_T] = column_T
    return Batch(
        rows=torch.tensor([row.row for row in rows], dtype=torch.int64),
        input_ids=torch.from_numpy(np.stack([row.input_ids for row in rows])),
        labels=torch.from_numpy(labels_BL), segments=torch.from_numpy(segments_BL),
        positions=torch.from_numpy(np.stack([row.positions for row in rows]).astype(np.int64)),
        target_positions=torch.from_numpy(target_positions_BM), num_targets=len(row_T),
        num_tokens=int(np.count_nonzero(segments_BL)))
