"""How fast a processor multiplies and moves memory, measured when a run on a CPU starts.

No list of peaks serves for CPUs: cores, clock, AMX and who else computes there decide. So a step's
"MFU" on a CPU is its share of what the same process reaches in one large product just before.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deberta_ds import dist

# Rows, inner size, columns: a feed-forward layer of a base model, of an xsmall one, of the demo's.
_SHAPES = {"large": (1024, 1536, 1536), "medium": (1024, 384, 1536), "small": (512, 128, 512)}
_COPIED_BYTES = 1 << 26  # more than the caches of a core
_SECONDS = 0.03  # for each figure, and at least twice


@dataclass(frozen=True)
class MachineSpeed:
    """What one rank reaches while all ranks are busy: the mean over the ranks."""

    precision: str
    product_flops: dict[str, float]  # FLOP/s by shape class
    copied_bytes: float  # a second, read and written

    def describe(self) -> str:
        """Return one line for the log."""
        products = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in
                             self.product_flops.items())
        return (f"a rank's {self.precision} products: {products} GFLOP/s; memory: "
                f"{self.copied_bytes / 1e9:.1f} GB/s; MFU is the share of large products")


def measure(precision: str) -> MachineSpeed:
    """Measure products in `precision` ("bf16", "fp16", "fp32") on the CPU; call on every rank."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    rates = []
    for rows, inner, columns in _SHAPES.values():
        left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        seconds = _least_seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c))
        rates.append(2 * rows * inner * columns / seconds)
    source, target = (torch.ones(_COPIED_BYTES // 8) for _ in range(2))
    rates.append(_COPIED_BYTES / _least_seconds(lambda: target.copy_(source)))
    summed = dist.sum_over_ranks(torch.tensor(rates, dtype=torch.float64))
    *products, copied = (summed / dist.world_size()).tolist()
    return MachineSpeed(precision, dict(zip(_SHAPES, products, strict=True)), copied)


def _least_seconds(work: Callable[[], object]) -> float:
    work()  # fresh pages, and code that oneDNN compiles
    took, spent = [], 0.0
    while spent < _SECONDS or len(took) < 2:
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
        spent += took[-1]
    return min(took)
