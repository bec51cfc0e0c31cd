"""Requests to stop: the step is finished, a checkpoint is written, and the exit code asks for more.

SIGTERM is what schedulers and spot instances send before they take a machine, SIGUSR1 what Slurm
can send ahead of a time limit, SIGINT is Ctrl-C, SIGHUP the end of a terminal. A second Ctrl-C ends
the process at once. A rank whose launcher is gone asks as well: nobody would start it again, and
nobody could stop it. DeepSpeed's ends on SIGTERM without a word to its ranks; any may be killed.

The loop adds the request to the step's own collective, so that all ranks stop after the same step
even if only one of them was told. Signals are read from a descriptor by a thread, because Python
runs handlers in the main thread only, which may be waiting in a collective for ever.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

import psutil

from deberta_ds.base.errors import EXIT_INTERRUPTED, tell
from deberta_ds.base.files import write_atomic
from deberta_ds.cluster.launcher import MODULES, PROGRAMS

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 1.0  # between two looks for the launcher
_ECHO_SECONDS = 1.0  # a terminal and a launcher both pass on one Ctrl-C
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHELLS = {"sh", "bash", "dash", "zsh"}


class Launcher:
    """The processes between this one and the topmost launcher above it; none without a launcher.

    What stands higher (a shell, a terminal, nohup) may end, and the run goes on.
    """

    def __init__(self):
        ancestors = [(one.pid, started_at(one.pid), command_line(one.pid))
                     for one in psutil.Process().parents()]
        launchers = [index for index, (*_, words) in enumerate(ancestors) if is_launcher(words)
                     or index == 0 and words[:1] and PurePath(words[0]).name == "timeout"]
        top = launchers[-1] + 1 if launchers else 0
        # pdsh has no process on this host but the ssh session, which has no terminal.
        above = [index for index, (*_, words) in enumerate(ancestors[top:], start=top)
                 if words[:1] and PurePath(words[0]).name.lstrip("-") not in _SHELLS]
        if launchers and above and ancestors[above[0]][2][0].endswith("@notty"):
            top = above[0] + 1
        self._watched = ancestors[:top]

    def gone(self) -> str:
        """Return the name and pid of a launcher process that has ended, or ""."""
        return next((f"{_title(words)}, pid {pid}" for pid, started, words in self._watched
                     if started is None or started_at(pid) != started), "")


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
        return len(words) > position + 1 and words[position + 1] in MODULES
    return not PROGRAMS.isdisjoint(programs)


def started_at(pid: int) -> int | None:
    """Return when a process of this machine started, in clock ticks since the boot; None if it does
    not run. Ids are used again, the pair is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # names are cut in bytes
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(") ")[2].split()  # the name in front may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def command_line(pid: int) -> list[str]:
    """Return the words of its command, [] if they cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _title(words: list[str]) -> str:
    names = [PurePath(word).name for word in words]
    known = [name for name in names[:4] if name in PROGRAMS | MODULES]
    return (known or names or ["its parent"])[0]


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self):
        self.reason = ""
        self.resumes_from = "step 0"  # where the run would go on if it ended now
        self.leave: Callable[[], None] | None = None  # ends the process, while nothing is to save
        self._interrupted_at = 0.0
        self._launcher = Launcher()

    def __bool__(self) -> bool:
        return bool(self.reason)

    def _watch(self, descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            if poll.poll(1000 * _LOOK_SECONDS):
                numbers = os.read(descriptor, 64)
                if not numbers:  # `handlers_kept` has closed the other end
                    os.close(descriptor)
                    return
                for number in numbers:
                    if number in _SIGNALS:
                        self._receive(signal.Signals(number))
            elif not self.reason and (gone := self._launcher.gone()):
                self._ask(f"the end of its launcher ({gone})")

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted_at and now - self._interrupted_at > _ECHO_SECONDS:
                _say(f"interrupted twice: ended at once. The same command goes on from "
                     f"{self.resumes_from}")
                for child in multiprocessing.active_children():  # loaders, before they complain
                    child.kill()
                os._exit(EXIT_INTERRUPTED)
            self._interrupted_at = self._interrupted_at or now
        if not self.reason:
            self._ask(number.name)

    def _ask(self, reason: str) -> None:
        self.reason = reason
        _unblock_console()
        if self.leave:
            _say(f"asked to stop by {reason} before the first step: there is nothing to save")
            self.leave()
        once_more = "; Ctrl-C once more ends it at once" if reason == "SIGINT" else ""
        _say(f"asked to stop by {reason}: the step is finished and saved{once_more}")


def listen() -> StopRequest:
    """Return a request that becomes true when a signal arrives; main thread only.

    The loader's workers must ignore these signals (data/loader.py): launchers send them to the
    whole process group, and the last step still needs its rows.
    """
    request = StopRequest()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in _SIGNALS:
        # A shell has its background jobs ignore Ctrl-C, which is meant for the one in front;
        # nohup has them ignore the end of the terminal.
        if number not in (signal.SIGINT, signal.SIGHUP) or \
                signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _noted_by_descriptor)
    threading.Thread(target=request._watch, args=(read_end,), name="signals", daemon=True).start()
    return request


def listen_again() -> None:
    """Put this process's handlers in their places again; main thread only, once a step.

    Triton's compiler takes them over where it first compiles a kernel. Its handlers are gone for a
    moment after a signal, so the second of two (`timeout` and launchers send to the process and
    to its group) would end it unsaved.
    """
    for number in _SIGNALS:
        if (handler := signal.getsignal(number)) is not None:  # None: not Python's
            signal.signal(number, handler)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers of signals back after the block, in which `listen` may be called."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if (own := signal.set_wakeup_fd(descriptor)) >= 0:
            os.close(own)


def end_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore() -> None:
    """Ignore every signal that `listen` takes for a request: for processes that the ranks start."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _noted_by_descriptor(_number: int, _frame) -> None:
    """Python writes to the wakeup descriptor only for signals that have a handler."""


def _unblock_console() -> None:
    """Let a print fail, not wait, where nobody empties the pipe.

    mpirun reads no more once it is told to end, a minute before it tells its ranks: a full pipe
    would hold the step that is to be finished and saved.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                os.set_blocking(stream.fileno(), False)
    main_thread = threading.main_thread().ident
    assert main_thread is not None  # it was started
    # A print that waits tries again.
    signal.pthread_kill(main_thread, signal.SIGUSR1)


def _say(text: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell(text)


# How a job ended, for the script that started it.
#
# Exit codes get lost on the way: `srun` returns the highest of all tasks' codes, which is 137 for
# one that it killed itself, and some launchers return 1 for everything. So a job that stopped at a
# checkpoint, or that the watchdog ended, says so in the file that RUN_END_FILE names:
#
#     75              saved: run the same command again
#     70 node3,node7  a rank was stuck or dead; the hosts that it names, if any, are to be avoided
VARIABLE = "RUN_END_FILE"


def record(code: int, hosts: Collection[str] = ()) -> None:
    """Write how the job ended, if anybody asked for it; a file that cannot be written is lost."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):
            write_atomic(path, f"{code} {','.join(sorted(hosts))}".strip() + "\n")


def record_first(code: int, hosts: set[str]) -> None:
    """As `record`, unless a rank has already written this code: the first report knows best."""
    with suppress(OSError, IndexError), open(os.environ.get(VARIABLE, "")) as file:
        if file.read().split()[0] == str(code):
            return
    record(code, hosts)
