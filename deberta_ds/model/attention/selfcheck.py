"""Is the fused attention right on this card? A few packed rows through it and the reference.

See `kernel_check` for when this is asked and where a pass is kept.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds import splitmix
from deberta_ds.model import kernel_check
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import reference_attention
from deberta_ds.model.kernel_check import Verdict

GEOMETRY = Geometry(512, 256)  # of every released v2 and v3 model
HEADS = 2
# (length, picked queries, dropout, position terms kept), one of every kind of kernel that runs.
SHORT = ((300, None, 0.1, False), (300, 40, 0.1, False), (300, None, 0.0, False),
         (300, None, 0.1, True))
LONG = ((600, None, 0.1, False), (900, None, 0.1, True), (1100, None, 0.1, False),
        (1100, 40, 0.0, False))
RESULTS = ("context", "queries", "keys", "values", "position keys", "position queries")


def check(device: torch.device, dtype: torch.dtype, size: int, long: bool,
          fused: Callable[..., Tensor]) -> Verdict:
    """Return whether `fused` agrees with the reference; from the file if it has been found to.

    size: of a head. long: with pairs beyond the relative table's reach, which other loops take.
    """
    folder = Path(__file__).with_name("fused")
    sources = [*folder.glob("*.py"), *folder.glob("*.json"), Path(splitmix.__file__),
               *(folder.with_name(name) for name in ("band.py", "dropout.py"))]
    kind = f"attention, heads of {size}, {'long' if long else 'short'} rows"
    return kernel_check.check(device, dtype, kind, sources,
                              lambda: compare(device, dtype, size, long, fused))


def compare(device: torch.device, dtype: torch.dtype, size: int, long: bool,
            fused: Callable[..., Tensor]) -> tuple[float, str]:
    """Return the largest relative error of `fused` (NaN above all), and of what it is."""
    results, truth, names = [], [], []
    for length, queries, dropout, keep in LONG if long else SHORT:
        case = _Case(device, dtype, size, length, queries, dropout)
        truth += case.run(reference_attention, torch.float32)
        results += case.run(partial(fused, keep_terms=True) if keep else fused, dtype)
        rows = f"{length} tokens" if queries is None else f"{queries} of {length} tokens"
        names += [f"{name} in rows of {rows}" for name in RESULTS]
    return kernel_check.largest_error(results, truth, tuple(names))


class _Case:
    """One problem: two packed rows, the second with padding."""

    def __init__(self, device, dtype, size: int, length: int, queries: int | None,
                 dropout: float):
        self.dropout = dropout
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
                            query_positions_BQ=self.columns, dropout=self.dropout, seed=1)
        return [context, *torch.autograd.grad(context, leaves, self.grad.to(context.dtype))]
