"""Start the ranks of a script quickly: one server imports everything once, each rank is its fork.

The ranks run launch/pretrain.py itself, or a worker script, each in a process of its own that can
be killed.
"""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread

PRETRAIN = Path(__file__).resolve().parent.parent / "launch/pretrain.py"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rank_preload"])
_ONE = Lock()  # a start asks after all processes, and of two who ask one reads no exit code

QUICK_PYTHON = """#!{python} -IS
import json, os, signal, socket, sys
words = [word for word in sys.argv[1:] if word != "-u"]
if not words or words[0].startswith("-") and words[0] != "-m":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = os.getpid(), words, dict(os.environ), os.getcwd(), sys.argv[0]
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    link.sendall(json.dumps(request).encode() + b"\\n")
    answers = link.makefile()
    process = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(process, number))
    sys.exit(int(answers.readline()))
"""


def _start_server() -> None:
    """Start the server, once: before 3.12.8 Python gives it no path, and a preload fails silently.
    """
    kept = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), str(PRETRAIN.parents[1]), *([kept] if kept else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    multiprocessing.forkserver.ensure_running()
    if kept is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = kept


def free_port() -> int:
    """Return a free port below those that the kernel hands out, or some other test's socket takes
    it before the rank does that it is meant for."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start(world_size: int, arguments: list[str], log: Path, script: Path = PRETRAIN) -> list:
    """Return the started processes of `script arguments`, rank by rank; output goes to log."""
    return start_each([arguments] * world_size, log, script)


def start_each(arguments: list[list[str]], log: Path, script: Path = PRETRAIN) -> list:
    """As `start`, each rank with arguments of its own."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    _start_server()
    processes = []
    for rank, own in enumerate(arguments):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(arguments)),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(_start([str(script), *own], env, log, log))
    return processes


def start_alone(words: list[str], out: Path, errors: Path):
    """Return the started process of `python *words` without a launcher."""
    _start_server()
    return _start(words, {}, out, errors)


def _start(*arguments):
    process = _context.Process(target=_rank_main, args=arguments)
    process.start()
    return process


@contextmanager
def quick_python(directory: Path) -> Iterator[str]:
    """Yield an executable in `directory` that stands for python: its scripts and modules run as
    forks of the server, and so do those that they start by sys.executable.
    """
    _start_server()
    program = directory / "python"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"\0{secrets.token_hex()}")
        listener.listen()
        program.write_text(QUICK_PYTHON.format(python=sys.executable, address=address))
        program.chmod(0o755)
        Thread(target=_serve, args=(listener,), daemon=True).start()
        yield str(program)
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket) -> None:
    with suppress(OSError):  # at the end
        while True:
            Thread(target=_answer, args=(listener.accept()[0],), daemon=True).start()


def _answer(link: socket.socket) -> None:
    with link, suppress(OSError):  # who asked may be gone
        pid, words, env, *place = json.loads(link.makefile().readline())
        ends = [f"/proc/{pid}/fd/{number}" for number in (1, 2, 0)]
        with _ONE:
            process = _start(words, env, *ends, *place)
        link.sendall(f"{process.pid}\n".encode())
        code = None
        while code is None:
            time.sleep(0.02)
            with _ONE:
                code = process.exitcode
        link.sendall(f"{code}\n".encode())


def wait(processes: list, timeout: float = 900) -> list[int]:
    """Return the exit codes; ranks that outlive the timeout, or a failed rank by 20 s, are killed.
    """
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 20)
        if time.monotonic() > deadline:
            kill(processes)
        time.sleep(0.02)
    return [process.exitcode for process in processes]


def kill(processes: list) -> None:
    """End every rank at once with SIGKILL."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def run(world_size: int, arguments: list[str], log: Path, script: Path = PRETRAIN) -> str:
    """Run to the end and return the log; raises AssertionError with it if a rank failed."""
    codes = wait(start(world_size, arguments, log, script))
    text = log.read_text(encoding="utf-8", errors="replace")
    assert not any(codes), f"exit codes {codes}\n{text[-6000:]}"
    return text


def _rank_main(words: list[str], env: dict[str, str], out: Path, errors: Path,
               given: str = os.devnull, directory: str = "", executable: str = "") -> None:
    """Be `python *words`; of a `quick_python`, `env` is the whole environment."""
    assert "rank_preload" in sys.modules, "the server has loaded nothing"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(given, os.O_RDONLY), 0)
    if executable:
        os.chdir(directory)
        os.environ.clear()
        sys.executable, sys.stdin, sys.stdout = executable, open(0), open(1, "w")
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    os.environ.update(env)
    code, sys.argv = 0, words
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))  # as Python does
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as done:
        code = done.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
