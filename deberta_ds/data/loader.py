"""Which rank reads which rows, and the DataLoader that reads them ahead.

An update of G rows from row f on: rank r of W covers rows  f + r*G/W + (0 .. G/W - 1), cut into
micro-batches in order. Rank, world size, micro-batch size and number of workers decide only who
computes which row: the rows themselves are functions of their number.

Where a row takes long to read (a network file system), threads read the next rows meanwhile: their
numbers are known. Batches come from the workers as NumPy arrays: torch would pass each tensor as a
descriptor, and a worker that has none left would leave the training process waiting for ever.

Workers ignore the signals that ask a run to stop: a launcher sends them to every process, and the
last step still needs its rows. The rank ends its workers, by SIGKILL where it leaves early (they
ignore what Python would send at exit); the kernel does when it is killed.
"""

import atexit
import errno
import os
import signal
import time
import weakref
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from deberta_ds.base.errors import UserError
from deberta_ds.cluster import signals
from deberta_ds.config.batch_schedule import Phase, micro_batches
from deberta_ds.data.rows import Batch, RowDataset, collate

_SLOW_SECONDS = 0.5e-3  # mean time to read a row from which threads are worth their cost
_READ_THREADS = 16
_ROWS_AHEAD = 64


def build_loader(dataset: RowDataset, *, phases: list[Phase], micro_batch_size: int, rank: int,
                 world_size: int, num_workers: int) -> Iterator[Batch]:
    """Return an iterator over one rank's micro-batches of the updates in `phases`, in order.

    Of each update `batch_schedule.micro_batches`. UserError if the ranks cannot share one equally.
    """
    for one in phases:
        if one.rows % world_size:
            raise UserError(f"an update of {one.rows} sequences is not a multiple of the "
                            f"{world_size} ranks; change one of the two")
    rows = RankRows(phases, micro_batch_size, rank, world_size)
    loader = DataLoader(
        Reader(dataset, rows),
        batch_size=None,  # an item is a micro-batch
        collate_fn=lambda batch: batch,  # torch's own would turn its arrays into tensors
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=_live_with_the_rank,
        # Workers share the end of the rank, whose children they are; Python 3.14's default is a
        # server that starts them.
        multiprocessing_context="fork" if num_workers else None)
    return _unwrap(loader)


class RankRows:
    """The row numbers of each micro-batch of one rank, in order."""

    def __init__(self, phases: list[Phase], micro_batch_size: int, rank: int, world_size: int):
        self._phases, self._rank, self._world_size = phases, rank, world_size
        self._counts = [micro_batches(one.rows, world_size, micro_batch_size) for one in phases]
        totals = (one.steps * count for one, count in zip(phases, self._counts, strict=True))
        self._starts = [0, *accumulate(totals)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> range:
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = bisect(self._starts, number) - 1
        phase, count = self._phases[place], self._counts[place]
        step, part = divmod(number - self._starts[place], count)
        of_a_rank = phase.rows // self._world_size
        first = phase.first_row + step * phase.rows + self._rank * of_a_rank
        return range(first + part * of_a_rank // count, first + (part + 1) * of_a_rank // count)


class Reader:
    """The micro-batches of one rank by number. A UserError travels as a value: raised in a worker,
    it would reach the user wrapped in a traceback.
    """

    def __init__(self, dataset: RowDataset, rows: RankRows):
        self._dataset, self._rows = dataset, rows
        self._mean_seconds = 0.0
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[int, list[Future]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            stored = self._read(number)
            rows = [self._dataset.build(g, found)
                    for g, found in zip(self._rows[number], stored, strict=True)]
        except UserError as error:
            return error
        batch = collate(rows)
        return batch.as_arrays() if get_worker_info() else batch

    def _read(self, number: int) -> list[list[np.ndarray]]:
        """Return the stored document segments of each row of a micro-batch."""
        if self._threads:
            return self._read_ahead(self._threads, number)
        rows, start = self._rows[number], time.perf_counter()
        stored = [self._dataset.read(g) for g in rows]
        seconds = (time.perf_counter() - start) / len(rows)
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
        if self._mean_seconds > _SLOW_SECONDS:
            self._threads = ThreadPoolExecutor(_READ_THREADS)
        return stored

    def _read_ahead(self, threads: ThreadPoolExecutor, number: int) -> list[list[np.ndarray]]:
        """As `_read`, while threads read the micro-batches that this worker will give next."""
        info = get_worker_info()
        stride = info.num_workers if info else 1
        ordered = 0
        for later in range(number, len(self), stride):
            if ordered > _ROWS_AHEAD:
                break
            ordered += len(self._rows[later])
            if later not in self._ahead:
                self._ahead[later] = [threads.submit(self._dataset.read, g)
                                      for g in self._rows[later]]
        return [future.result() for future in self._ahead.pop(number)]


def _live_with_the_rank(_worker: int) -> None:
    signals.ignore()
    signals.end_with_parent()  # left alone, a worker with a full pipe would wait for ever


def _unwrap(loader: DataLoader) -> Iterator[Batch]:
    # torch's own handler raises in the middle of a step, wherever the main thread is just then.
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        batches = iter(loader)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        raise UserError(f"/dev/shm is full: the semaphores of loader processes (data.workers = "
                        f"{loader.num_workers}) lie there; remove what dead processes have left in "
                        "it, make it larger (docker run --shm-size=8g), or set data.workers = 0"
                        ) from None
    if loader.num_workers:
        signal.signal(signal.SIGCHLD, handler)
        atexit.register(_end_workers, weakref.ref(batches))
    try:
        yield from _checked(batches)
    finally:
        _end_workers(weakref.ref(batches))


def _end_workers(reference: weakref.ref) -> None:
    for worker in getattr(reference(), "_workers", []):
        worker.kill()


def _checked(batches) -> Iterator[Batch]:
    while True:
        try:
            batch = next(batches, None)
        except (RuntimeError, OSError, EOFError) as error:
            raise _why_a_worker_died(batches) or error from None
        if batch is None:
            return
        if isinstance(batch, UserError):
            raise batch
        batch = batch.as_tensors()
        # Pinning makes a CUDA context, which a run on the CPU of a machine with GPUs must not. It
        # is done here: torch's own thread may wait for ever for what a killed worker had begun.
        is_on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
        yield batch.pin_memory() if is_on_gpu else batch


def _why_a_worker_died(batches) -> UserError | None:
    """Return what ended a worker of the DataLoader's iterator, or None if all live."""
    workers = getattr(batches, "_workers", [])
    for worker in workers:
        worker.join(1.0)  # its connections break a moment before it has an exit code
    codes = [worker.exitcode for worker in workers]
    code = next((code for code in codes if code is not None), None)
    if code is None:
        return None
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return UserError(f"a loader process has died (data.workers = {len(codes)}): it {how}. SIGKILL "
                     "is usually the kernel, for its memory: lower data.workers (0: the rank "
                     "itself reads); the same command goes on from the last checkpoint")
