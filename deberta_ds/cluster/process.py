"""Processes of this host as the kernel sees them (Linux, /proc); is the launcher still there?

DeepSpeed's ends on SIGTERM without a word to its ranks, which would train on as orphans; any
launcher may be killed.
"""

import ctypes
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROGRAMS = {"deepspeed", "ds", "torchrun", "torchrun_elastic.py", "mpirun", "mpiexec", "orterun",
             "orted", "prterun", "prted", "mpiexec.hydra", "hydra_pmi_proxy", "slurmstepd"}
_MODULES = {"deepspeed.launcher.runner", "deepspeed.launcher.launch", "torch.distributed.run",
            "torch.distributed.launch"}
_SHELLS = {"sh", "bash", "dash", "zsh"}


@dataclass(frozen=True)
class Process:
    """A process id together with its start time: ids are used again, the pair is not."""

    pid: int
    started: int  # clock ticks since the boot
    parent: int
    state: str  # R running, S and D waiting, T stopped, Z ended

    def lives(self) -> bool:
        """Return whether the process still runs, and not another one under its number."""
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


class Launcher:
    """The processes between this one and the topmost launcher above it; none without a launcher.

    What stands higher (a shell, a terminal, nohup) may end, and the run goes on.
    """

    def __init__(self):
        ancestors = _ancestors()
        launchers = [index for index, (_, words) in enumerate(ancestors) if is_launcher(words)
                     or index == 0 and words[:1] and PurePath(words[0]).name == "timeout"]
        top = launchers[-1] + 1 if launchers else 0
        # pdsh has no process on this host but the ssh session, which has no terminal.
        above = [index for index, (_, words) in enumerate(ancestors[top:], start=top)
                 if words[:1] and PurePath(words[0]).name.lstrip("-") not in _SHELLS]
        if launchers and above and ancestors[above[0]][1][0].endswith("@notty"):
            top = above[0] + 1
        self._watched = ancestors[:top]

    def gone(self) -> str:
        """Return the name and pid of a launcher process that has ended, or ""."""
        for ancestor, words in self._watched:
            if not ancestor.lives():
                return f"{_title(words)}, pid {ancestor.pid}"
        return ""


def is_launcher(words: list[str]) -> bool:
    """Return whether a command line is that of a known launcher."""
    if words[:1] and words[0].startswith("slurmstepd:"):
        return True
    programs = {PurePath(word).name for word in words[:1]}
    if words[:1] and PurePath(words[0]).name.startswith("python"):
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        programs.add(PurePath(script).name)
    if "-m" in words[1:4]:
        position = words.index("-m")
        return len(words) > position + 1 and words[position + 1] in _MODULES
    return not _PROGRAMS.isdisjoint(programs)


def _ancestors() -> list[tuple[Process, list[str]]]:
    """Return (process, its command line) of the parent, its parent, and so on."""
    found, current = [], look()
    while current is not None and (current := look(current.parent)):
        found.append((current, command_line(current.pid)))
    return found


def _title(words: list[str]) -> str:
    names = [PurePath(word).name for word in words]
    known = [name for name in names[:4] if name in _PROGRAMS | _MODULES]
    return (known or names or ["its parent"])[0]
