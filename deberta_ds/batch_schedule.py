"""How many rows each update has: global_batch_rows, which it may reach in equal stairs.

Early in a run a small batch teaches as much as a large one, from fewer rows (arXiv 2505.23971;
ModernBERT's recipe). The stairs are a function of the run file alone: at every number of ranks the
same update has the same rows.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from deberta_ds.config import TrainConfig
from deberta_ds.validation import ConfigError


@dataclass(frozen=True)
class Stretch:
    """Successive updates with equally many rows."""

    first_row: int  # of the run
    rows: int  # of each update
    steps: int


def stretches(train: TrainConfig, start: int, end: int) -> list[Stretch]:
    """Return the stretches of steps `start` .. `end` - 1, in order."""
    found, row, step = [], 0, 0
    for rows, last in _stairs(train):
        first, until = max(step, start), min(last, end)
        if first < until:
            found.append(Stretch(row + (first - step) * rows, rows, until - first))
        row, step = row + (last - step) * rows, last
    return found


@lru_cache(maxsize=8)
def _stairs(train: TrainConfig) -> list[tuple[int, int]]:
    """Return (rows of an update, the step before which there are that many), in order."""
    first, full = train.first_batch_rows or train.global_batch_rows, train.global_batch_rows
    jumps = full // first - 1
    ends = [(number * first, -(-number * train.batch_growth_steps // jumps))
            for number in range(1, jumps + 1)]
    return [*ends, (full, train.steps)]


def rows_before(train: TrainConfig, step: int) -> int:
    """Return the rows of all updates before `step`, which is where its own begin."""
    return sum(one.rows * one.steps for one in stretches(train, 0, step))


def rows_of_run(train: TrainConfig) -> int:
    """Return the rows of all updates of a run."""
    return rows_before(train, train.steps)


def micro_batches(rows: int, world_size: int, micro_batch_rows: int) -> int:
    """Return how many forwards a rank makes in an update of `rows`: as few as may be.

    Their sizes differ by one row at most.
    """
    return math.ceil(rows // world_size / micro_batch_rows)


def check_ranks(train: TrainConfig, world_size: int, start: int) -> None:
    """Raise ConfigError unless the rows of every update from step `start` on divide by the ranks.

    The full batch is checked with the micro-batches (deepspeed_config.accumulation_steps).
    """
    for one in stretches(train, start, min(train.batch_growth_steps, train.steps)):
        if one.rows % world_size:
            raise ConfigError(
                f"train.first_batch_rows = {train.first_batch_rows}: an update of {one.rows} rows "
                f"is still to come, and {world_size} ranks cannot share them equally; a new run "
                "takes a first_batch_rows that they divide, this one fewer ranks until step "
                f"{train.batch_growth_steps:,}")
