"""One row (numpy) and one micro-batch (torch) of training data.

Shape suffixes: B batch, L length, M target slots, T real targets.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from deberta_ds.data.masking import IGNORE, LONGEST_WORD, word_spans


@dataclass(frozen=True)
class Row:
    """One packed and masked row.

    row: global row number g. input_ids i64[L]. labels i64[L]: original id at masked positions, -100
    elsewhere. segments i32[L]: 0 = padding, 1.. = piece number. positions i32[L].
    """

    row: int
    input_ids: np.ndarray
    labels: np.ndarray
    segments: np.ndarray
    positions: np.ndarray


@dataclass
class Batch:
    """A micro-batch. rows i64[B]; input_ids, labels, positions i64[B, L]; segments i32[B, L];
    target_positions i64[B, M]: columns of the masked positions in order, padded with 0;
    target_index i64[T]: flat indices into [B * M] of the real targets.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    target_positions: torch.Tensor
    target_index: torch.Tensor
    num_targets: int
    num_tokens: int

    def to(self, device, non_blocking: bool = True) -> "Batch":
        """Return the batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory (called by the DataLoader when pinning is on)."""
        return self.as_tensors()._map(torch.Tensor.pin_memory)

    def as_arrays(self) -> "Batch":
        """Return the batch with NumPy arrays for tensors: how it travels between processes."""
        return self._map(torch.Tensor.numpy)

    def as_tensors(self) -> "Batch":
        """Return the batch with tensors again."""
        return self._map(torch.from_numpy, np.ndarray)

    def _map(self, function, kind: type = torch.Tensor) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, kind):
                values[name] = function(value)
        return Batch(**values)


def collate(rows: list[Row]) -> Batch:
    """Return the batch of `rows`, in their order."""
    labels_BL = np.stack([row.labels for row in rows])
    segments_BL = np.stack([row.segments for row in rows])
    row_T, column_T = np.nonzero(labels_BL != IGNORE)
    counts_B = np.bincount(row_T, minlength=len(rows))
    slots = max(1, int(counts_B.max()))
    before_B = np.cumsum(counts_B) - counts_B
    slot_T = np.arange(len(row_T)) - before_B[row_T]
    target_positions_BM = np.zeros((len(rows), slots), dtype=np.int64)
    target_positions_BM[row_T, slot_T] = column_T
    return Batch(
        rows=torch.tensor([row.row for row in rows], dtype=torch.int64),
        input_ids=torch.from_numpy(np.stack([row.input_ids for row in rows])),
        labels=torch.from_numpy(labels_BL),
        segments=torch.from_numpy(segments_BL),
        positions=torch.from_numpy(np.stack([row.positions for row in rows]).astype(np.int64)),
        target_positions=torch.from_numpy(target_positions_BM),
        target_index=torch.from_numpy(row_T * slots + slot_T),
        num_targets=len(row_T),
        num_tokens=int(np.count_nonzero(segments_BL)),
    )


def check_batch(batch: Batch, tokenizer) -> None:
    """AssertionError naming the row and the broken invariant, if there is one (not for the masks
    of "deberta_window", whose words are others).

    Invariants: labels are -100 or an ordinary id; positions without a label keep their id; targets
    form whole words, unless those are too long; segments are contiguous from 1, start with [CLS]
    and end with [SEP]; padding only at the end, with [PAD]; positions count up from 0 in each
    segment; the target index agrees.
    """
    word_start, special = tokenizer.word_starts(), tokenizer.is_special()
    labels_BL = batch.labels.cpu().numpy()
    inputs_BL = batch.input_ids.cpu().numpy()
    segments_BL, positions_BL = batch.segments.cpu().numpy(), batch.positions.cpu().numpy()
    for b, row in enumerate(batch.rows.tolist()):
        labels, inputs = labels_BL[b], inputs_BL[b]
        target = labels != IGNORE
        _check(row, not special[labels[target]].any(), "a special token is a target")
        _check(row, bool((inputs < tokenizer.size).all() and (inputs >= 0).all()), "id range")
        original = np.where(target, labels, inputs)
        _check(row, not (original == tokenizer.mask_id).any(), "[MASK] without a label")
        _check_segments(row, original, segments_BL[b], positions_BL[b], tokenizer)
        starts, lengths = word_spans(original, word_start, special[original])
        hidden = np.add.reduceat(target, starts, dtype=np.int64) if len(starts) else lengths
        # `target` is False between words, so that a word's sum reaches to the next word's start.
        split = (hidden > 0) & (hidden < lengths)
        split &= lengths <= min(LONGEST_WORD, int(target.sum()))
        _check(row, not split.any(), "targets do not form whole words")
        columns = np.flatnonzero(target)
        stored = batch.target_positions[b, : len(columns)].cpu().numpy()
        _check(row, np.array_equal(columns, stored), "target_positions disagree with labels")
    _check(-1, batch.num_targets == int((labels_BL != IGNORE).sum()), "num_targets")
    _check(-1, batch.num_tokens == int((segments_BL > 0).sum()), "num_tokens")
    flat = np.take_along_axis(labels_BL, batch.target_positions.cpu().numpy(), 1).reshape(-1)
    wanted = labels_BL[labels_BL != IGNORE]
    _check(-1, np.array_equal(flat[batch.target_index.cpu().numpy()], wanted), "target_index")


def _check_segments(row: int, original, segments, positions, tokenizer) -> None:
    real = int((segments > 0).sum())
    _check(row, bool((segments[:real] > 0).all()), "padding inside the row")
    _check(row, bool((original[real:] == tokenizer.pad_id).all()), "padding that is not [PAD]")
    steps = np.diff(segments[:real], prepend=0)
    _check(row, real > 0 and set(steps.tolist()) <= {0, 1}, "segments are not contiguous from 1")
    starts = np.flatnonzero(steps)
    _check(row, bool((original[starts] == tokenizer.cls_id).all()), "segment without [CLS]")
    ends = np.append(starts[1:], real) - 1
    _check(row, bool((original[ends] == tokenizer.sep_id).all()), "segment without [SEP]")
    expected = np.arange(real) - np.repeat(starts, ends + 1 - starts)
    _check(row, np.array_equal(positions[:real], expected), "positions do not restart at 0")


def _check(row: int, holds: bool, invariant: str) -> None:
    if not holds:
        raise AssertionError(f"row {row}: {invariant}")
