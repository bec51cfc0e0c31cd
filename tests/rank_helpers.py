"""Start the ranks of a script quickly: one server imports everything once, each rank is its fork.

The ranks run launch/pretrain.py itself, or a worker script, each in a process of its own that can
be killed.
"""

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
from contextlib import suppress
from pathlib import Path

PRETRAIN = Path(__file__).resolve().parent.parent / "launch/pretrain.py"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rank_preload"])


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
        process = _context.Process(target=_rank_main, args=(Path(script), own, env, log, log))
        process.start()
        processes.append(process)
    return processes


def start_alone(script: Path, arguments: list[str], out: Path, errors: Path):
    """Return the started process of a script without a launcher."""
    _start_server()
    process = _context.Process(target=_rank_main, args=(script, arguments, {}, out, errors))
    process.start()
    return process


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


def _rank_main(script: Path, arguments: list[str], env: dict[str, str], out: Path, errors: Path
               ) -> None:
    assert "rank_preload" in sys.modules, "the server has loaded nothing"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.environ.update(env)
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as Python does
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
