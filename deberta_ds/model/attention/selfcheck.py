"""Is the fused attention right on this card? Asked once per card, torch, Triton and kind of shape.

A kernel that was compiled by another Triton, or for a card that nobody has tried, may be wrong
without a word. So before `auto` takes it, a few rows go forward and backward through it and through
the reference on the card itself. A pass is kept in a file, and not asked for again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds.files import write_atomic
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import reference_attention

GEOMETRY = Geometry(512, 256)  # of every released v2 and v3 model
HEADS, DROPOUT = 2, 0.1
# Relative, of the context and of every gradient: three times what rounding the input dtype costs.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
RESULTS = ("context", "queries", "keys", "values", "position keys", "position queries")


@dataclass(frozen=True)
class Verdict:
    """What the check found, in words for the log."""

    passed: bool
    text: str


def check(device: torch.device, dtype: torch.dtype, size: int, long: bool,
          fused: Callable[..., Tensor]) -> Verdict:
    """Return whether `fused` agrees with the reference; from the file if it has been found to.

    size: of a head. long: with pairs beyond the relative table's reach, which other loops take.
    """
    path = results_file()
    key = _key(device, dtype, size, long)
    known = _read(path)
    if key in known:
        return Verdict(True, f"{known[key]}, kept in {path}")
    start = time.perf_counter()
    try:
        error, where = compare(device, dtype, size, long, fused)
    except Exception as problem:  # a compiler's, a driver's: anything that is not a right result
        return Verdict(False, f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}")
    allowed = TOLERANCES[dtype]
    if not error <= allowed:  # NaN is no pass
        return Verdict(False, f"{where} off by {error:.1e} where {allowed:.1e} is allowed")
    text = f"checked against the reference, largest error {error:.1e}"
    _keep(path, known | {key: text})
    return Verdict(True, f"{text}, in {time.perf_counter() - start:.1f} s")


def compare(device: torch.device, dtype: torch.dtype, size: int, long: bool,
            fused: Callable[..., Tensor]) -> tuple[float, str]:
    """Return the largest relative error of `fused` (NaN above all), and of what it is."""
    errors = []
    with torch.inference_mode(False), torch.enable_grad():
        for length, queries in ((1100, None),) if long else ((300, None), (300, 40)):
            case = _Case(device, dtype, size, length, queries)
            truth, result = case.run(reference_attention, torch.float32), case.run(fused, dtype)
            rows = f"{length} tokens" if queries is None else f"{queries} of {length} tokens"
            for name, right, found in zip(RESULTS, truth, result, strict=True):
                error = ((found.float() - right).norm() / right.norm()).item()
                errors.append((error, f"{name} in rows of {rows}"))
    return max(errors, key=lambda item: float("inf") if item[0] != item[0] else item[0])


class _Case:
    """One problem: two packed rows, the second with padding, dropout on."""

    def __init__(self, device, dtype, size: int, length: int, queries: int | None):
        generator = torch.Generator().manual_seed(length)

        def draw(*shape):
            values = torch.randn(*shape, generator=generator).to(device, dtype)
            return values.transpose(1, 2) if len(shape) == 4 else values

        rows = queries or length
        self.tensors = [draw(2, rows, HEADS, size), *(draw(2, length, HEADS, size) for _ in "kv"),
                        *(draw(HEADS, GEOMETRY.num_slots, size) for _ in "kq")]
        self.grad = draw(2, rows, HEADS, size).transpose(1, 2)
        self.segments = torch.ones(2, length, dtype=torch.int32)
        self.segments[1, length // 3 :] = 2
        self.segments[1, length - 20 :] = 0
        self.segments = self.segments.to(device)
        self.columns = None
        if queries is not None:
            columns = torch.randint(0, length, (2, queries), generator=generator)
            self.columns = columns.to(device)

    def run(self, attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the context and all gradients."""
        leaves = [x.to(dtype).detach().requires_grad_() for x in self.tensors]
        context = attention(*leaves, geometry=GEOMETRY, segments_BL=self.segments,
                            query_positions_BQ=self.columns, dropout=DROPOUT, seed=1)
        return [context, *torch.autograd.grad(context, leaves, self.grad.to(context.dtype))]


def results_file() -> Path:
    """Return the file of passes: under $XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "deberta_ds" / "fused_attention.json"


def _key(device: torch.device, dtype: torch.dtype, size: int, long: bool) -> str:
    """Return what a pass holds for; the kernels' own text is part of it."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rows = "long" if long else "short"
    versions = f"torch {torch.__version__}, triton {version('triton')}, kernels {_kernels_digest()}"
    return f"{card}, {versions}, {str(dtype)[6:]}, heads of {size}, {rows} rows"


def _kernels_digest() -> str:
    folder = Path(__file__).with_name("fused")
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.json")]):
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
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(known, indent=1) + "\n")
    except OSError:
        pass  # a home that cannot be written: the next run checks again
