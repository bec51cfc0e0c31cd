"""Check Triton kernels against torch on this GPU, once per node, GPU, torch, Triton and shape.

A kernel that was compiled by another Triton, or for a card that nobody has tried, may be wrong
without a word. So before it is taken by default, small problems go forward and backward through it
and through torch's operators on the card itself, in a process of its own: a fault of the GPU (an
illegal address) leaves nothing that this process could go on with. A pass is kept in a file on this
node, next to what Triton has compiled, and not asked again.
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
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deberta_ds.base import splitmix
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import temporary_directory, write_atomic

# Relative, of every result: three times what rounding the input dtype costs.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
SOURCES = (Path(__file__).parents[1], Path(splitmix.__file__))  # what a passed check depends on
_MOST_SECONDS = 600  # of a check; compiling takes about one minute
_MOST_CHARACTERS = 8000  # of the error of a compiler, which may print a whole program


class Problem(NamedTuple):
    """What a kernel and torch's operators compute from the same tensors, these in fp32."""

    what: str
    kernel: Callable
    right: Callable
    values: list[Tensor]
    names: str = ""  # of the values
    grad: Tensor | None = None  # of the result; None: it has no gradients


def worst(problems: Iterable[Problem]) -> tuple[float, str]:
    """Return the largest relative error of results and gradients, NaN above all, and of which."""
    errors = []
    for what, *functions, values, names, grad in problems:
        both = []
        for function, given in zip(functions, (values, [x.float() for x in values]), strict=True):
            leaves = [x.detach().clone().requires_grad_(grad is not None) for x in given]
            out = function(*leaves)
            both.append([out] if grad is None else
                        [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
        words = ["result", *(f"gradient of {name}" for name in names.split())]
        for word, *pair in zip(words, *both, strict=True):
            result, right = (x.double() for x in pair)
            error = (result - right).norm() / (right.norm().item() or 1.0)
            errors.append((error.item(), f"{word} of {what}"))
    return max(errors, key=lambda item: float("inf") if item[0] != item[0] else item[0])


@cache
def check(request: tuple, problems: Callable[..., Iterable[Problem]]) -> str:
    """Return how a kernel was found to agree with torch's operators; UserError if it does not.

    request: what was asked of `choose.pick`. problems(request), a function of `checks`, makes what
    is solved in a process of its own. A change of any file of this folder's parent asks again.
    """
    if missing := missing_tools():
        raise UserError(missing)
    device = request[0]
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = repr((card, torch.__version__, metadata.version("triton"), _digest(SOURCES),
                problems.__name__, request[1:-1]))
    path = results_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.txt"
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


def _in_a_process(request: tuple, problems: Callable) -> tuple[float, str]:
    """Return what `worst` says in another process; UserError for one that dies or hangs."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, env=environ,
                              input=pickle.dumps((request, problems)), timeout=_MOST_SECONDS)
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


if __name__ == "__main__":  # the process that `_in_a_process` starts
    asked, problems_of = pickle.load(sys.stdin.buffer)
    with torch.cuda.device(asked.device) if asked.device.type == "cuda" else nullcontext():
        print(json.dumps(worst(problems_of(asked))))
