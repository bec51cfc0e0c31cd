"""Runs commands in forks of one process that has imported everything: a case takes a moment.

The parent writes one JSON request a line to this program's input and reads one answer a line. Each
command runs in a session of its own without root's privileges (a file that nobody may read cannot
be read), with its output in pipes, so that a limit on file sizes leaves the messages whole.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PRELOAD = ("rank_preload", "deepspeed.runtime.zero.muon.muon_optimizer",
            "torch.utils.tensorboard", "sklearn.metrics", "pyarrow.parquet", "matplotlib.pyplot",
            "transformers.models.deberta_v2.modeling_deberta_v2",
            "transformers.models.deberta_v2.tokenization_deberta_v2")
_KILL_AFTER_EXIT_SECONDS = 2.0  # for processes that a command left behind


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not reach the parent
    os.dup2(2, 1)
    _preload()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


def _preload() -> None:
    import deberta_ds

    for module in pkgutil.walk_packages(deberta_ds.__path__, "deberta_ds."):
        if not module.name.split(".")[-1].startswith("kernels"):
            importlib.import_module(module.name)
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # what is imported is no garbage: no fork looks at it again


def _run(request: dict) -> dict:
    out, out_end = os.pipe()
    error, error_end = os.pipe()
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        os.dup2(out_end, 1)
        os.dup2(error_end, 2)
        os.closerange(3, 64)
        _become(request)
    os.close(out_end)
    os.close(error_end)
    deadline = started + request["timeout_seconds"]
    texts, code = {out: b"", error: b""}, None
    is_open = {out, error}
    while is_open:
        for end in select.select(is_open, (), (), 0.02)[0]:
            data = os.read(end, 1 << 16)
            texts[end] += data
            if not data:
                is_open.discard(end)
        if code is None:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + _KILL_AFTER_EXIT_SECONDS)
        if time.monotonic() > deadline:
            break
    hung = code is None and time.monotonic() > deadline
    _kill_session(process)
    if code is None:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(out)
    os.close(error)
    return {"code": code, "output": texts[out].decode(errors="replace"),
            "errors": texts[error].decode(errors="replace"), "hung": hung,
            "seconds": time.monotonic() - started}


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _become(request: dict) -> None:
    """Run the script of `request` in this process, and end it."""
    code = 1
    try:
        os.setsid()
        if request["file_limit_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit_bytes"],) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
        _drop_privileges()
        for name, value in request["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.chdir(request["directory"])
        script = ROOT / request["script"]
        sys.path.insert(0, str(script.parent))
        sys.argv = [str(script), *request["arguments"]]
        sys.stdin = open(os.devnull)
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    os._exit(code)


def _drop_privileges() -> None:
    """Give up root's right to read and write what the permission bits forbid."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(ctypes.byref(header), ctypes.byref(none))


if __name__ == "__main__":
    main()
