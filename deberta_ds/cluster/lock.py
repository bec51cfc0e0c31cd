"""One job per out_dir: OUT/run.lock names the process that writes there.

A killed job leaves its lock behind. On the same machine the kernel knows whether that process still
runs (its id and its start time). From another machine OUT/run.beat is watched, in which the process
counts: if the number stands still, the job is dead and the lock is taken over. Clocks are never
compared.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from deberta_ds.base.errors import UserError, refuse_pipe
from deberta_ds.base.files import parse_json, typed, write_atomic
from deberta_ds.cluster import dist
from deberta_ds.cluster.signals import started_at

NAME = "run.lock"
BEAT = "run.beat"

_BEAT_SECONDS = 3.0
_BEATS = 5  # beats' time in which a living job's must move
_SLACK_SECONDS = 5.0  # for a slow file system
_SEEN_SECONDS = 180.0  # in which a new file is seen by the other hosts: NFS keeps names for 60
_SETTLE_SECONDS = 1.0  # two jobs that take over one stale lock: the later one has it


@dataclass(frozen=True)
class Holder:
    """The first rank of a job: what its lock says."""

    host: str
    machine: str
    pid: int
    started: int  # of the process, as its kernel counts
    since: str  # for people

    @property
    def job(self) -> str:
        """A name for the job that no other job has."""
        return f"{self.host}:{self.pid}:{self.started}"


def this_process() -> Holder:
    """Return what a lock says of the process that holds it: this one."""
    started = started_at(os.getpid())
    assert started is not None  # it runs
    return Holder(socket.gethostname(), machine(), os.getpid(), started,
                  time.strftime("%Y-%m-%d %H:%M:%S"))


@cache
def machine() -> str:
    """Return what a process id belongs to: this boot of this machine, and the namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@contextmanager
def held(out_dir: str | Path) -> Iterator[None]:
    """Hold `out_dir` for this job; call on every rank.

    UserError on every rank if another job has it, or a host does not see the directory.
    """
    mine = dist.from_main(this_process)
    path = Path(out_dir) / NAME
    dist.on_main(lambda: take(path, mine))
    ended = threading.Event()
    counter = threading.Thread(target=_count, args=(path.with_name(BEAT), mine.job, ended),
                               daemon=True)
    if dist.is_main():
        counter.start()
    try:
        dist.together(lambda: _see(path, mine))
        yield
    finally:
        ended.set()
        with suppress(UserError, OSError):
            if dist.is_main():
                counter.join(_BEAT_SECONDS)  # a file system may be gone
                release(out_dir)


def _count(path: Path, job: str, ended: threading.Event) -> None:
    """Show that `job` lives; in place, as NFS shows a file that is renamed over another late."""
    number = 0
    while not ended.is_set():
        number += 1
        with suppress(OSError):
            path.write_text(f"{job} {number}\n")
        ended.wait(_BEAT_SECONDS)


def check(out_dir: str | Path) -> None:
    """Raise UserError if another job has taken `out_dir` over from this process, the first rank.

    So does one on another host if this one stood still, or its file system did, for long enough.
    """
    try:
        holder = _read(Path(out_dir) / NAME)
    except UserError:  # cannot be read: nothing is known
        return
    if holder is not None and holder.job != this_process().job:
        raise UserError(f"{out_dir}: process {holder.pid} on {holder.host} has taken it over since "
                        f"{holder.since}, as this job had stood still; this one writes no more")


def is_held(out_dir: str | Path) -> bool:
    """Return whether a job writes to `out_dir`; one of another machine is believed to live."""
    holder = _read(Path(out_dir) / NAME)
    return holder is not None and (holder.machine != machine() or _lives_here(holder))


def release(out_dir: str | Path) -> None:
    """Delete the lock, if it is this process's or what a dead job of this machine has left."""
    with suppress(UserError, OSError):
        holder, mine = _read(Path(out_dir, NAME)), this_process()
        is_mine = holder and (holder.machine, holder.job) == (mine.machine, mine.job)
        if is_mine or not is_held(out_dir):
            for name in (BEAT, NAME):
                Path(out_dir, name).unlink(missing_ok=True)


def take(path: Path, mine: Holder) -> None:
    """Write the lock `path`; raises UserError if a live job holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while not _create(path, mine):
            holder = _read(path)
            if holder is None and not _is_empty(path):
                continue
            if holder and _lives(holder, path):
                raise UserError(
                    f"{path.parent}: another job writes there: process {holder.pid} on "
                    f"{holder.host}, since {holder.since}; wait for its end, stop it, or choose "
                    f"another out_dir. (If that job is gone for certain, delete {path})")
            if _read(path) == holder:
                write_atomic(path, json.dumps(asdict(mine)) + "\n")
                time.sleep(_SETTLE_SECONDS)
                if _read(path) == mine:
                    return
                raise UserError(f"{path.parent}: another job was started there at the same moment; "
                                "choose another out_dir")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; choose an out_dir that can"
                        ) from None


def _see(path: Path, mine: Holder) -> None:
    """Raise UserError if this host does not see the lock: what it saves would not be with the rest.

    One rank of each other host looks.
    """
    deadline = time.monotonic() + _SEEN_SECONDS
    while dist.local_rank() == 0 and mine.machine != machine():
        with suppress(UserError):  # of a file system that has not recovered yet
            if _read(path) == mine:
                return
        if time.monotonic() > deadline:
            raise UserError(f"{path.parent}: must be shared by all nodes: {socket.gethostname()} "
                            f"does not see the lock that {mine.host} has written there; choose an "
                            "out_dir on a file system that every node mounts at this path")
        for directory in path.parents:  # NFS asks its server again
            with suppress(OSError):
                os.listdir(directory)
                break
        time.sleep(0.1)


def _create(path: Path, mine: Holder) -> bool:
    """Make the lock if there is none."""
    try:
        file = open(path, "x")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(json.dumps(asdict(mine)) + "\n")
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> Holder | None:
    """Return what a lock says; raises UserError if it is damaged.

    None if there is none, or an empty one: of a job that was killed, or met a full disk, before it
    had written a word.
    """
    refuse_pipe(path)
    deadline = time.monotonic() + 2.0  # it is created first, and then written
    while True:
        try:
            text = path.read_text()
            return typed(Holder, parse_json(text))
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            if time.monotonic() > deadline:
                if _is_empty(path):
                    return None
                raise UserError(f"{path}: damaged; delete it if no job writes to {path.parent}"
                                ) from None
        time.sleep(0.05)


def _is_empty(path: Path) -> bool:
    with suppress(OSError):
        return path.stat().st_size == 0
    return False


def _lives(holder: Holder, path: Path) -> bool:
    if holder.machine == machine():
        return _lives_here(holder)
    deadline = time.monotonic() + _BEATS * _BEAT_SECONDS + _SLACK_SECONDS
    before = _beat(path.with_name(BEAT), holder.job)
    while time.monotonic() < deadline:
        time.sleep(_BEAT_SECONDS / 3)
        if _beat(path.with_name(BEAT), holder.job) != before:
            return True
    return False


def _lives_here(holder: Holder) -> bool:
    return started_at(holder.pid) == holder.started


def _beat(path: Path, job: str) -> str:
    """Return what `job` counts, "" if it does not."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text if text.startswith(f"{job} ") else ""
