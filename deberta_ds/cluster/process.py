"""Processes of this host as the kernel sees them (Linux, /proc)."""

import ctypes
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Process:
    """A process id together with its start time: ids are used again, the pair is not."""

    pid: int
    started: int  # clock ticks since the boot
    parent: int
    state: str  # R running, S and D waiting, T stopped, Z ended

    def lives(self) -> bool:
        now = look(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"


def look(pid: int | str = "self") -> Process | None:
    """Return the process `pid`, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # names are cut in bytes
    except (FileNotFoundError, ProcessLookupError):
        return None
    number, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()  # the name in between may hold anything
    return Process(int(number), int(fields[19]), int(fields[1]), fields[0])


def command_line(pid: int) -> list[str]:
    """Return the words of its command, [] if they cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def end_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def machine() -> str:
    """Return what a process id belongs to: this boot of this machine, and the namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
