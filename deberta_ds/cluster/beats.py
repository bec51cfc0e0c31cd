"""Heartbeats: how a rank shows its host that it lives, and a host the next one.

    a rank      a file in the memory of its host (/dev/shm), rewritten by every rank
    a host      OUT/heartbeats/host-00008 (its first rank), rewritten by one rank of the host

A host's file holds the job's name, a counter, and a line for each of its ranks. It is written in
place, because on NFS a file that is renamed over another may be seen half a minute late. So a
reader may meet an empty or a torn file, and on NFS a stale handle: each is "nothing new" to it, and
none ends anything.
"""

import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deberta_ds.cluster import process

DIRECTORY, VERDICT = "heartbeats", "verdict"
_PREFIX = "deberta_ds-"
_STALE_SECONDS = 86400.0  # a living rank rewrites its file every few seconds
_END = "\nend of verdict\n"


@dataclass(frozen=True)
class RankBeat:
    """What a rank says of itself; `process` tells whether it can still be running."""

    rank: int
    tick: int
    step: int  # its last finished step
    process: process.Process


@dataclass(frozen=True)
class HostBeat:
    """What one rank of a host says of all its ranks."""

    job: str
    tick: int
    address: str  # that a rank of the host listens on
    steps: dict[int, int]  # of its ranks that live


class LocalBeats:
    """The files of a job's ranks on this host. `key` is the same for these, and no other job's.

    Containers that share the memory but not their process ids have a directory each: the ids in the
    files of another one mean nothing.
    """

    def __init__(self, key: str):
        memory = Path("/dev/shm")
        root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        name = hashlib.sha256(f"{os.getuid()} {process.machine()} {key}".encode()).hexdigest()[:16]
        self.directory = root / f"{_PREFIX}{name}"
        self.directory.mkdir(mode=0o700, exist_ok=True)
        remove_stale(root)

    @property
    def host(self) -> str:
        """Equal for ranks that see the same files; containers of one host may not."""
        found = self.directory.stat()
        return f"{process.machine()} {found.st_dev} {found.st_ino}"

    def write(self, beat: RankBeat) -> None:
        path = self.directory / str(beat.rank)
        temporary = path.with_suffix(".tmp")  # the directory may have gone with another rank
        self.directory.mkdir(mode=0o700, exist_ok=True)
        me = beat.process
        temporary.write_text(f"{beat.tick} {beat.step} {me.pid} {me.started}")
        os.replace(temporary, path)

    def read(self) -> dict[int, RankBeat]:
        """Return the last heartbeat of every rank of this host, those of killed ranks included.

        Raises OSError if one cannot be read, as when no descriptor is left.
        """
        found = {}
        try:
            paths = list(self.directory.iterdir())
        except FileNotFoundError:  # the last rank to leave took it along
            return {}
        for path in paths:
            if path.name.isdigit() and (beat := _parse_rank(path)):
                found[beat.rank] = beat
        return found

    def remove(self, rank: int) -> None:
        """Remove a rank's file; the last one takes the directory along."""
        (self.directory / str(rank)).unlink(missing_ok=True)
        if not self.read():
            shutil.rmtree(self.directory, ignore_errors=True)

    def read_verdict(self) -> str:
        """Return the report for which a rank of this host ends the job, "" if none does."""
        try:
            return (self.directory / "verdict").read_text()
        except OSError:
            return ""

    def write_verdict(self, text: str) -> None:
        temporary = self.directory / f"verdict.{os.getpid()}"
        temporary.write_text(text)
        os.replace(temporary, self.directory / "verdict")

    def clear_verdict(self) -> None:
        (self.directory / "verdict").unlink(missing_ok=True)


def remove_stale(root: Path) -> None:
    """Remove this user's directories of jobs that were killed and left nobody to tidy up."""
    for directory in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another rank of this start may be at it
            found = [directory.stat(), *(path.stat() for path in directory.iterdir())]
            newest = max(one.st_mtime for one in found)
            if found[0].st_uid == os.getuid() and time.time() - newest > _STALE_SECONDS:
                shutil.rmtree(directory)


def _parse_rank(path: Path) -> RankBeat | None:
    try:
        tick, step, pid, started = map(int, path.read_text().split())
        return RankBeat(int(path.name), tick, step, process.Process(pid, started, 0, ""))
    except (FileNotFoundError, ValueError):
        return None


def host_path(out_dir: str | Path, first_rank: int) -> Path:
    return Path(out_dir) / DIRECTORY / f"host-{first_rank:05d}"


def write_host(path: Path, beat: HostBeat) -> None:
    """Write in place, padded so that a shorter text leaves nothing of a longer one."""
    ranks = " ".join(f"{rank}:{step}" for rank, step in sorted(beat.steps.items()))
    text = f"{beat.job} {beat.tick} {beat.address} {ranks}"
    text = f"{text} {_check(text)}"
    size = 64 * (len(text) // 64 + 1)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, text.ljust(size - 1).encode() + b"\n", 0)
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def read_host(path: Path) -> HostBeat | None:
    """Return a host's heartbeat, None if the file is empty, torn or another's.

    Raises OSError if it cannot be read.
    """
    text = path.read_text().rstrip()
    body, _, check = text.rpartition(" ")
    if not body or check != _check(body):
        return None
    job, tick, address, *ranks = body.split(" ")
    pairs = (pair.split(":") for pair in ranks)
    return HostBeat(job, int(tick), address, {int(rank): int(step) for rank, step in pairs})


def write_verdict(path: Path, job: str, verdict: str) -> None:
    """Write in place what ends the job."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, f"{job}\n{verdict}{_END}".encode(), 0)
    finally:
        os.close(descriptor)


def read_verdict(path: Path, job: str) -> str:
    """Return what ends the job, "" if nothing does. Raises OSError if it cannot be read."""
    found, _, rest = path.read_text().partition("\n")
    return rest.removesuffix(_END) if found == job and rest.endswith(_END) else ""


def _check(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
