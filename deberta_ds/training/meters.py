"""Timers of a run: speed, time per activity, goodput, how often to save, slow hosts, hardware and
memory.
"""

import importlib.util
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from deberta_ds.base.numbers import format_duration
from deberta_ds.checkpoint.find import RunRecord
from deberta_ds.cluster import dist, lock
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.tracking.log import read_metrics


# Speed of a run: tokens/s, FLOP/s, MFU and time to go.
#
# MFU is model FLOPs (`model.flops`: forward + backward, no recomputation) over the dense peak of
# the card in the precision of the matmuls. A CPU, or a card that is not listed, has FLOP/s alone.
class SpeedMeter:
    """Time and tokens since the last reading; evaluation and saving are left out."""

    def __init__(self, peak: float | None, world_size: int, sequences_seen: int):
        """`sequences_seen` are those of the run before this process."""
        self._peak, self._world_size = peak, world_size
        self._seconds = 0.0
        self._sequences_seen, self._tokens = sequences_seen, 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Let time run."""
        self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop time until the next start."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
        self._started = None

    def count(self, tokens: float) -> None:
        """Count tokens of this process; a resumed line holds some of an earlier one, too."""
        self._tokens += tokens

    def read(self, sequences_seen: int, rows_of_run: int, flops_per_token: float
             ) -> dict[str, float | None]:
        """Return the speed since the last reading, and reset."""
        self.pause()
        tokens, seconds = self._tokens, max(self._seconds, 1e-9)
        rows = max(sequences_seen - self._sequences_seen, 1)
        flops = flops_per_token * tokens / seconds
        self._seconds, self._sequences_seen, self._tokens = 0.0, sequences_seen, 0.0
        self.start()
        return {"tokens_per_second": tokens / seconds, "flops_per_second": flops,
                "mfu": flops / (self._peak * self._world_size) if self._peak else None,
                "eta_seconds": seconds / rows * (rows_of_run - sequences_seen)}


# Where the time of a run goes: steps, saves, evaluations, starts and steps that were repeated.
#
# The parts of goodput while a job runs. The cost of a start and of a crash (the steps after the
# checkpoint, which are repeated) is recorded in the `start` and `resume` events of
# metrics.jsonl, which a resumed run keeps. The time in which no job ran is not known and not
# counted.
_called: list[float] = []  # when the last run was asked for, in a process of several


def count_from_here() -> None:
    """Count the start of a run from now on: a notebook runs for hours, and trains several times."""
    _called[:] = [time.monotonic()]


def seconds_since_start() -> float:
    """Return how long this process has been running, or its latest run."""
    if _called:
        return time.monotonic() - _called[0]
    started = lock.this_process().started / os.sysconf("SC_CLK_TCK")
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
    """Seconds per activity of one run, over all its starts; `saved` comes from the checkpoint."""

    def __init__(self, saved: dict[str, float], lost: float):
        self.seconds = {"saves": 0.0, "evaluations": 0.0} | saved
        self._lost = lost

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count the time of a block as that of `what`."""
        before = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - before

    def shares(self, training_seconds: float) -> dict[str, float]:
        """Return {what: share}, steps first; `training_seconds`: of steps, saves, evaluations."""
        whole = max(training_seconds + self._lost, 1e-9)
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
        return f"time: {text} of {format_duration(training_seconds + self._lost)}"


# How often to save, and what share of a cluster's time goes into steps that count.
#
# Young's interval (CACM 17(9), 1974; Daly, FGCS 22, 2006): a job that fails every M seconds on
# average and stands still for d seconds in a save loses d / t + (t / 2 + r) / M of its time when it
# saves every t seconds and needs r to start again; the least at t = sqrt(2 d M).
#
# Llama 3 (arXiv 2407.21783, section 3.3.4): 419 interruptions in 54 days on 16,384 H100.
HOURS_OF_A_GPU_BETWEEN_FAILURES = 50_000
COPY_BYTES_PER_SECOND = 2e9  # of a rank's state to host memory: pageable, with nothing next to it
STATE_BYTES = 12  # a parameter: fp32 weights and both moments
LEAST_SECONDS = 600.0  # below, nothing is gained and a shared file system has work all the time
_MOST_WRITING = 0.1  # share of the time in which a save is being written
RESTART_SECONDS = 300.0  # the watchdog, the launcher, start-up, resume


def seconds_between_failures(ranks: int) -> float:
    """Return the mean time between two failures of a job."""
    return 3600.0 * HOURS_OF_A_GPU_BETWEEN_FAILURES / ranks


def pause_of_copy(parameters: int, ranks: int) -> float:
    """Return the seconds in which a rank copies its part of the state."""
    return STATE_BYTES * parameters / ranks / COPY_BYTES_PER_SECOND


def save_interval(ranks: int, pause_seconds: float, write_seconds: float = 0.0) -> float:
    """Return the seconds after which a job of `ranks` best saves again.

    `pause_seconds`: training stands still; `write_seconds`: until the save is whole.
    """
    young = math.sqrt(2 * pause_seconds * seconds_between_failures(ranks))
    return max(young, LEAST_SECONDS, write_seconds / _MOST_WRITING)


def lost_share(ranks: int, pause_seconds: float, interval: float) -> float:
    """Return the share of the time that saves, repeated steps and restarts take."""
    failures = (interval / 2 + RESTART_SECONDS) / seconds_between_failures(ranks)
    return pause_seconds / interval + failures


# Which host is slower than the others.
#
# All ranks end a step together, so the time of a step says nothing of a single one. Each measures
# the time in which it waits for nobody: until its rows are there, and the forward passes (on a GPU
# by the device's own clock). Under ZeRO-3 forward passes wait for weights of others, so less is
# seen there. One gather of a number a rank for each line of the log.
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
        """Count the time of a block as work of this rank's processor."""
        before = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - before

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time of a block as work of this rank, on a GPU the GPU's."""
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
        """Return the seconds and start from zero; after a step, whose end waited for the device."""
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
    name = max(means, key=means.__getitem__)
    usual = statistics.median(means.values())
    return Slowest(name, means[name] / usual - 1.0 if usual > 0 else 0.0)


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


# What a run runs on, for its log and its page: hardware, commit of the source, memory.
def hardware(device: torch.device) -> str:
    """Return the name of one rank's processor or GPU."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    name = re.sub(r"\((R|TM)\)| Processor\b| CPU\b", "", names[0]) if names else ""
    return " ".join(name.split()) if names else platform.processor() or platform.machine()


def source() -> dict[str, str]:
    """Return commit ("+" if files changed) and branch of this package's checkout, "" if none."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *words], text=True,
                              capture_output=True, timeout=20, check=True)
        return done.stdout.strip()

    with suppress(OSError, ValueError, subprocess.SubprocessError):
        package = Path(__file__).resolve().parents[1].relative_to(git("rev-parse",
                                                                      "--show-toplevel"))
        if git("ls-files", f":/{package}/__init__.py"):  # else somebody else's repository
            changed = git("status", "--porcelain", "--untracked-files=no")
            return {"commit": git("rev-parse", "HEAD") + ("+" if changed else ""),
                    "branch": git("branch", "--show-current")}
    return {"commit": "", "branch": ""}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this rank has held: on its GPU, or resident on a CPU."""
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def machine_load(device: torch.device) -> dict[str, float]:
    """Return this rank's peak memory, the memory in use on its node, and shares of its processors.

    CPU: busy since the last call; GPU: busy lately, where the driver's library is installed.
    """
    load = {"peak_memory_bytes": float(peak_memory_bytes(device)),
            "node_memory_bytes": float(psutil.virtual_memory().used),
            "cpu_share": psutil.cpu_percent() / 100}
    if device.type == "cuda" and importlib.util.find_spec("pynvml"):
        load["gpu_share"] = torch.cuda.utilization(device) / 100
    return load
