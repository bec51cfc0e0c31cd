"""Errors that a user can cause, and how command-line scripts report them.

This is the one place that decides which exceptions are the user's: they end in one message, which
names the file, the place in it, the rule and the remedy. Everything else is a bug of ours and keeps
its traceback. Classes of other libraries are known by name, so that nothing heavy is imported here.
"""

import atexit
import errno
import os
import re
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from deberta_ds.base.command_line import as_typed

EXIT_USER_ERROR = 2
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run the same command again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
_MOST_LISTED = 8
MOST_PROBLEMS = 100  # that one error lists: 200,000 unknown keys took minutes

_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EACCES: "choose a path that you may read and write",
    errno.EPERM: "choose a path that you may read and write",
    errno.EROFS: "choose a directory on a file system that can be written",
    errno.ENOSPC: "make room there, or choose a directory on another file system",
    errno.EDQUOT: "make room there, or choose a directory on another file system",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files",
    errno.EEXIST: "it is in the way: choose another path",
    errno.ENOTDIR: "a part of this path is a file: choose another path",
    errno.ESTALE: "the network file system has lost it: run the same command again",
    errno.EIO: "the disk or the network file system has a fault",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "fix the symbolic link",
}
# How readers reject a file that is cut short, altered or of another kind. ValueError covers JSON,
# TOML, Unicode, NumPy, Arrow and pydantic; an OSError without a number is gzip's or Arrow's.
_DAMAGE = (ValueError, EOFError, OSError, OverflowError, RecursionError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DAMAGE_NAMES = {"zlib.error", "struct.error", "_csv.Error", "_lzma.LZMAError",
                 "zipfile.BadZipFile", "_pickle.UnpicklingError", "pyarrow.lib.ArrowException",
                 "zstandard.backend_c.ZstdError",
                 "safetensors._safetensors_rust.SafetensorError"}
_SAY_SECONDS = 10.0
_interrupts: list[int] = []
_LOOP = "Symlink loop from "
_NO_MEMORY_NAMES = {"torch.OutOfMemoryError", "numpy._core._exceptions._ArrayMemoryError"}
_NO_MEMORY_TEXTS = ("DefaultCPUAllocator", "out of memory")  # torch's RuntimeError on a CPU


class UserError(ValueError):
    """Bad input: a config, corpus, shard, checkpoint or task file breaks a rule."""

    on_every_rank = False  # True: all ranks raise the same error, and only rank 0 prints it

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message, which says what to do, and no traceback."""
        return [f"error: {self}"]


class ConfigError(UserError):
    """One or more problems in a run config or a DeepSpeed JSON."""

    on_every_rank = True


def raise_problems(place: str, problems: list[str]) -> None:
    """Raise one ConfigError that lists every problem found in `place`; return if there is none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        if len(problems) > MOST_PROBLEMS:
            count = f"more than {MOST_PROBLEMS} problems"
        raise ConfigError(f"{count} in {place}\n  " + "\n  ".join(problems))


def user_message(error: BaseException) -> str | None:
    """Return what to tell the user, or None if `error` is a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno in _REMEDIES):
        is_full = error.errno in _FULL and error.filename2  # of a copy: the new file's disk
        return _system_message(error, error.filename2 if is_full else error.filename)
    if isinstance(error, RuntimeError) and str(error).startswith(_LOOP):  # of Path.resolve
        return f"{str(error).removeprefix(_LOOP)}: a loop of symbolic links; fix it"
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return "a path holds a NUL character; leave it out"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return f"the text {error.object[:60]!r} holds bytes that are not UTF-8; convert it to UTF-8"
    if isinstance(error, MemoryError) or _is_named(error, _NO_MEMORY_NAMES) or (
            isinstance(error, RuntimeError) and any(t in str(error) for t in _NO_MEMORY_TEXTS)):
        return (f"out of memory ({first_line(error)}); use smaller batches, a smaller model, "
                "fewer workers, or a larger machine")
    return None


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Context in which a file is read or written: what fails is a UserError that names `path`."""
    refuse_pipe(path)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise UserError(_system_message(error, path)) from error
        if not isinstance(error, _DAMAGE) and not _is_named(error, _DAMAGE_NAMES) and not (
                str(error).startswith("LZ4")):  # lz4 has no class of its own for damage
            raise
        raise UserError(f"{path}: damaged or cut short, or another kind of file "
                        f"({first_line(error)}); fetch or make it again") from error


@contextmanager
def of_extra(extra: str, what: str) -> Iterator[None]:
    """Context of imports for `what` that come with an extra of setup.py, or a UserError says so."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{what} needs the package {error.name}, which is missing here: pip "
                        f'install "deberta_ds[{extra}]"') from error


def refuse_pipe(path: str | Path) -> None:
    """Raise UserError for a pipe, of which nobody may be at the other end, and for a device, which
    may never end.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # said by whoever opens it
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{path}: is a pipe or a device; give a file")


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line to a console (standard error), which may be gone: no work is lost for that.

    A killed mpirun, `tee` or terminal leaves a pipe that nobody reads; what else is printed into it
    goes nowhere from then on.
    """
    stream = stream or sys.stderr
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def still_at_work(say: Callable[[], str]) -> Iterator[None]:
    """Context in which every ten seconds a line is printed: what `say` returns, and since when."""
    began, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        while not ended.wait(_SAY_SECONDS):
            tell(f"{say()}, {time.monotonic() - began:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run `main` and exit: with its code, or with one message if it fails by the user's doing.

    `python -X dev` shows the traceback of such a failure too.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files may be no text at all
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(main)
        sys.stdout.flush()
    except BaseException as error:
        try:
            code = _report(error)
        except BaseException:
            if not _has_gloo_threads():
                raise
            sys.excepthook(*sys.exc_info())
            code = 1
    if _has_gloo_threads():
        _end_at_once(code)
    with suppress(OSError, ValueError):  # a device that is full, or a pipe that nobody reads
        sys.stdout.flush()
        sys.exit(code)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries once more
    sys.exit(code)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of Ctrl-C: Python's own, remembered, as the imports of libraries in C may drop it."""
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def _dist() -> Any:
    return sys.modules.get("deberta_ds.cluster.dist")  # not imported here: it imports torch


def _has_gloo_threads() -> bool:
    dist = _dist()
    return dist is not None and dist.has_gloo_threads()


def _end_at_once(code: int | str | None) -> None:
    """End the process as Python does, but for taking its objects apart.

    A thread of gloo that lets go of a tensor meanwhile would abort it (code 134): it asks for a
    lock that Python before 3.14 answers by ending the thread. Files must be closed by now, and a
    profiler (cProfile) must write before `main` returns.
    """
    if not isinstance(code, int | None):  # as sys.exit("text")
        tell(str(code))
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what Python itself calls here
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code in (None, 0, EXIT_REQUEUE):  # on all ranks, so none waits in vain for another
        _leave_mpi()
    os._exit(code or 0)


def _leave_mpi() -> None:
    """Leave MPI, if this process has met it: mpirun counts a rank that ends without as dead."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        with suppress(mpi.Exception):  # a launcher that is gone counts nobody
            mpi.Finalize()


def _run(main: Callable[[], int | None]) -> int | str | None:
    try:
        return main() or 0
    except SystemExit as done:  # of argparse
        for frame, _ in traceback.walk_tb(done.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith("own_"):  # base/user_code.py
                raise UserError(f"{frame.f_code.co_filename}: {frame.f_code.co_name} ends the "
                                "program (SystemExit); raise an error of its own there") from done
        return done.code


def _report(error: BaseException) -> int:
    """Print the message of what ended the program; return its exit code. Raises a bug of ours."""
    if isinstance(error, KeyboardInterrupt) or _interrupts:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    dist = _dist()
    unnamed = isinstance(error, OSError) and not error.filename  # a write to a file that was open
    output_problem = _output_problem() if unnamed else None
    if isinstance(output_problem, BrokenPipeError):  # as in `show.py ... | head -1`
        return EXIT_PIPE_CLOSED
    message = _system_message(output_problem, "standard output") if output_problem \
        else user_message(error)
    if message is None:
        if dist and dist.heard_alarm():  # a collective that another rank has left
            return EXIT_USER_ERROR
        if dist:
            dist.sound_alarm(f"{type(error).__name__}: {first_line(error)}")
        raise error
    if sys.flags.dev_mode:
        traceback.print_exception(error)
    on_every_rank = getattr(error, "on_every_rank", False)
    is_said = os.environ.get("RANK", "0") != "0" if on_every_rank else (
        dist and not dist.is_first_to_fail())
    if not is_said:
        print(f"error: {as_typed(message)}", file=sys.stderr, flush=True)
    if dist:
        dist.sound_alarm(message)
    return EXIT_USER_ERROR


def _output_problem() -> OSError | None:
    """Return why standard output takes no more; None if it does."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # Python drops its buffer when a write fails
    except OSError as error:
        return error
    return None


def _system_message(error: OSError, path) -> str:
    reason = error.strerror or first_line(error)
    remedy = _REMEDIES.get(error.errno or 0)
    if error.errno == errno.ENOENT:
        remedy = f"{remedy}{looked_in(path)}"
    where = f"{path}: " if path else ""
    return f"{where}{reason}{'; ' + remedy if remedy else ''}"


def looked_in(path: Any) -> str:
    """Return where a relative path was looked for, which depends on where a command is started."""
    is_relative = path and not re.match(r"/|[a-z0-9+]+:", str(path))
    return f" (looked in {os.getcwd()})" if is_relative else ""


def listed(problems: list[str]) -> str:
    """Return a few problems and how many more there are: of 4,096 ranks each may have one."""
    more = f"; and {len(problems) - _MOST_LISTED:,} more" if len(problems) > _MOST_LISTED else ""
    return "; ".join(problems[:_MOST_LISTED]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _is_named(error: BaseException, names: set[str]) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(error).__mro__)
