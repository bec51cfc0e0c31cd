"""Which rank reads which rows, and the DataLoader that reads them ahead.

Step k of rank r covers rows  start_row + k*G + r*G/W + (0 .. G/W - 1), cut into micro-batches in
order. Rank, world size, micro-batch size and number of workers decide only who computes which row:
the rows themselves are functions of their number.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from deberta_ds.data.batch import Batch, Row, collate
from deberta_ds.data.rows import RowDataset
from deberta_ds.errors import UserError


def build_loader(
    dataset: RowDataset,
    *,
    start_row: int,
    global_batch_rows: int,
    micro_batch_rows: int,
    rank: int,
    world_size: int,
    num_workers: int,
    num_steps: int,
) -> Iterator[Batch]:
    """Return an iterator over the micro-batches of `num_steps` steps, in order.

    UserError if global_batch_rows is not a multiple of world_size * micro_batch_rows.
    """
    if micro_batch_rows < 1 or global_batch_rows % (world_size * micro_batch_rows):
        raise UserError(
            f"global_batch_rows {global_batch_rows} is not a multiple of world_size {world_size} x "
            f"micro_batch_rows {micro_batch_rows}; change one of the three"
        )
    rows = RankRows(start_row, global_batch_rows, micro_batch_rows, rank, world_size, num_steps)
    loader = DataLoader(
        _Reader(dataset),
        batch_sampler=rows,
        collate_fn=_collate,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return _unwrap(loader)


class RankRows:
    """The row numbers of each micro-batch of one rank, in order: an iterable of lists."""

    def __init__(self, start_row, global_batch_rows, micro_batch_rows, rank, world_size, num_steps):
        self._micro, self._per_rank = micro_batch_rows, global_batch_rows // world_size
        self._first = start_row + rank * self._per_rank
        self._global, self._steps = global_batch_rows, num_steps

    def __len__(self) -> int:
        return self._steps * (self._per_rank // self._micro)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._steps):
            base = self._first + step * self._global
            for offset in range(0, self._per_rank, self._micro):
                yield list(range(base + offset, base + offset + self._micro))


class _Reader:
    """Reads the rows of one micro-batch. A UserError travels as a value: raised in a worker, it
    would reach the user wrapped in a traceback.
    """

    def __init__(self, dataset: RowDataset):
        self._dataset = dataset

    def __getitems__(self, numbers: list[int]) -> list[Row] | UserError:
        try:
            return [self._dataset[number] for number in numbers]
        except UserError as error:
            return error


def _collate(rows: list[Row] | UserError) -> Batch | UserError:
    return rows if isinstance(rows, UserError) else collate(rows)


def _unwrap(loader: DataLoader) -> Iterator[Batch]:
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch
