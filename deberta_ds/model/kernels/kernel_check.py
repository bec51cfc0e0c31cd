"""Check Triton kernels against torch on this GPU, once per node, GPU, torch, Triton and shape.

A kernel that was compiled by another Triton, or for a card that nobody has tried, may be wrong
without a word. So before it is taken by default, small problems go forward and backward through it
and through torch's operators on the card itself (`checks`), in a process of its own: a fault of the
GPU (an illegal address) leaves nothing that this process could go on with. A pass is kept in a file
on this node, next to what Triton has compiled, and not asked again.
"""

import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from deberta_ds.base import splitmix
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import temporary_directory, write_atomic

# Relative, of every result: three times what rounding the input dtype costs.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# The files that a kernel and its truth are made of: a change of any asks again.
SOURCES = (Path(__file__).parents[1], Path(splitmix.__file__))
_MOST_SECONDS = 600  # of a check; compiling takes about one minute
_MOST_CHARACTERS = 8000  # of the error of a compiler, which may print a whole program


@cache
def check(request: tuple, problems: str) -> str:
    """Return how a kernel was found to agree with torch's operators; UserError if it does not.

    request: what was asked of `choose.pick`. problems: the place of a function of `checks`, which
    makes of it what is solved.
    """
    if missing := missing_tools():
        raise UserError(missing)
    device = request[0]
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = (card, torch.__version__, metadata.version("triton"), problems, request[1:])
    digest = hashlib.sha256(repr(key).encode())
    for path in sorted(path for source in SOURCES for path in (source, *source.rglob("*"))
                       if path.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    path = temporary_directory() / "kernels" / f"{digest.hexdigest()[:16]}.txt"
    if path.is_file():
        return f"{path.read_text().strip()}, kept in {path}"
    error, where = _in_a_process(request, problems)
    if not error <= (allowed := TOLERANCES[request[1]]):  # NaN is no pass
        raise UserError(f"{where} off by {error:.1e} where {allowed:.1e} is allowed")
    text = f"checked against torch's operators, largest error {error:.1e}"
    with suppress(OSError):  # a disk that is full: the next process checks again
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, text + "\n")
    return text


def _in_a_process(request: tuple, problems: str) -> tuple[float, str]:
    """Return what `checks.worst` says in another process; UserError for one that dies or hangs."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deberta_ds.model.kernels.checks"], env=environ,
            input=pickle.dumps((request, problems)), timeout=_MOST_SECONDS, capture_output=True)
    except subprocess.TimeoutExpired:
        raise UserError(f"it does not end in {_MOST_SECONDS} s") from None
    if code := done.returncode:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = done.stderr.decode(errors="replace").strip()[-_MOST_CHARACTERS:]
        raise UserError(f"its process ends with {how}\n{said}")
    return json.loads(done.stdout.splitlines()[-1])


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


def keep_on_this_node() -> None:
    """Let Triton keep what it compiles on this node, unless the user says where.

    Ranks that compile at once in a home on a network file system disturb each other.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(temporary_directory() / "triton"))
