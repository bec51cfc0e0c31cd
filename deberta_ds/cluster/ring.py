"""Hosts of a job in a ring: each writes its heartbeat and watches the next one.

So the work of a look does not grow with the job: one write and two reads for each host. A host
whose successor falls silent watches on until it meets a live one, twice as far each time, so that a
rack that lost its power is named whole. What a host concludes it writes to OUT/heartbeats/verdict,
which all hosts read.

The shared directory may be slow or sick, and that must not look like a dead host: writing and
reading have a thread each, an error while reading is no evidence, time in which this process did
not run does not count, and the patience is at least three times what this host's own write and read
have taken lately. A host is only missed once it has been seen.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deberta_ds.cluster import beats, neighbours

VERDICT = "verdict"

_SUSPICIOUS_INTERVALS = 2.5  # after which the host behind a silent one is watched as well
_LATELY = 10  # own writes and reads that are remembered
_END = "\nend of verdict\n"


@dataclass(frozen=True)
class Host:
    """The ranks of one host; `ranks` maps each to its process id, `addresses` to its door."""

    name: str
    ranks: dict[int, int]
    addresses: dict[int, str]

    @property
    def first_rank(self) -> int:
        return min(self.ranks)


@dataclass
class Watched:
    """What is known of another host."""

    host: Host
    beat: beats.HostBeat | None = None
    moves: int = 0  # new heartbeats since it is watched
    silent_seconds: float = 0.0  # in which this process looked, and there was nothing new
    looked_at: float = field(default_factory=time.monotonic)
    seen_at: float = 0.0  # when `beat` was new


class Ring:
    """This host's place in the ring; `hosts[mine]` is this host."""

    def __init__(self, out_dir: str | Path, job: str, hosts: list[Host], mine: int,
                 seconds: float, interval: float):
        self._out_dir, self._job, self.host = out_dir, job, hosts[mine]
        self._others = [Watched(host) for host in hosts[mine + 1:] + hosts[:mine]]
        self._seconds, self._interval = seconds, interval
        self._width = 1  # hosts that are watched now
        self._tick = 0
        self._write_seconds: deque[float] = deque([interval], _LATELY)
        self._read_seconds: deque[float] = deque([interval], _LATELY)
        self._verdict_path = Path(out_dir) / beats.DIRECTORY / VERDICT
        self.verdict = ""  # of any host

    def start(self, leads: Callable[[], bool], steps: Callable[[], dict[int, int]], address: str,
              ended: threading.Event) -> None:
        """Write and read in threads of their own while `leads()`; `steps()` are the live ranks'."""
        self._verdict_path.parent.mkdir(parents=True, exist_ok=True)
        if self.host.first_rank == 0:
            self._clear()

        def write() -> None:
            self._tick += 1
            beat = beats.HostBeat(self._job, self._tick, address, steps())
            beats.write_host(beats.host_path(self._out_dir, self.host.first_rank), beat)

        for name, work, seconds in (("write", write, self._write_seconds),
                                    ("read", self.look, self._read_seconds)):
            threading.Thread(target=self._repeat, args=(work, seconds, leads, ended),
                             name=f"watchdog-{name}", daemon=True).start()

    def _clear(self) -> None:
        """Leave an empty verdict and no host of an earlier job.

        The file must be there: a name that is missing is remembered by NFS clients for half a
        minute.
        """
        kept = {f"host-{watched.host.first_rank:05d}" for watched in self._others}
        try:
            for path in self._verdict_path.parent.glob("host-*"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)
            self._verdict_path.write_text("")
        except OSError:
            pass

    def _repeat(self, work: Callable[[], None], seconds: deque[float],
                leads: Callable[[], bool], ended: threading.Event) -> None:
        last = time.monotonic()
        while not ended.wait(self._interval):
            if leads():
                try:
                    work()
                except (OSError, ValueError):  # a full disk, a stale handle, no descriptor left
                    pass
            now = time.monotonic()
            seconds.append(now - last)
            last = now

    def patience_seconds(self) -> float:
        """Return the silence after which a host is missed."""
        own = max(self._write_seconds) + max(self._read_seconds)
        return max(neighbours.SILENT_SHARE * self._seconds, 3 * own)

    def look(self) -> None:
        """Read the verdict and the hosts that are watched; adapt how many these are."""
        self._read_verdict()
        for number, watched in enumerate(self._others[:self._width]):
            self._read(watched)
            if watched.moves > 1 and not self._is_suspicious(watched):
                self._width = number + 1
                for later in self._others[self._width:]:
                    later.moves, later.silent_seconds = 0, 0.0
                return
        self._width = min(2 * self._width, len(self._others))

    def _is_suspicious(self, watched: Watched) -> bool:
        return watched.silent_seconds >= _SUSPICIOUS_INTERVALS * self._interval

    def _read(self, watched: Watched) -> None:
        path = beats.host_path(self._out_dir, watched.host.first_rank)
        before = time.monotonic()
        try:
            beat = beats.read_host(path)
        except FileNotFoundError:
            beat = None
        except (OSError, ValueError):  # no evidence
            watched.looked_at = time.monotonic()
            return
        now = time.monotonic()
        if beat is not None and beat.job == self._job and beat != watched.beat:
            watched.beat, watched.silent_seconds = beat, 0.0
            watched.moves += 1
            watched.seen_at = now
        elif watched.beat is not None:
            counted = min(now - watched.looked_at, 2 * self._interval + now - before)
            watched.silent_seconds += counted
        watched.looked_at = now

    def silent(self, seconds: float) -> list[Watched]:
        """Return the watched hosts that were silent for so long."""
        return [watched for watched in self._others[:self._width]
                if watched.silent_seconds >= seconds]

    def undecided(self) -> bool:
        """Return whether a watched host may have to be named soon, and not yet."""
        limit = self.patience_seconds()
        return any(self._is_suspicious(watched) and watched.silent_seconds < limit
                   for watched in self._others[:self._width])

    def steps(self, since: float) -> dict[int, tuple[Host, int]]:
        """Return the last finished step of the ranks on watched hosts with a beat after `since`."""
        return {rank: (watched.host, step) for watched in self._others[:self._width]
                if watched.beat and watched.seen_at >= since
                for rank, step in watched.beat.steps.items()}

    def addresses(self, most: int = 8) -> dict[str, Host]:
        """Return doors to knock at: of the next hosts, and of others all around the ring."""
        others = [watched.host for watched in self._others]
        near, far = others[:most // 2], others[most // 2:]
        chosen = near + far[::max(1, len(far) // (most - most // 2))][:most - most // 2]
        return {host.addresses[host.first_rank]: host for host in chosen}

    def _read_verdict(self) -> None:
        try:
            text = self._verdict_path.read_text()
        except (OSError, ValueError):
            return
        job, _, rest = text.partition("\n")
        if job == self._job and rest.endswith(_END):
            self.verdict = rest.removesuffix(_END)

    def publish(self, verdict: str) -> None:
        """Tell all hosts, unless one has spoken already."""
        self._read_verdict()
        if self.verdict:
            return
        self.verdict = verdict
        try:
            descriptor = os.open(self._verdict_path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, f"{self._job}\n{verdict}{_END}".encode(), 0)
            finally:
                os.close(descriptor)
        except OSError:
            pass
