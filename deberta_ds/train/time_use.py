"""Where the time of a run goes: steps, saves, evaluations, starts and steps that were repeated.

The parts of goodput while a job runs. What a start costs, and what a crash has lost (the steps
after the checkpoint, which are taken again), stands in the `start` and `resume` events of
metrics.jsonl, which a resumed run keeps. The time in which no job ran is not known and not counted.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deberta_ds import dist
from deberta_ds.cluster import process
from deberta_ds.formats.run_record import RunRecord
from deberta_ds.numbers import format_duration
from deberta_ds.records import read_metrics


def seconds_since_start() -> float:
    """Return how long this process has been running."""
    started = process.look().started / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def lost_before(records: Sequence[dict]) -> float:
    """Return the seconds that earlier starts and repeated steps took, from metrics.jsonl."""
    return sum(record.get("lost_seconds") or 0.0 for record in records
               if record["kind"] == "event")


def repeated_seconds(records: Sequence[dict], checkpoint_seconds: float) -> float:
    """Return the training time after a checkpoint that a killed run had logged.

    What was logged before its last start has been counted by that start.
    """
    begins = [place for place, record in enumerate(records)
              if record.get("event") in ("start", "resume")]
    logged = (record.get("seconds") or 0.0 for record in records[begins[-1] if begins else 0:])
    return max(0.0, max(logged, default=0.0) - checkpoint_seconds)


def lost_seconds(path: Path, record: RunRecord | None) -> tuple[float, float]:
    """Return what earlier starts of a run have lost, and what this one has until now.

    `path` is its metrics.jsonl, as a killed run left it; `record` run.json of the checkpoint, None
    at step 0. Only rank 0's result counts.
    """
    lines = read_metrics(path) if dist.is_main() and path.exists() else []
    repeated = repeated_seconds(lines, record.seconds if record else 0.0)
    return lost_before(lines), repeated + seconds_since_start()


class TimeUse:
    """Seconds of one run, over all its starts; `saved` is what a checkpoint remembers."""

    def __init__(self, saved: dict[str, float], lost: float):
        self.seconds = {"saves": 0.0, "evaluations": 0.0} | saved
        self._lost = lost

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        before = time.monotonic()
        yield
        self.seconds[what] += time.monotonic() - before

    def shares(self, training_seconds: float) -> dict[str, float]:
        """Return {what: share}, steps first; `training_seconds`: of steps, saves, evaluations."""
        whole = self._whole(training_seconds)
        steps = max(0.0, training_seconds - sum(self.seconds.values()))
        parts = {"steps": steps} | self.seconds | {"starts and repeated steps": self._lost}
        return {name: seconds / whole for name, seconds in parts.items()}

    def record(self, training_seconds: float) -> dict[str, float]:
        """Return what metrics.jsonl holds: the seconds of each part but the steps, and goodput.

        The rest of a record's `seconds` are steps; goodput is their share of the run's time.
        """
        parts = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return parts | {"restarts_seconds": self._lost,
                        "goodput": self.shares(training_seconds)["steps"]}

    def line(self, training_seconds: float) -> str:
        """Return "time: steps 97.1%, saves 0.4%, ... of 3h 02m"."""
        shares = self.shares(training_seconds).items()
        text = ", ".join(f"{name} {share:.1%}" for name, share in shares)
        return f"time: {text} of {format_duration(self._whole(training_seconds))}"

    def _whole(self, training_seconds: float) -> float:
        return max(training_seconds + self._lost, 1e-9)
