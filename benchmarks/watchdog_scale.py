"""The watchdog at the size of a cluster, on one machine: whom it names, and after how long.

    python benchmarks/watchdog_scale.py --out benchmarks/results/watchdog_scale.json

One real Watchdog for each host, with the host's other ranks as heartbeat files. The shared
directory is slowed down: each operation takes `latency`, and all of them share a server of `rate`
operations a second. After some steps no rank makes another one, and hosts or single ranks stop
beating. Prints a table: every report must name these ranks and no other.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from deberta_ds.cluster import beats, process, watchdog
from deberta_ds.cluster.ring import Host, Ring
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.files import write_atomic

RANKS_PER_HOST = 8
FIRST_DEAD = 3  # host
OPERATIONS = {"write": 3, "read": 3}  # open, write or read, close


@dataclass(frozen=True)
class Case:
    """One simulation; `dead` is "nobody", "host", "rack" (8 hosts) or "rank"."""

    ranks: int
    dead: str
    latency_ms: float
    seconds: float = 60.0  # train.watchdog_seconds
    rate: float = 20_000.0


@dataclass(frozen=True)
class Result:
    """What the live hosts did; seconds count from the last step."""

    first_report_seconds: float | None
    last_end_seconds: float | None
    hosts_ended: int  # of the live ones
    dead_ranks: int
    dead_ranks_named: int
    live_ranks_named: int
    operations_per_host_second: float


class Server:
    """A file server: makes its caller wait, and counts."""

    def __init__(self, latency: float, rate: float):
        self._latency, self._rate, self._free_at = latency, rate, 0.0
        self._lock = threading.Lock()
        self.operations = 0

    def serve(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + count / self._rate
            self.operations += count
            wait = max(count * self._latency, self._free_at - now)
        time.sleep(wait)


class SimulatedWatchdog(Watchdog):
    """A watchdog that notes what it would print, and ends only its own thread."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.reports: list[tuple[float, str]] = []
        self.ended_at = 0.0

    def _say(self, text: str) -> None:
        self.reports.append((time.monotonic(), text))

    def _exit(self) -> None:
        self.ended_at = time.monotonic()
        self._ended.set()


def slow_down(server: Server) -> None:
    """Put `server` between the ring and its files."""
    write, read, verdict = beats.write_host, beats.read_host, Ring._read_verdict

    def slow_write(path, beat):
        server.serve(OPERATIONS["write"])
        write(path, beat)

    def slow_read(path):
        server.serve(OPERATIONS["read"])
        return read(path)

    def slow_verdict(ring):
        server.serve(OPERATIONS["read"])
        verdict(ring)

    beats.write_host, beats.read_host, Ring._read_verdict = slow_write, slow_read, slow_verdict


def simulate(case: Case, observe_seconds: float | None = None) -> Result:
    """Run one case in real time; `observe_seconds` after the last step if nobody is dead."""
    work = Path(tempfile.mkdtemp(prefix="watchdog_scale"))
    saved = beats.write_host, beats.read_host, Ring._read_verdict, watchdog.stacks.show, \
        watchdog.stacks.write
    server = Server(case.latency_ms / 1000, case.rate)
    slow_down(server)
    watchdog.stacks.show, watchdog.stacks.write = (lambda: None), (lambda *_: None)
    try:
        return _simulate(case, server, work, observe_seconds or 2 * case.seconds)
    finally:
        (beats.write_host, beats.read_host, Ring._read_verdict, watchdog.stacks.show,
         watchdog.stacks.write) = saved
        shutil.rmtree(work, ignore_errors=True)


def _simulate(case: Case, server: Server, work: Path, observe_seconds: float) -> Result:
    count = case.ranks // RANKS_PER_HOST
    hosts = [Host(f"host{n}", {r: 100_000 + r for r in range(n * 8, n * 8 + 8)}, {})
             for n in range(count)]
    dogs = []
    for number in range(count):
        os.environ.update(MASTER_ADDR=f"host{number}", MASTER_PORT="1", WORLD_SIZE=str(case.ranks))
        dogs.append(SimulatedWatchdog(work, case.seconds))
        dogs[-1]._knock = lambda: None  # hosts here have no network
        dogs[-1]._start_local(number * RANKS_PER_HOST, case.ranks)
    silent_ranks = set()
    stopped = threading.Event()
    beating = threading.Thread(target=_beat_others, args=(dogs, silent_ranks, stopped))
    beating.start()
    time.sleep(2 * dogs[0].interval)
    for dog in dogs:
        dog.join_hosts("job", hosts)
        dog.beat(0)
    time.sleep(0.25 * case.seconds)
    before, since = server.operations, time.monotonic()
    time.sleep(0.1 * case.seconds)
    rate = (server.operations - before) / count / (time.monotonic() - since)
    width = {"nobody": 0, "rank": 0, "host": 1, "rack": 8}[case.dead]
    dead_hosts = range(FIRST_DEAD, FIRST_DEAD + width)
    dead = {rank for number in dead_hosts for rank in hosts[number].ranks}
    if case.dead == "rank":
        dead = {FIRST_DEAD * RANKS_PER_HOST + 5}
    last_step = time.monotonic()
    for dog in dogs:
        dog.beat(1)
    silent_ranks |= dead
    for number in dead_hosts:
        dogs[number]._ended.set()
    live = [dog for number, dog in enumerate(dogs) if number not in dead_hosts]
    deadline = last_step + observe_seconds
    while time.monotonic() < deadline and not all(dog.ended_at for dog in live):
        time.sleep(0.2)
    stopped.set()
    beating.join()
    for dog in dogs:
        dog._ended.set()
        dog._thread.join()
        shutil.rmtree(dog._neighbours.files.directory, ignore_errors=True)
    reports = [report for dog in live for report in dog.reports
               if re.search(r"rank \d+ on", report[1])]
    named = {int(rank) for _, text in reports
             for rank in re.findall(r"^  rank (\d+) on", text, re.MULTILINE)}
    ends = [dog.ended_at - last_step for dog in live if dog.ended_at]
    first = min((when for when, _ in reports), default=0.0)
    return Result(round(first - last_step, 1) if reports else None,
                  round(max(ends), 1) if ends else None, len(ends), len(dead), len(named & dead),
                  len(named - dead), round(rate, 1))


def _beat_others(dogs: list[Watchdog], silent: set[int], stopped: threading.Event) -> None:
    """Be the heartbeats of all ranks but the first one of each host."""
    me, tick = process.look(), 0
    while not stopped.wait(dogs[0].interval):
        tick += 1
        for dog in dogs:
            for rank in range(dog._rank + 1, dog._rank + RANKS_PER_HOST):
                if rank not in silent and not dog._ended.is_set():
                    dog._neighbours.files.write(beats.RankBeat(rank, tick, dog._step, me))


def table(results: list[tuple[Case, Result]]) -> str:
    lines = ["| ranks | latency of an operation | dead | named: dead ranks | live ranks "
             "| first report | last live host ended | operations a host and second |",
             "|---|---|---|---|---|---|---|---|"]
    for case, result in results:
        def seconds(value):
            return "-" if value is None else f"{value:.0f} s"
        lines.append(
            f"| {case.ranks:,} | {case.latency_ms:g} ms | {case.dead} "
            f"| {result.dead_ranks_named} of {result.dead_ranks} | {result.live_ranks_named} "
            f"| {seconds(result.first_report_seconds)} | {seconds(result.last_end_seconds)} "
            f"| {result.operations_per_host_second:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--dead", nargs="+", default=["nobody", "rank", "host", "rack"],
                        choices=["nobody", "rank", "host", "rack"])
    parser.add_argument("--latency_ms", nargs="+", type=float, default=[5.0, 500.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="train.watchdog_seconds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    results = []
    for latency in options.latency_ms:
        for ranks in options.ranks:
            for dead in options.dead:
                case = Case(ranks, dead, latency, options.seconds)
                results.append((case, simulate(case)))
                print(*results[-1], flush=True)
    print(table(results))
    if options.out:
        rows = [asdict(case) | asdict(result) for case, result in results]
        write_atomic(options.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
