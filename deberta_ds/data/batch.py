"""One row (numpy) and one micro-batch (torch) of training data.

Shape suffixes: B batch, L length, M target slots, T real targets.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from deberta_ds.data.masking import IGNORE

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
