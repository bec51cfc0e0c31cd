"""A stuck or dead rank is named, the stacks of the live ones are shown, and the job ends.

A frozen rank leaves the others in a collective, which reports nothing for ten minutes and then
names nobody. So each rank has a thread that shows its host that it lives, and that watches its own
rank's progress and the other ranks of the host, by the files and processes of that host alone. One
rank of each host does the same for its host towards the next one (ring.py); this and only this goes
over the shared directory, in threads of its own, so nothing here waits for a file system.

Ended at once: a rank of this host that is gone. Ended when no step has come for `train.
watchdog_seconds` at most: a rank or a host that is silent, a host that cannot be reached over the
network while its files still move. Slow is not dead: when all ranks are alive, also when one of
them is behind, that is shown, and the job ends only after ten times the limit. The limit is at
least four times the slowest ordinary step so far; the first step, evaluations and saves have thirty
times the limit.

It starts before the ranks know each other, and sees until then the ranks of its own host only.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deberta_ds import dist
from deberta_ds.cluster import beats, ending, stacks
from deberta_ds.cluster.launcher import rank_variables, this_start
from deberta_ds.cluster.neighbours import Neighbours
from deberta_ds.cluster.reach import Door, Knock
from deberta_ds.cluster.ring import Host, Ring
from deberta_ds.errors import UserError, tell

EXIT_STUCK = 70  # EX_SOFTWARE of sysexits.h: restart from the last checkpoint

TICKS = 20  # heartbeats in train.watchdog_seconds
_LIMIT_SHARE = 0.7  # of train.watchdog_seconds; the rest is for reading and reporting
_GONE_TICKS = 3  # between the end of a process and the report: its launcher may be ending the job
_KNOCK_TICKS = 3  # that a host may take to answer
_SLOW_STEPS = 4  # times the slowest ordinary step
_ALIVE = 10  # times the limit, while every rank lives
_PATIENCE = 30  # times the limit, for what is slow by nature


class Watchdog:
    """The heartbeat of one rank; `seconds` = 0 makes it do nothing."""

    def __init__(self, out_dir: str | Path, seconds: float):
        self._out_dir, self._seconds, self.interval = Path(out_dir), seconds, seconds / TICKS
        self._rank = self._world_size = 0
        self._step, self._tick = 0, 0
        self._progress = time.monotonic()  # when the last step ended
        self._slowest = 0.0
        self._factor = _PATIENCE  # the first step compiles, connects and warms up
        self._looked_into = -1, 0.0  # the step after which it was silent last, and how long
        self._ended = threading.Event()
        self._neighbours: Neighbours | None = None
        self._ring: Ring | None = None
        self._door: Door | None = None
        self._knocker: threading.Thread | None = None
        self._unreached: tuple[int, list[Host]] = (-1, [])  # in the silence after which step

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the block; an exception in it (a broken connection) also names silent ranks."""
        if not self._seconds:
            yield
            return
        stacks.keep_nccl_records()
        os.environ.update(rank_variables(os.environ))
        if "RANK" in os.environ:  # otherwise MPI will say
            self._start_local(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        try:
            yield
        except UserError:
            raise
        except Exception:
            if self._neighbours:
                self._ended.wait(_GONE_TICKS * self.interval)
                lines, _ = self._suspects(2 * self.interval, patient=False)
                self._say(self._report("a collective or a kernel failed", lines))
            raise
        finally:
            self._ended.set()
            if self._neighbours:
                self._thread.join()
                with suppress(OSError):
                    self._neighbours.leave()
            if self._door:
                self._door.close()

    def _start_local(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
        key = " ".join([str(self._out_dir.absolute()), this_start(),
                        *(os.environ.get(name, "") for name in names)])
        self._neighbours = Neighbours(key, rank, self._seconds, self.interval)
        self._neighbours.show(0, self._step)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def join(self, job: str) -> None:
        """Meet the other hosts; call on every rank, when the process group is there."""
        if not self._seconds:
            return
        if self._neighbours is None:
            self._start_local(dist.rank(), dist.world_size())
        self._door = Door()
        mine = (self._neighbours.files.host, socket.gethostname(), os.getpid(), self._door.address)
        hosts = hosts_of(dist.gather_objects(mine))
        self.join_hosts(job, hosts)

    def join_hosts(self, job: str, hosts: list[Host]) -> None:
        """As `join`, for a rank that knows the hosts of the job already."""
        mine = next(number for number, host in enumerate(hosts) if self._rank in host.ranks)
        self._neighbours.expect(set(hosts[mine].ranks))
        ring = Ring(self._out_dir, job, hosts, mine, self._seconds, self.interval)
        ring.start(self._neighbours.leads, self._neighbours.steps,
                   self._door.address if self._door else "-", self._ended)
        self._ring = ring

    def start_at(self, step: int) -> None:
        """Note that `step` steps were done before this start."""
        self._step, self._progress = step, time.monotonic()

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
        last = time.monotonic()
        while not self._ended.wait(self.interval):
            elapsed, last = time.monotonic() - last, time.monotonic()
            if self.turn(elapsed):
                return

    def turn(self, elapsed: float) -> bool:
        """Show, look and judge, `elapsed` seconds after the last time; True if the job was ended.
        """
        if elapsed > 2 * self.interval:  # this process did not run: frozen, and now thawed
            self._progress += elapsed - self.interval
        self.show_and_look()
        silence, limit = time.monotonic() - self._progress, self._limit()
        if report := self._fatal(silence, limit):
            self._end(*report)
            return True
        looked, looked_at = self._looked_into
        if silence > limit + (looked_at if looked == self._step else 0.0):
            if looked != self._step:
                self._say(self._report(f"no step for {silence:.0f} s", self._behind()))
                stacks.show()
                self._aside(lambda: stacks.write(self._directory, self._rank))
            self._looked_into = self._step, silence
        return False

    def show_and_look(self) -> None:
        """One heartbeat; no room or no descriptor for it is no reason to stop watching."""
        self._tick += 1
        with suppress(OSError):
            self._neighbours.show(self._tick, self._step)
        with suppress(OSError):
            self._neighbours.look()
        if self._door:
            self._door.empty()

    def _fatal(self, silence: float, limit: float) -> tuple[str, set[str] | None] | None:
        """Return (report, hosts to avoid; None: another one has said it) if the job has to end."""
        heard = self._neighbours.files.read_verdict() or (self._ring.verdict if self._ring else "")
        if heard:
            return heard, None
        what = f"no step for {silence:.0f} s"
        # Before the ranks have met, the file of a dead process may be an earlier job's.
        certain = _GONE_TICKS * self.interval if self._neighbours.complete else self._seconds
        due = min(limit, self._seconds - 2 * self.interval)
        if silence > due - (_KNOCK_TICKS + 1) * self.interval:
            self._knock()
        gone = self._neighbours.gone(certain) and silence > certain
        if silence > due and silence < self._seconds - 2 * self.interval \
                and self._ring and self._ring.undecided():
            due = silence  # a rack is named whole
        if gone or silence > due:
            lines, hosts = self._suspects(0.0 if self._factor == 1 else self._seconds)
            if lines:
                return self._report(what, lines), hosts
        if silence > _ALIVE * limit:
            return self._report(what, self._behind()), set()
        return None

    def _end(self, report: str, hosts: set[str] | None) -> None:
        """Tell everybody, leave stacks behind, and end this process; waits for no file system."""
        self._say(report)
        stacks.show()
        with suppress(OSError):
            self._neighbours.files.write_verdict(report)

        def tell() -> None:
            if self._ring and self._neighbours.leads():
                self._ring.publish(report)
            if hosts is not None:
                ending.record_first(EXIT_STUCK, hosts)
            stacks.write(self._directory, self._rank)

        self._aside(tell).join(2 * self.interval)
        self._ended.wait(2 * self.interval)  # the other hosts read it
        self._exit()

    @staticmethod
    def _exit() -> None:
        os._exit(EXIT_STUCK)

    @staticmethod
    def _aside(work) -> threading.Thread:
        """Run what may wait for a file system in a thread of its own."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def _knock(self) -> None:
        """Find out which hosts do not answer, meanwhile; once at a time, by one rank of the host.

        A host that reaches none of several others is cut off itself.
        """
        if self._ring is None or self._knocker and self._knocker.is_alive():
            return
        if not self._neighbours.leads():
            return

        def knock() -> None:
            doors = self._ring.addresses()
            try:
                trial = Knock(set(doors))
            except OSError:  # no descriptor left: that is no evidence
                return
            trial.wait(_KNOCK_TICKS * self.interval)
            trial.close()
            lost = [doors[address] for address in sorted(trial.unanswered)]
            alone = len(lost) == len(doors) > 1
            self._unreached = step, [self._ring.host] if alone else lost

        step = self._step
        self._knocker = self._aside(knock)

    def _suspects(self, least_seconds: float, patient: bool = True
                  ) -> tuple[list[str], set[str]]:
        """Return (a line for each rank that is not alive or not reached, their hosts).

        Silent are those that were so for `least_seconds` and, if `patient`, long enough for a
        machine or a file system as slow as they lately were.
        """
        here = socket.gethostname()
        lines, hosts = [], set()
        patience = self._neighbours.patience_seconds() if patient else 0.0
        for rank, problem in self._neighbours.suspects(max(least_seconds, patience)).items():
            beat = self._neighbours.ranks[rank].beat
            lines.append(f"rank {rank} on {here} (pid {beat.process.pid}): {problem}; last step "
                         f"{beat.step}")
            hosts.add(here)
        if self._ring is None:
            return lines, hosts
        patience = self._ring.patience_seconds() if patient else 0.0
        for watched in self._ring.silent(max(least_seconds, patience)):
            lines += _lines(watched.host, "SILENT: frozen, dead or cut off", watched.beat.steps)
            hosts.add(watched.host.name)
        step, unreached = self._unreached
        for host in unreached if step == self._step else []:
            if host.name not in hosts:
                own = host is self._ring.host
                lines += _lines(host, "REACHES NO OTHER HOST over the network" if own else
                                "NOT REACHED over the network", {})
                hosts.add(host.name)
        return lines, hosts

    def _behind(self) -> list[str]:
        """Return a line for each rank in sight that is alive and has finished fewer steps."""
        here = socket.gethostname()
        steps = {rank: (here, step) for rank, step in self._neighbours.steps().items()}
        if self._ring:
            seen = self._ring.steps(self._progress + self._ring.patience_seconds())
            steps |= {rank: (host.name, step) for rank, (host, step) in seen.items()}
        newest = max((step for _, step in steps.values()), default=0)
        return [f"rank {rank} on {host}: alive but BEHIND; last step {step} of {newest}"
                for rank, (host, step) in sorted(steps.items()) if step < newest]

    def _report(self, what: str, lines: list[str]) -> str:
        lines = lines or ["all ranks in sight are alive: a busy machine, or a deadlock; compare "
                          f"their stacks ({self._directory}/*.stack)"]
        return (f"WATCHDOG: {what}; seen by rank {self._rank} of {self._world_size} on "
                f"{socket.gethostname()} (pid {os.getpid()}) after step {self._step}:\n  "
                + "\n  ".join(lines))

    @property
    def _directory(self) -> Path:
        return self._out_dir / beats.DIRECTORY

    def _say(self, text: str) -> None:
        tell(text)


def hosts_of(ranks: list[tuple[str, str, int, str]]) -> list[Host]:
    """Return the hosts of (host identity, host name, process id, door) of every rank in order."""
    found: dict[str, Host] = {}
    for rank, (identity, name, pid, address) in enumerate(ranks):
        host = found.setdefault(identity, Host(name, {}, {}))
        host.ranks[rank], host.addresses[rank] = pid, address
    return list(found.values())


def _lines(host: Host, problem: str, steps: dict[int, int]) -> list[str]:
    """Return a line for each rank of `host`."""
    lines = []
    for rank, pid in sorted(host.ranks.items()):
        last = f"; last step {steps[rank]}" if rank in steps else ""
        lines.append(f"rank {rank} on {host.name} (pid {pid}): {problem}{last}")
    return lines
