"""A dead or stuck rank is named, the stacks of the live ones are shown, and the job ends with 70.

A frozen rank leaves the others in a collective, which reports nothing for ten minutes and then
names nobody. So each rank has two threads. One talks to a TCPStore in rank 0's process: it writes
this rank's heartbeat, reads that of rank 0 and the verdict; rank 0 reads all heartbeats. The other
one looks at the clock and at what was read, decides, and never waits for the network.

Rank 0 publishes the verdict: which ranks are silent while no step ends. If rank 0 or its store is
silent, each rank decides alone. Only time in which a rank looked counts, by its own clock, and a
slow store makes all ranks more patient. Slow is not dead: when all ranks live and no step ends, the
stacks are shown, and the job ends after ten times the limit.

A rank whose Python stands still (C code that keeps the interpreter's lock) is silent to the others.
A timer of the kernel ends it, with its stacks, after ten times the seconds.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

from deberta_ds.base.errors import UserError, first_line, tell
from deberta_ds.cluster import dist, signals

EXIT_STUCK = 70  # EX_SOFTWARE of sysexits.h: restart from the last checkpoint
TICKS = 20  # heartbeats in train.watchdog_seconds

STEPPING, BUSY, FAILED, ENDED = "stepping", "busy", "failed", "ended"  # the states of a rank
# Shares of train.watchdog_seconds without a heartbeat, after which a rank is missed.
_SILENT = {STEPPING: 0.5, BUSY: 0.75, FAILED: 0.5}
_SILENT_AFTER_ERROR = 0.15  # when the collective of another rank has failed
_ROOT_LATER = 1.2  # times that for rank 0, which judges first where it can
_TOGETHER = 1.2  # times that, within which ranks that fall silent together are named together
_STORE = 3  # times what an exchange with the store takes, at least
_AFTER_ERROR_TICKS = 12  # that a failed rank waits for the verdict, which may need eight
_LIMIT = 0.9  # of train.watchdog_seconds without a step
_SLOW_STEPS = 4  # times the slowest ordinary step
_ALIVE = 10  # times the limit, while every rank lives
_PATIENCE = 30  # times the limit, for what is slow by nature


@dataclass
class Peer:
    """Another rank, by its last heartbeat."""

    host: str
    pid: str
    heartbeat: bytes = b""
    step: int = 0
    state: str = BUSY
    seconds: float = 0.0  # that its exchanges with the store take
    error: str = ""
    silent_seconds: float = 0.0

    def hear(self, heartbeat: bytes, counted: float) -> None:
        """Take note of what was read, so many seconds after the last time."""
        self.silent_seconds += counted
        if heartbeat != self.heartbeat:
            self.heartbeat, self.silent_seconds = heartbeat, 0.0
            _, step, self.state, seconds, self.error = heartbeat.decode().split(" ", 4)
            self.step, self.seconds = int(step), float(seconds)


class Watchdog:
    """The watchdog of one rank; `seconds` = 0 makes it do nothing."""

    def __init__(self, out_dir: str | Path, seconds: float):
        self._out_dir, self._seconds, self._interval = Path(out_dir), seconds, seconds / TICKS
        self._rank, self._world_size = 0, 1
        self._store: TCPStore | None = None
        self._peers: dict[int, Peer] = {}  # all others for rank 0; rank 0 for the others
        self._tick, self._step, self._state = 0, 0, BUSY
        self._progress = time.monotonic()  # when the last step ended
        self._slowest_step = self._exchange_seconds = 0.0
        self._shown_at = -1  # the step after which the stacks were shown last
        self._failure: BaseException | None = None
        self._verdict = ""
        self._leaving, self._stopped = threading.Event(), threading.Event()
        self._talker = threading.Thread(target=self._talk, name="watchdog-talk", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the block from `join` on; an exception in it also names silent ranks."""
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that NCCL remembers
        try:
            yield
            self._leave(None)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if self._watcher.is_alive():
                self._stopped.set()
                self._watcher.join()
            if self._store:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def join(self) -> None:
        """Open the store, and begin; call on every rank, when the process group is there."""
        if self._seconds:
            store = _open_store(self._seconds) if dist.world_size() > 1 else None
            self.begin(dist.rank(), dist.world_size(), store)

    def begin(self, rank: int, world_size: int, store: TCPStore | None) -> None:
        """As `join`, with a store in which all ranks have introduced themselves."""
        self._rank, self._world_size, self._store = rank, world_size, store
        self._progress = time.monotonic()
        self._watcher.start()
        if store:
            faulthandler.register(signal.SIGALRM, chain=True)  # shows stacks, then ends
            self._talker.start()

    def start_at(self, step: int) -> None:
        """Note that `step` steps were done before this start."""
        self._step, self._progress = step, time.monotonic()

    def heartbeat(self, step: int) -> None:
        """Note that `step` steps are done."""
        now = time.monotonic()
        if self._state == STEPPING:
            self._slowest_step = max(self._slowest_step, now - self._progress)
        self._step, self._progress, self._state = step, now, STEPPING

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Allow the block thirty times the time: an evaluation, a save."""
        self._progress, self._state = time.monotonic(), BUSY
        yield
        self._progress, self._state = time.monotonic(), STEPPING

    def _talk(self) -> None:
        assert self._store is not None  # `begin` starts this thread only with one
        try:
            others = range(1, self._world_size) if self._rank == 0 else [0]
            names = self._store.multi_get([f"name/{rank}" for rank in others])
            self._peers = {rank: Peer(*name.decode().split())
                           for rank, name in zip(others, names, strict=True)}
            ended = time.monotonic()
            while True:
                leaves, began = self._leaving.is_set(), time.monotonic()
                self._exchange(self._store, began - ended)
                ended = time.monotonic()
                self._exchange_seconds = max(ended - began, 0.8 * self._exchange_seconds)
                if leaves and (self._rank or self._all_left()):
                    return
                if leaves:
                    time.sleep(0.05)
                self._leaving.wait(self._interval)
        except RuntimeError:  # torch's: the connection is gone
            pass  # silence says the rest

    def _exchange(self, store: TCPStore, elapsed: float) -> None:
        """Tell and read once, `elapsed` seconds after the last time."""
        self._tick += 1
        error = first_line(self._failure)[:200] if self._failure else ""
        store.set(f"heartbeat/{self._rank}", f"{self._tick} {self._step} {self._state} "
                  f"{self._exchange_seconds:.3f} {error}")
        if self._rank:
            root, verdict = store.multi_get(["heartbeat/0", "verdict"])
            self._peers[0].hear(root, 0.0)  # _watch counts
            self._verdict = self._verdict or verdict.decode()
            return
        store.set("verdict", self._verdict)
        counted = min(elapsed, 2 * self._interval) + self._exchange_seconds
        heartbeats = store.multi_get([f"heartbeat/{rank}" for rank in self._peers])
        for peer, heartbeat in zip(self._peers.values(), heartbeats, strict=True):
            peer.hear(heartbeat, counted)

    def _all_left(self) -> bool:
        """Return whether rank 0 may take the store along."""
        gone = _SILENT_AFTER_ERROR * self._seconds
        return all(peer.state == ENDED or (peer.silent_seconds > gone if self._verdict else
                                           peer.state == FAILED) for peer in self._peers.values())

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            if self._store:  # a rank alone keeps nobody waiting
                signal.setitimer(signal.ITIMER_REAL, _ALIVE * self._seconds)
            if self._stopped.wait(self._interval):
                return
            now = time.monotonic()
            elapsed, last = now - last, now
            if elapsed > 2 * self._interval:  # this process did not run: frozen, and now thawed
                self._progress += elapsed - self._interval
            if self._rank and self._peers:
                self._peers[0].silent_seconds += min(elapsed, 2 * self._interval)
            if end := self._judge(now - self._progress):
                self._end(*end)
                return

    def _judge(self, no_step: float) -> tuple[str, set[str] | None] | None:
        """Return (report, hosts to avoid; None: another rank has said it) if the job has to end."""
        patience = 1 if self._state == STEPPING else _PATIENCE
        limit = patience * max(_LIMIT * self._seconds, _SLOW_STEPS * self._slowest_step)
        if self._verdict:
            return self._verdict, None
        lines, hosts = self._suspects(no_step)
        if lines or self._rank == 0 and no_step > _ALIVE * limit:
            return self._report(no_step, lines), hosts
        silent = max((peer.silent_seconds for peer in self._peers.values()), default=0.0)
        if no_step > limit and self._shown_at != self._step and silent < self._seconds / 4:
            self._shown_at = self._step
            tell(self._report(no_step, lines))
            _show_stacks()
        return None

    def _suspects(self, no_step: float) -> tuple[list[str], set[str]]:
        """Return (a line for each rank that is not alive, their hosts)."""
        peers, here = dict(self._peers), socket.gethostname()
        failed = self._state == FAILED or any(peer.state == FAILED for peer in peers.values())
        named, undecided, longest = {}, False, 0.0
        for rank, peer in peers.items():
            if peer.state == FAILED == self._state:
                continue  # its error is ours, and both are shown
            share = _SILENT[BUSY if BUSY in (self._state, peer.state) else STEPPING]
            if failed and peer.state != FAILED:
                share = _SILENT_AFTER_ERROR
            limit = max(share * self._seconds * (1 if rank else _ROOT_LATER),
                        _STORE * (self._exchange_seconds + peer.seconds))
            silence = min(peer.silent_seconds, no_step) / limit
            if peer.state != ENDED and silence > 0.5:
                longest, undecided = max(longest, silence), undecided or silence <= 1
                if silence > 1:
                    named[rank] = peer
        if undecided and longest < _TOGETHER:
            return [], set()
        others = {rank for rank, peer in peers.items() if peer.host != here}
        if others <= named.keys() and len({peers[rank].host for rank in others}) > 1:
            return [f"rank {self._rank} on {here} (pid {os.getpid()}): REACHES NO OTHER NODE; last "
                    f"step {self._step}"], {here}
        cut = "its link" if self._rank == 0 else "the network between it and this node"
        return ([f"rank {rank} on {peer.host} (pid {peer.pid}): " + (
            f"ENDED with an error: {peer.error}" if peer.state == FAILED else
            f"SILENT: frozen or dead, or {cut} is down") + f"; last step {peer.step}"
            for rank, peer in named.items()],
            {peer.host for peer in named.values() if peer.state != FAILED})

    def _report(self, no_step: float, lines: list[str]) -> str:
        newest = max([self._step, *(peer.step for peer in self._peers.values())])
        lines = lines or [
            f"rank {rank} on {peer.host} (pid {peer.pid}): alive but BEHIND; last step {peer.step} "
            f"of {newest}" for rank, peer in self._peers.items() if peer.step < newest] or [
            "all ranks in sight are alive: a busy machine, or a deadlock; compare their stacks"]
        return (f"WATCHDOG: no step for {no_step:.0f} s; seen by rank {self._rank} of "
                f"{self._world_size} on {socket.gethostname()} (pid {os.getpid()}) after step "
                f"{self._step}:\n  " + "\n  ".join(lines))

    def _end(self, report: str, hosts: set[str] | None) -> None:
        """Tell everybody, and end this process."""
        self._verdict, self._state = report, ENDED
        tell(report)
        if self._failure:
            traceback.print_exception(self._failure)
        _show_stacks()

        def record() -> None:
            if hosts is not None:
                signals.record_first(EXIT_STUCK, hosts)
            _write_nccl_records(self._out_dir / f"watchdog/rank-{self._rank:05d}.nccl")

        recorder = threading.Thread(target=record, daemon=True)  # a file system may be gone, too
        recorder.start()
        if self._rank == 0 or hosts is None:  # else the store is silent
            slowest = max((peer.seconds for peer in self._peers.values()), default=0.0)
            self._leave(self._seconds / 4 + _STORE * slowest)
        recorder.join(2 * self._interval)
        self._exit()

    def _exit(self) -> None:
        os._exit(EXIT_STUCK)

    def _fail(self, error: BaseException) -> None:
        """Say that this rank fails, and leave time to find out whether another one is the cause."""
        self._failure, self._state = error, FAILED
        if self._peers and isinstance(error, Exception) and not isinstance(error, UserError):
            time.sleep(_AFTER_ERROR_TICKS * self._interval + _STORE * self._exchange_seconds)
        self._leave(2 * self._interval)

    def _leave(self, seconds: float | None) -> None:
        """Say that this rank ends; rank 0 keeps the store for the others, so long at most."""
        if self._state != FAILED:
            self._state, self._progress = ENDED, time.monotonic()
        self._leaving.set()
        if self._rank:
            seconds = 2 * self._interval + _STORE * self._exchange_seconds
        if self._talker.is_alive():
            self._talker.join(seconds)


def introduce(store: TCPStore, rank: int) -> TCPStore:
    """Write what the others must find in `store` from the beginning; return it."""
    if rank == 0:
        store.set("verdict", "")
    store.set(f"name/{rank}", f"{socket.gethostname()} {os.getpid()}")
    store.set(f"heartbeat/{rank}", f"0 0 {BUSY} 0 ")
    return store


def _open_store(seconds: float) -> TCPStore:
    """Return a store in rank 0's process, for this start alone; call on every rank."""
    address = os.environ["MASTER_ADDR"]
    timeout = timedelta(seconds=max(60.0, seconds))
    store = dist.together(lambda: TCPStore(address, 0, is_master=True, wait_for_workers=False,
                                           timeout=timeout) if dist.is_main() else None)
    port = dist.broadcast_object(store.port if store else 0)

    def connect() -> TCPStore:
        try:
            return introduce(store or TCPStore(address, port, timeout=timeout), dist.rank())
        except RuntimeError as error:
            raise UserError(
                f"rank {dist.rank()} on {socket.gethostname()} cannot reach rank 0 at {address}, "
                f"port {port} ({first_line(error)}); let the nodes of the job connect to each "
                "other on any port, or set train.watchdog_seconds = 0") from None

    return dist.together(connect)


def _show_stacks() -> None:
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def _write_nccl_records(path: Path) -> None:
    """Write what NCCL's flight recorder holds, for torch's fr_trace."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump and torch.cuda.is_available():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump())
