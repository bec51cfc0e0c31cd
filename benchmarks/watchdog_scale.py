"""The watchdog at the size of a cluster: whom it names, and after how long.

    python benchmarks/watchdog_scale.py --out benchmarks/results/watchdog_scale.json

The real Watchdog, Neighbours and Ring of every host, one after the other in one thread: time is
simulated, and so are the files of the shared directory, where each operation takes `latency_ms` and
all of them share a server of `rate` operations a second. What is written shows when the write has
ended; what is read was there when the read began, so everybody sees old news. After some steps no
rank makes another one, and a rank, a host or a rack stops beating; or a host is frozen for a while
and comes back; or a rack's files are three times as slow all the time. A report must name the dead
ranks and no other.
"""

import argparse
import heapq
import json
import random
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

from deberta_ds.cluster import beats, neighbours, ring, watchdog
from deberta_ds.cluster.ring import Host, Ring
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.files import write_atomic

RANKS_PER_HOST = 8
RACK_HOSTS = 8
SLOWER = 3  # times, of the rack that is "slow"
OPERATIONS = 3  # open, write or read, close
QUIET_SECONDS = 120.0  # after the last step, where nobody is dead
FROZEN_SHARE = 0.35  # of the limit, in which the host that comes back is frozen
DEAD = ("nobody", "slow", "back", "rank", "host", "rack")


@dataclass(frozen=True)
class Case:
    """One simulation.

    `dead`: nobody, a rack that is only slow, a host that comes back, a rank, a host or a rack.
    """

    ranks: int
    dead: str
    latency_ms: float
    seconds: float = 60.0  # train.watchdog_seconds
    rate: float = 20_000.0
    first_dead: int = 3  # host; a rack goes on behind the last one with host 0


@dataclass(frozen=True)
class Result:
    """What the live hosts did; seconds count from the last step."""

    first_report_seconds: float | None
    last_end_seconds: float | None
    hosts_ended: int  # of the live ones
    dead_ranks: int
    dead_ranks_named: int
    live_ranks_named: int
    operations_per_host_second: float  # before the last step


@dataclass
class Clock:
    """Simulated time; stands in for the module `time`, and for a thread's `ended` event."""

    now: float = 0.0
    ended: bool = False

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.ended

    def set(self) -> None:
        self.ended = True


@dataclass
class SharedFiles:
    """The files of the shared directory: the last two versions of each, and from when they show."""

    clock: Clock
    latency: float
    rate: float
    slower: float = 1.0  # of the host whose turn it is
    operations: int = 0
    free_at: float = 0.0  # the server
    versions: dict[str, list[tuple[float, object]]] = field(default_factory=dict)

    def serve(self) -> None:
        now = self.clock.now
        self.free_at = max(now, self.free_at) + OPERATIONS / self.rate
        self.operations += OPERATIONS
        self.clock.now = max(now + OPERATIONS * self.latency * self.slower, self.free_at)

    def write(self, path: Path, content) -> None:
        self.serve()
        older = self.versions.get(str(path), [])[-1:]
        self.versions[str(path)] = [*older, (self.clock.now, content)]

    def read(self, path: Path):
        began = self.clock.now
        self.serve()
        shown = [content for when, content in self.versions.get(str(path), []) if when <= began]
        if not shown:
            raise FileNotFoundError(path)
        return shown[-1]

    def read_verdict(self, path: Path, job: str) -> str:
        return self.read(path)

    def write_verdict(self, path: Path, job: str, verdict: str) -> None:
        self.write(path, verdict)

    def at_once(self, actions: list[Callable[[], None]]) -> None:
        """Stand in for threads: all begin now, and the slowest one says when all are done."""
        began, ends = self.clock.now, []
        for action in actions:
            self.clock.now = began
            action()
            ends.append(self.clock.now)
        self.clock.now = max(ends)


@dataclass(frozen=True)
class LivingProcess:
    pid: int
    started: int = 0

    def lives(self) -> bool:
        return True


class LocalBeats:
    """The heartbeats of one host's ranks in a dict; stands in for beats.LocalBeats."""

    def __init__(self, key: str):
        self.beats: dict[int, beats.RankBeat] = {}
        self.verdict = ""

    def write(self, beat: beats.RankBeat) -> None:
        self.beats[beat.rank] = beat

    def read(self) -> dict[int, beats.RankBeat]:
        return dict(self.beats)

    def read_verdict(self) -> str:
        return self.verdict

    def write_verdict(self, text: str) -> None:
        self.verdict = text

    def clear_verdict(self) -> None:
        self.verdict = ""


class SimulatedWatchdog(Watchdog):
    """The watchdog of a host's first rank; it notes what it would print and when it would end."""

    def __init__(self, work: Path, case: Case, hosts: list[Host], mine: int, clock: Clock):
        super().__init__(work, case.seconds)
        self.clock, self.reports, self.ended_at = clock, [], 0.0
        self._ended = clock  # waiting is time that goes by
        self._rank, self._world_size = mine * RANKS_PER_HOST, case.ranks
        self._neighbours = neighbours.Neighbours("", self._rank, case.seconds, self.interval)
        self.ring = self._ring = Ring(work, "job", hosts, mine, case.seconds, self.interval)
        self.silent_ranks: set[int] = set()
        self._turned_at = clock.now
        self.beat_others()
        self._neighbours.show(0, 0)
        self._neighbours.look()
        self._neighbours.expect(set(hosts[mine].ranks))

    def beat_others(self) -> None:
        """Be the host's other ranks."""
        for rank in range(self._rank + 1, self._rank + RANKS_PER_HOST):
            if rank not in self.silent_ranks:
                self._neighbours.files.write(
                    beats.RankBeat(rank, self._tick, self._step, LivingProcess(rank)))

    def show_and_look(self) -> None:
        self.beat_others()
        super().show_and_look()

    def turns(self) -> list[Callable[[], None]]:
        """Return a round of each of its three threads."""
        return [self.turn_now,
                lambda: self.ring.write(self._neighbours.steps()), self.ring.look]

    def turn_now(self) -> None:
        before, self._turned_at = self._turned_at, self.clock.now
        self.turn(self.clock.now - before)

    def _knock(self) -> None:
        """There is no network here."""

    def _say(self, text: str) -> None:
        self.reports.append((self.clock.now, text))

    def _aside(self, work):
        work()
        return mock.Mock()

    def _exit(self) -> None:
        self.ended_at = self.clock.now


def simulate(case: Case) -> Result:
    """Return what happens in one case."""
    clock = Clock()
    files = SharedFiles(clock, case.latency_ms / 1000, case.rate)
    with ExitStack() as stack:
        for module in (neighbours, ring, watchdog):
            stack.enter_context(mock.patch.object(module, "time", clock))
        for name, stand_in in (("LocalBeats", LocalBeats), ("write_host", files.write),
                               ("read_host", files.read), ("read_verdict", files.read_verdict),
                               ("write_verdict", files.write_verdict)):
            stack.enter_context(mock.patch.object(beats, name, stand_in))
        stack.enter_context(mock.patch.object(ring, "at_once", files.at_once))
        stack.enter_context(mock.patch.object(watchdog, "stacks", mock.Mock()))
        return _simulate(case, clock, files)


def _simulate(case: Case, clock: Clock, files: SharedFiles) -> Result:
    count = case.ranks // RANKS_PER_HOST
    hosts = [Host(f"host{n}", {r: 100_000 + r for r in range(n * 8, n * 8 + 8)}, {})
             for n in range(count)]
    dogs = [SimulatedWatchdog(Path("OUT"), case, hosts, n, clock) for n in range(count)]
    rack = [number % count for number in range(case.first_dead, case.first_dead + RACK_HOSTS)]
    dead_hosts = {"host": rack[:1], "rack": rack}.get(case.dead, [])
    dead = {rank for number in dead_hosts for rank in hosts[number].ranks}
    if case.dead == "rank":
        dead = {case.first_dead * RANKS_PER_HOST + 5}
    step_seconds = 0.1 * case.seconds
    count_steps = 3 + int(60 * files.latency / step_seconds)  # everybody has been seen by then
    last_step = count_steps * step_seconds
    thaws_at = last_step + (FROZEN_SHARE * case.seconds if case.dead == "back" else 0.0)
    planned = [(step_seconds * number, number) for number in range(count_steps + 1)]
    if case.dead == "back":
        planned += [(thaws_at + step_seconds * number, count_steps + number)
                    for number in range(1, 11)]
    steps = iter(planned)
    until = last_step + (QUIET_SECONDS if not dead else 4 * case.seconds)
    next_step = next(steps)
    draw = random.Random(0)
    queue = [(draw.random() * dogs[0].interval, 3 * number + kind, number, turn)
             for number, dog in enumerate(dogs) for kind, turn in enumerate(dog.turns())]
    heapq.heapify(queue)
    rate = 0.0
    while queue:
        when, order, number, turn = heapq.heappop(queue)
        if when > until:
            break
        clock.now = when
        if next_step and when >= next_step[0]:
            for dog in dogs:
                dog.beat(next_step[1])
                dog.silent_ranks = dead if next_step[1] == count_steps else set()
            rate = files.operations / count / when if when else 0.0
            next_step = next(steps, None)
        dog = dogs[number]
        if dog.ended_at or not next_step and number in dead_hosts:
            continue
        if number == rack[0] and last_step <= when < thaws_at:
            heapq.heappush(queue, (thaws_at, order, number, turn))
            continue
        files.slower = SLOWER if case.dead == "slow" and number in rack else 1.0
        turn()
        heapq.heappush(queue, (clock.now + dog.interval, order, number, turn))
    live = [dog for number, dog in enumerate(dogs) if number not in dead_hosts]
    return _result(live, dead, last_step, rate)


def _result(live: list[SimulatedWatchdog], dead: set[int], last_step: float, rate: float
            ) -> Result:
    reports = [report for dog in live for report in dog.reports
               if re.search(r"rank \d+ on", report[1])]
    named = {int(rank) for _, text in reports
             for rank in re.findall(r"^  rank (\d+) on", text, re.MULTILINE)}
    ends = [dog.ended_at - last_step for dog in live if dog.ended_at]
    first = min((when for when, _ in reports), default=0.0)
    return Result(round(first - last_step, 1) if reports else None,
                  round(max(ends), 1) if ends else None, len(ends), len(dead), len(named & dead),
                  len(named - dead), round(rate, 1))


def table(results: list[tuple[Case, Result]]) -> str:
    lines = ["| limit | an operation | ranks | dead | dead ranks named | live ranks named "
             "| first report | last live host ended | operations a host and second |",
             "|---|---|---|---|---|---|---|---|---|"]
    for case, result in results:
        def seconds(value):
            return "-" if value is None else f"{value:.0f} s"
        lines.append(
            f"| {case.seconds:g} s | {case.latency_ms:g} ms | {case.ranks:,} | {case.dead} "
            f"| {result.dead_ranks_named} of {result.dead_ranks} | {result.live_ranks_named} "
            f"| {seconds(result.first_report_seconds)} | {seconds(result.last_end_seconds)} "
            f"| {result.operations_per_host_second:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--dead", nargs="+", default=DEAD, choices=DEAD)
    parser.add_argument("--latency_ms", nargs="+", type=float, default=[5.0, 50.0, 500.0])
    parser.add_argument("--seconds", nargs="+", type=float, default=[60.0],
                        help="train.watchdog_seconds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    results = []
    for seconds in options.seconds:
        for latency in options.latency_ms:
            for ranks in options.ranks:
                for dead in options.dead:
                    case = Case(ranks, dead, latency, seconds)
                    results.append((case, simulate(case)))
                    print(*results[-1], flush=True)
    print(table(results))
    if options.out:
        rows = [asdict(case) | asdict(result) for case, result in results]
        write_atomic(options.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
