"""A stuck or dead rank is named, the stacks of the live ones are shown, and the job ends.

A frozen rank leaves the others in a collective, which reports nothing for ten minutes and then
names nobody. So a thread of every rank writes a small heartbeat file, OUT/heartbeats/rank-00000,
and watches its own rank's progress. When no step ends for long enough, it reads all heartbeats
twice: ranks whose counter did not move are frozen, dead or cut off. Files are used, not a store on
rank 0, because that rank may be the frozen one, and clocks are never compared. Files may go over a
network of their own, so meanwhile every other host is also connected to: a host that does not
answer is named, though its heart beats.

Steps that are slow by nature do not fire it: the limit is at least four times the slowest ordinary
step so far, and the first step, evaluations and saves have thirty times the limit. When all ranks
are alive, the machine may just be busy: their stacks are shown, and the job ends only after ten
times the limit.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deberta_ds.cluster import ending
from deberta_ds.cluster.reach import Door, Knock
from deberta_ds.errors import UserError

EXIT_STUCK = 70  # EX_SOFTWARE of sysexits.h: restart from the last checkpoint
DIRECTORY = "heartbeats"

TICKS = 20  # heartbeats in train.watchdog_seconds
_LIMIT_SHARE = 0.7  # of train.watchdog_seconds; the rest is for reading and reporting
_READ_TICKS = 3  # heartbeats between the two readings
_SLOW_STEPS = 4  # times the slowest ordinary step
_ALIVE = 10  # times the limit, while every rank's heart beats
_PATIENCE = 30  # times the limit, for what is slow by nature


@dataclass(frozen=True)
class Beat:
    """One heartbeat file: how often it was written, the rank's last finished step, and where."""

    tick: int
    step: int
    pid: int
    host: str
    address: str  # that the rank listens on


class Watchdog:
    """The heartbeat thread of one rank; `seconds` = 0 makes it do nothing."""

    def __init__(self, out_dir: str | Path, seconds: float, rank: int, world_size: int, step: int):
        self._directory = Path(out_dir) / DIRECTORY
        self._rank, self._world_size = rank, world_size
        self._seconds, self._interval = seconds, seconds / TICKS
        self._step, self._tick = step, 0
        self._progress = time.monotonic()  # when the last step ended
        self._slowest = 0.0
        self._factor = _PATIENCE  # the first step compiles, connects and warms up
        self._bad_hosts: set[str] = set()
        self._ended = threading.Event()
        self._door = Door() if seconds else None  # no watch, no open port

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the block; an exception in it (a broken connection) also names silent ranks."""
        if not self._seconds:
            yield
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write()
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        except UserError:
            raise
        except Exception:
            self._say(self._report("a collective or a kernel failed", self._suspects()))
            raise
        finally:
            self._ended.set()
            thread.join()
            self._door.close()
            self._path(self._rank).unlink(missing_ok=True)

    def beat(self, step: int) -> None:
        """Note that `step` steps are done."""
        now = time.monotonic()
        if self._factor == 1:
            self._slowest = max(self._slowest, now - self._progress)
        self._step, self._progress, self._factor = step, now, 1

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Allow the block thirty times the time: an evaluation, a save."""
        self._progress, self._factor = time.monotonic(), _PATIENCE
        yield
        self._progress, self._factor = time.monotonic(), 1

    def _limit(self) -> float:
        return self._factor * max(_LIMIT_SHARE * self._seconds, _SLOW_STEPS * self._slowest)

    def _run(self) -> None:
        looked, looked_at = -1, 0.0  # the step that was last looked into, and after which silence
        while not self._ended.wait(self._interval):
            self._write()
            silence, limit = time.monotonic() - self._progress, self._limit()
            if silence > limit + (looked_at if looked == self._step else 0.0):
                self._look(silence, silence > _ALIVE * limit, first=looked != self._step)
                looked, looked_at = self._step, silence

    def _look(self, silence: float, too_long: bool, first: bool) -> None:
        """Report, show stacks, and end the process if a rank is not alive or it is too late."""
        culprits = self._suspects()
        fatal = bool(culprits) or too_long
        if not (fatal or first):
            return
        self._say(self._report(f"no step for {silence:.0f} s", culprits))
        with open(self._path(self._rank).with_suffix(".stack"), "w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        if fatal:
            ending.record(EXIT_STUCK, self._bad_hosts)
            self._ended.wait(2 * self._interval)  # the other live ranks are reporting, too
            self._exit()

    @staticmethod
    def _exit() -> None:
        os._exit(EXIT_STUCK)

    def _suspects(self) -> list[str]:
        """Return a line for each rank that is silent, behind the others, or on a lost host."""
        before = self._read_all()
        knock = Knock({beat.address for beat in _first_of_other_hosts(before)})
        for _ in range(_READ_TICKS):  # goes on beating: the others read ours now
            knock.wait(self._interval)
            self._write()
        knock.close()
        lost = {beat.host for beat in before.values() if beat.address in knock.unanswered}
        after = self._read_all()
        newest = max(beat.step for beat in after.values())
        lines = []
        for rank in range(self._world_size):
            beat = after.get(rank)
            if beat is None:
                lines.append(f"rank {rank}: NO HEARTBEAT FILE: ended, or out_dir is not shared")
                continue
            name = f"rank {rank} on {beat.host} (pid {beat.pid})"
            if rank != self._rank and before.get(rank) == beat:
                lines.append(f"{name}: SILENT: frozen, dead or cut off; last step {beat.step}")
                self._bad_hosts.add(beat.host)
            elif beat.host in lost:
                self._bad_hosts.add(beat.host)
                lines.append(f"{name}: NOT REACHED over the network; last step {beat.step}")
            elif beat.step < newest:
                lines.append(f"{name}: alive but BEHIND; last step {beat.step} of {newest}")
        return lines

    def _report(self, what: str, suspects: list[str]) -> str:
        lines = suspects or [f"all {self._world_size} ranks are alive: a busy machine, or a "
                             f"deadlock; compare their stacks ({self._directory}/*.stack)"]
        return (f"WATCHDOG: {what}; seen by rank {self._rank} on {socket.gethostname()} "
                f"(pid {os.getpid()}) after step {self._step}:\n  " + "\n  ".join(lines))

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank-{rank:05d}"

    def _write(self) -> None:
        self._tick += 1
        self._door.empty()
        temporary = self._path(self._rank).with_suffix(".tmp")
        try:
            temporary.write_text(f"{self._tick} {self._step} {os.getpid()} {socket.gethostname()} "
                                 f"{self._door.address}")
            os.replace(temporary, self._path(self._rank))
        except OSError:  # a full disk must not end the watch; the save itself reports it
            pass

    def _read_all(self) -> dict[int, Beat]:
        beats = {}
        for rank in range(self._world_size):
            try:
                tick, step, pid, host, address = self._path(rank).read_text().split()
            except FileNotFoundError:
                continue
            beats[rank] = Beat(int(tick), int(step), int(pid), host, address)
        return beats


def _first_of_other_hosts(beats: dict[int, Beat]) -> list[Beat]:
    """Return one rank's heartbeat of each other host."""
    first: dict[str, Beat] = {}
    for rank in sorted(beats):
        first.setdefault(beats[rank].host, beats[rank])
    first.pop(socket.gethostname(), None)
    return list(first.values())
