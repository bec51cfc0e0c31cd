"""Check Triton kernels against torch on this GPU, once per GPU, torch, Triton and kind of shape.

A kernel that was compiled by another Triton, or for a card that nobody has tried, may be wrong
without a word. So before it is taken by default, a small problem goes forward and backward through
it and through torch's operators on the card itself. A pass is kept in a file, and not asked again.
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds.base.errors import first_line
from deberta_ds.base.files import write_atomic

_LOG = logging.getLogger("deberta_ds")
OFF = "DEBERTA_DS_KERNELS"  # "0": no Triton kernels, torch's operators alone
OLDEST = (8, 0)  # compute capability: before it, no bf16 and no asynchronous copies
# Relative, of every result: three times what rounding the input dtype costs.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Verdict:
    """What the check found, in words for the log."""

    passed: bool
    text: str


def check(device: torch.device, dtype: torch.dtype, kind: str, sources: list[Path],
          compare: Callable[[], tuple[float, str]]) -> Verdict:
    """Return whether a kernel agrees with torch's operators; from the file if it was found to.

    kind: the kernel and its class of shapes, in words. sources: the files that it and its truth
    are made of; a change of them, or of this file, asks again. compare() returns the largest
    relative error and of what it is. Raises what says nothing of the kernel: a card that is full
    or broken.
    """
    path = results_file()
    key = f"{_platform(device)}, kernels {_digest(sources)}, {str(dtype)[6:]}, {kind}"
    known = _read(path)
    if key in known:
        return Verdict(True, f"{known[key]}, kept in {path}")
    start = time.perf_counter()
    try:
        # A thread of its own: autocast, inference mode and above all the hooks of activation
        # checkpointing belong to the forward pass that asks, and would see the check's tensors.
        with ThreadPoolExecutor(1) as thread:
            error, where = thread.submit(_on_device, device, compare).result()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as problem:  # a compiler's, a driver's: anything that is not a right result
        return _failed(device, kind, f"{type(problem).__name__}: {first_line(problem)[:200]}")
    allowed = TOLERANCES[dtype]
    if not error <= allowed:  # NaN is no pass
        return _failed(device, kind, f"{where} off by {error:.1e} where {allowed:.1e} is allowed")
    text = f"checked against torch's operators, largest error {error:.1e}"
    _keep(path, known | {key: text})
    return Verdict(True, f"{text}, in {time.perf_counter() - start:.1f} s")


def _failed(device: torch.device, kind: str, text: str) -> Verdict:
    """Return the verdict, and warn on this rank: all others will wait for its slower operators."""
    _LOG.warning("%s on %s: a Triton kernel fails its check: %s", kind, device, text)
    return Verdict(False, text)


def _on_device(device: torch.device, compare: Callable[[], tuple[float, str]]
               ) -> tuple[float, str]:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return compare()


def largest_error(results: list[Tensor], truth: list[Tensor], names: tuple[str, ...]
                  ) -> tuple[float, str]:
    """Return the largest relative error of some results (NaN above all), and whose it is."""
    errors = []
    for result, right, name in zip(results, truth, names, strict=True):
        norm = right.double().norm().item()
        errors.append(((result.double() - right.double()).norm().item() / (norm or 1.0), name))
    return max(errors, key=lambda item: float("inf") if item[0] != item[0] else item[0])


def interpreted() -> bool:
    """Return whether Triton runs its kernels on the CPU, as tests have it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def obstacle(device: torch.device) -> str:
    """Return what keeps any Triton kernel from running on a device, or an empty string."""
    if os.environ.get(OFF) == "0":
        return f"{OFF}=0"
    if device.type != "cuda" and not interpreted():
        return "no GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not interpreted() and torch.cuda.get_device_capability(device) < OLDEST:
        return "the card has no compute capability {}.{}".format(*OLDEST)
    return ""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Return the context for launches: Triton launches on the current device, not the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def results_file() -> Path:
    """Return the file of passes: under $XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "deberta_ds" / "kernels.json"


def _platform(device: torch.device) -> str:
    """Return what compiles and runs a kernel."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    triton = importlib.import_module("triton")
    return f"{card}, torch {torch.__version__}, triton {triton.__version__}"


def _digest(sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*sources, Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # none yet, or not readable: check again
    return known if isinstance(known, dict) else {}


def _keep(path: Path, known: dict[str, str]) -> None:
    try:
        write_atomic(path, json.dumps(known, indent=1) + "\n")
    except OSError:
        pass  # a home that cannot be written: the next run checks again
