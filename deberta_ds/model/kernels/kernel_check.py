"""Check Triton kernels against torch on this GPU, once per node, GPU, torch, Triton and shape.

A kernel that was compiled by another Triton, or for a card that nobody has tried, may be wrong
without a word. So before it is taken by default, a small problem goes forward and backward through
it and through torch's operators on the card itself, in a process of its own: a fault of the GPU
(an illegal address) leaves nothing that this process could go on with. A pass is kept in a file on
this node, next to what Triton has compiled, and not asked again.
"""

import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from deberta_ds.base import splitmix
from deberta_ds.base.files import temporary_directory, write_atomic

# Relative, of every result: three times what rounding the input dtype costs.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
SOURCES = (Path(__file__).parents[1], Path(splitmix.__file__))  # what a passed check depends on
_MOST_SECONDS = 600  # of a check; compiling takes about one minute
_MOST_CHARACTERS = 8000  # of the error of a compiler, which may print a whole program


class Verdict(NamedTuple):
    """What the check found, in words for the log; of a failure also where."""

    passed: bool
    text: str


verdicts: dict[str, Verdict] = {}  # of this process, by platform and kind


def merge(found: dict[str, Verdict]) -> None:
    """Add the verdicts of another rank; a kernel that fails on one fails on all."""
    verdicts.update({key: verdict for key, verdict in found.items()
                     if key not in verdicts or not verdict.passed})


def check(request: tuple, compare: Callable[..., tuple[float, str]]) -> Verdict:
    """Return whether a kernel agrees with torch's operators; as known here, or kept on this node.

    request: what was asked of `choose.pick`. compare(request), a function of `checks`, returns the
    largest relative error and of what it is; it runs in a process of its own. A change of any file
    of this folder's parent asks again.
    """
    device, dtype, size, state, *others, _ = request
    if missing := missing_tools():
        return _failed(device, missing)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    types = f"{str(dtype)[6:]} into {str(state or dtype)[6:]}"
    key = (f"{card}, torch {torch.__version__}, triton {metadata.version('triton')}, kernels "
           f"{_digest(SOURCES)}, {compare.__name__}, {types}, size {size}, {others}")
    path = results_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.txt"
    if key not in verdicts and path.is_file():
        verdicts[key] = Verdict(True, f"{path.read_text().strip()}, kept in {path}")
    if key not in verdicts:
        start = time.perf_counter()
        found = verdicts[key] = _run(request, compare)
        if found.passed:
            with suppress(OSError):  # a disk that is full: the next run checks again
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, found.text + "\n")
            seconds = time.perf_counter() - start
            verdicts[key] = Verdict(True, f"{found.text}, in {seconds:.1f} s")
    return verdicts[key]


def c_compiler() -> str | None:
    """Return the compiler that Triton takes."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def missing_tools() -> str:
    """Return what Triton needs of this machine and does not find, or an empty string."""
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not c_compiler():
        return "Triton finds no C compiler (apt install gcc, or set CC)"
    return "" if header.is_file() else f"Triton finds no {header} (apt install python3-dev)"


def _run(request: tuple, compare: Callable[..., tuple[float, str]]) -> Verdict:
    """Return the verdict of `compare` in another process; one that dies or hangs is a failure."""
    device, allowed = request[0], TOLERANCES[request[1]]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, env=environ,
                              input=pickle.dumps((request, compare)), timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return _failed(device, f"it does not end in {_MOST_SECONDS} s")
    said = done.stderr.decode(errors="replace").strip()[-_MOST_CHARACTERS:]
    if done.returncode:
        code = done.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return _failed(device, f"its process ends with {how}\n{said}")
    error, where = json.loads(done.stdout.splitlines()[-1])
    if not error <= allowed:  # NaN is no pass
        return _failed(device, f"{where} off by {error:.1e} where {allowed:.1e} is allowed")
    return Verdict(True, f"checked against torch's operators, largest error {error:.1e}")


def _failed(device: torch.device, text: str) -> Verdict:
    return Verdict(False, f"on {socket.gethostname()}, {device}: {text}")


def keep_on_this_node() -> None:
    """Let Triton keep what it compiles on this node, unless the user says where.

    Ranks that compile at once in a home on a network file system disturb each other.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(temporary_directory() / "triton"))


def results_folder() -> Path:
    """Return where passes are kept on this node, one file each."""
    return temporary_directory() / "kernels"


@cache
def _digest(sources: tuple[Path, ...]) -> str:
    """Return a digest of all files that a kernel and its truth are made of."""
    digest = hashlib.sha256()
    for path in sorted(path for source in sources for path in (
            source.rglob("*") if source.is_dir() else [source]) if path.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":  # the process that `_run` starts
    asked, function = pickle.load(sys.stdin.buffer)
    with torch.cuda.device(asked.device) if asked.device.type == "cuda" else nullcontext():
        print(json.dumps(function(asked)))
