"""Which host is slower than the others.

All ranks end a step together, so the time of a step says nothing of a single one. Each measures the
time in which it waits for nobody: until its rows are there, and the forward passes (on a GPU by the
device's own clock). Under ZeRO-3 forward passes wait for weights of others, so less is seen there.
One gather of a number a rank for each line of the log.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SHOWN_SHARE = 0.1  # slower than the median by this much is worth a line


@dataclass(frozen=True)
class Slowest:
    """The slowest host (one host: rank) and by which share it is slower than the median."""

    name: str
    share: float


class WorkMeter:
    """Seconds in which this rank worked alone since the last reading."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple] = []  # begin and end on the GPU, which are read later

    @contextmanager
    def loading(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - before

    @contextmanager
    def computing(self) -> Iterator[None]:
        if not self._on_gpu:
            with self.loading():
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def read(self) -> float:
        """Return the seconds and begin anew; after a step, whose end waited for the device."""
        seconds = self._seconds + sum(begin.elapsed_time(end) / 1000 for begin, end in self._events)
        self._seconds, self._events = 0.0, []
        return seconds


def find_slowest(seconds: Sequence[float], hosts: Sequence[str]) -> Slowest | None:
    """Return the slowest host of `seconds` and host names by rank; None on one rank."""
    if len(seconds) < 2:
        return None
    by_name: dict[str, list[float]] = {}
    one_host = len(set(hosts)) == 1
    for rank, (own, host) in enumerate(zip(seconds, hosts, strict=True)):
        by_name.setdefault(f"{host}, rank {rank}" if one_host else host, []).append(own)
    means = {name: statistics.fmean(values) for name, values in by_name.items()}
    name = max(means, key=means.get)
    usual = statistics.median(means.values())
    return Slowest(name, means[name] / usual - 1.0 if usual > 0 else 0.0)
