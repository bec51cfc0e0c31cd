"""The clocks of a run, paused together while it does something else than a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.train.stragglers import WorkMeter
from deberta_ds.train.throughput import SpeedMeter
from deberta_ds.train.time_use import TimeUse


@dataclass(frozen=True)
class Meters:
    speed: SpeedMeter
    time_use: TimeUse
    work: WorkMeter
    watchdog: Watchdog

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count the time as `what` ("saves" or "evaluations"), not as steps; the watchdog waits."""
        self.speed.pause()
        with self.watchdog.patience(), self.time_use.during(what):
            yield
        self.speed.start()
