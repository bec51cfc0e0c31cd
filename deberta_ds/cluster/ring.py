"""Hosts of a job in a ring: each writes its heartbeat and watches the next one.

So the work of a look does not grow with the job: one write and two reads for each host. A host
whose successor falls silent watches on until it meets a live one, four times as far each time, so
that a rack that lost its power is named whole. What a host concludes it writes to
OUT/heartbeats/verdict, which all hosts read.

The shared directory may be slow or sick, and that must not look like a dead host: writing and
reading have a thread each, several hosts are read at once, an error while reading is no evidence,
time in which this process did not run does not count, and the patience has room for three times
what this host's own write and read have taken lately. A host is only missed once it has been seen.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deberta_ds.cluster import beats, neighbours

_SUSPICIOUS_INTERVALS = 2.5  # after which the hosts behind a silent one are watched as well
_WIDER = 4  # times as many
_MARGIN = 3  # times what this host's own write and read take
_MOST_AT_ONCE = 32  # reads, each in a thread
_NEAR, _FAR = 4, 4  # doors to knock at: of the next hosts, and all around the ring
_LATELY = 10  # own writes and reads that are remembered


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
    is_suspicious: bool = False  # until there is a new heartbeat


class Pace:
    """How much longer than `interval` the rounds of one thread took lately."""

    def __init__(self, interval: float):
        self._interval, self._ended_at = interval, time.monotonic()
        self._seconds: deque[float] = deque([0.0], _LATELY)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time the block, and the wait before it; a full disk or a stale handle ends nothing."""
        with suppress(OSError, ValueError):
            yield
        now = time.monotonic()
        self._seconds.append(max(0.0, now - self._ended_at - self._interval))
        self._ended_at = now

    @property
    def slowest_seconds(self) -> float:
        return max(self._seconds)


class Ring:
    """This host's place in the ring; `hosts[mine]` is this host."""

    def __init__(self, out_dir: str | Path, job: str, hosts: list[Host], mine: int,
                 seconds: float, interval: float):
        self._out_dir, self._job, self.host = out_dir, job, hosts[mine]
        self._others = [Watched(host) for host in hosts[mine + 1:] + hosts[:mine]]
        self._seconds, self._interval = seconds, interval
        self.address = "-"  # that a rank of this host listens on
        self._width = 1  # hosts that are watched now
        self._tick = 0
        self._writes, self._reads = Pace(interval), Pace(interval)
        self._verdict_path = Path(out_dir) / beats.DIRECTORY / beats.VERDICT
        self.verdict = ""  # of any host

    def start(self, leads: Callable[[], bool], steps: Callable[[], dict[int, int]], address: str,
              ended: threading.Event) -> None:
        """Write and read in threads of their own while `leads()`; `steps()` are the live ranks'."""
        self._verdict_path.parent.mkdir(parents=True, exist_ok=True)
        if self.host.first_rank == 0:
            self._clear()
        self.address = address

        def repeat(turn: Callable[[], None]) -> None:
            while not ended.wait(self._interval):
                turn()

        for name, turn in (("write", lambda: self.write(steps() if leads() else None)),
                           ("read", lambda: self.look(leads()))):
            threading.Thread(target=repeat, args=(turn,), name=f"watchdog-{name}",
                             daemon=True).start()

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

    def write(self, steps: dict[int, int] | None) -> None:
        """Write this host's heartbeat; None: another rank leads."""
        with self._writes.round():
            if steps is not None:
                self._tick += 1
                beat = beats.HostBeat(self._job, self._tick, self.address, steps)
                beats.write_host(beats.host_path(self._out_dir, self.host.first_rank), beat)

    def look(self, leads: bool = True) -> None:
        """Read the verdict and the hosts that are watched; adapt how many these are."""
        with self._reads.round():
            if leads:
                self._read_verdict()
                at_once([partial(self._read, one) for one in self._others[:self._width]])
                self._adapt()

    def _own_seconds(self) -> float:
        """Return what a write and a read of this host have taken lately, at most."""
        return self._writes.slowest_seconds + self._reads.slowest_seconds

    def patience_seconds(self) -> float:
        """Return the silence after which a host is missed."""
        return max(neighbours.SILENT_SHARE * self._seconds,
                   2 * self._interval + _MARGIN * self._own_seconds())

    def _adapt(self) -> None:
        """Watch up to the first host that lives; if none of the watched does, look further.

        The next host has been watched from the beginning, so one word of it is enough.
        """
        limit = max(_SUSPICIOUS_INTERVALS * self._interval,
                    2 * self._interval + self._own_seconds())
        for number, watched in enumerate(self._others[:self._width]):
            if watched.silent_seconds >= limit:
                watched.is_suspicious = True
            if watched.moves > (number > 0) and not watched.is_suspicious:
                self._width = number + 1
                for later in self._others[self._width:]:
                    later.moves, later.silent_seconds, later.is_suspicious = 0, 0.0, False
                return
        self._width = min(_WIDER * self._width, len(self._others))

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
            watched.beat, watched.silent_seconds, watched.is_suspicious = beat, 0.0, False
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
        return any(watched.is_suspicious and watched.silent_seconds < limit
                   for watched in self._others[:self._width])

    def steps(self, since: float) -> dict[int, tuple[Host, int]]:
        """Return the last finished step of the ranks on watched hosts with a beat after `since`."""
        return {rank: (watched.host, step) for watched in self._others[:self._width]
                if watched.beat and watched.seen_at >= since
                for rank, step in watched.beat.steps.items()}

    def addresses(self) -> dict[str, Host]:
        """Return doors to knock at: of the next hosts and all suspicious ones, and of others all
        around the ring.
        """
        others = [watched.host for watched in self._others]
        suspicious = [watched.host for watched in self._others[:self._width]
                      if watched.is_suspicious]
        near, far = others[:_NEAR], others[_NEAR:]
        chosen = near + far[::max(1, len(far) // _FAR)][:_FAR]
        return {host.addresses[host.first_rank]: host for host in chosen + suspicious}

    def _read_verdict(self) -> None:
        with suppress(OSError, ValueError):
            if text := beats.read_verdict(self._verdict_path, self._job):
                self.verdict = text

    def publish(self, verdict: str) -> None:
        """Tell all hosts, unless one has spoken already."""
        self._read_verdict()
        if self.verdict:
            return
        self.verdict = verdict
        with suppress(OSError):
            beats.write_verdict(self._verdict_path, self._job, verdict)


def at_once(actions: list[Callable[[], None]]) -> None:
    """Run all, each in a thread: reading sixteen hosts takes no longer than reading one."""
    if len(actions) == 1:
        actions[0]()
        return
    for start in range(0, len(actions), _MOST_AT_ONCE):
        threads = [threading.Thread(target=action, daemon=True)
                   for action in actions[start:start + _MOST_AT_ONCE]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
