"""How many rows each update has: global_batch_size, which it may reach in equal stairs.

Early in a run a small batch teaches as much as a large one, from fewer rows (arXiv 2505.23971;
ModernBERT's recipe). The stairs are a function of the run file alone: at every number of ranks the
same update has the same rows.
"""

import math
from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache

from deberta_ds.config.run_config import TrainConfig


@dataclass(frozen=True)
class Phase:
    """Successive updates with equally many rows."""

    first_row: int  # of the run
    rows: int  # of each update
    steps: int


@lru_cache(maxsize=8)
def _whole_run(train: TrainConfig) -> tuple[list[int], list[Phase]]:
    """Return (first step of each, the phases) of a run, in order."""
    firsts, found, step, row = [], [], 0, 0
    while step < train.steps:
        rows, until = train.global_batch_size, train.steps
        if step < train.batch_warmup_steps:
            jumps = train.global_batch_size // train.initial_batch_size - 1
            number = 1 + step * jumps // train.batch_warmup_steps  # of the stair
            rows = number * train.initial_batch_size
            # The first step of the next one; without jumps there is none.
            until = min(until, -(-number * train.batch_warmup_steps // max(jumps, 1)))
        firsts.append(step)
        found.append(Phase(row, rows, until - step))
        row, step = row + (until - step) * rows, until
    return firsts, found


def phases(train: TrainConfig, start: int, end: int) -> list[Phase]:
    """Return the phases of steps `start` .. `end` - 1, in order."""
    found = []
    for first, one in zip(*_whole_run(train), strict=True):
        skipped, steps = max(0, start - first), min(one.steps, end - first)
        if skipped < steps:
            found.append(Phase(one.first_row + skipped * one.rows, one.rows, steps - skipped))
    return found


def rows_before(train: TrainConfig, step: int) -> int:
    """Return the rows of all updates before `step`, which is where its own begin."""
    firsts, found = _whole_run(train)
    place = bisect(firsts, step) - 1
    return found[place].first_row + (step - firsts[place]) * found[place].rows


def rows_of_run(train: TrainConfig) -> int:
    """Return the rows of all updates of a run."""
    return rows_before(train, train.steps)


def micro_batches(rows: int, world_size: int, micro_batch_size: int) -> int:
    """Return how many forwards a rank makes in an update of `rows`: as few as may be.

    Their sizes differ by one row at most.
    """
    return math.ceil(rows // world_size / micro_batch_size)


def problems_with_ranks(train: TrainConfig, world_size: int, start: int) -> list[str]:
    """Return what is wrong if the ranks cannot share every growing update from step `start` on.

    The full batch is checked with the micro-batches (engine/ds_config.accumulation_steps).
    """
    for one in phases(train, start, min(train.batch_warmup_steps, train.steps)):
        if one.rows % world_size:
            return [
                f"train.initial_batch_size = {train.initial_batch_size}: {world_size} ranks cannot "
                f"share an update of {one.rows} equally; take a multiple of the ranks, or, "
                f"in a run that has begun, fewer ranks until step {train.batch_warmup_steps:,}"]
    return []
