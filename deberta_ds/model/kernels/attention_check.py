"""Check of the Triton attention on this GPU: packed sequences through it and the reference.

See `kernel_check` for when this is asked and where a pass is kept.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deberta_ds.base import splitmix
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import reference_attention
from deberta_ds.model.kernels import kernel_check
from deberta_ds.model.kernels.kernel_check import Verdict

GEOMETRY = Geometry(512, 256)  # of every released v2 and v3 model
# Files whose content a passed check depends on.
_KERNELS = Path(__file__).with_name("attention")
_ATTENTION = Path(__file__).parents[1] / "attention"
SOURCES = [*_KERNELS.glob("*.py"), *_KERNELS.glob("*.json"), Path(splitmix.__file__),
           *(_ATTENTION / f"{name}.py" for name in ("dropout", "geometry", "reference")),
           Path(__file__)]
RESULTS = ("context", "queries", "keys", "values", "position keys", "position queries")


class Rows(NamedTuple):
    """The shape of a test problem, for one kind of kernel."""

    length: int
    gathered: int | None = None  # gathered queries
    dropout: float = 0.1
    keep: bool = False  # save the position terms for backward
    batch: int = 2
    heads: int = 2


# The last one is large enough that the loop of `table_gradient_kernel` runs twice.
SHORT = (Rows(300), Rows(300, gathered=40), Rows(300, dropout=0.0),
         Rows(300, gathered=40, dropout=0.0), Rows(300, keep=True), Rows(100, batch=24, heads=32))
LONG = (Rows(600), Rows(900, keep=True), Rows(1100), Rows(1100, dropout=0.0),
        Rows(1100, gathered=40), Rows(1100, gathered=40, dropout=0.0))


def check(device: torch.device, dtype: torch.dtype, size: int, long: bool,
          terms: tuple[bool, bool] = (True, True)) -> Verdict:
    """Return whether fused attention agrees with the reference, as `kernel_check.check` does.

    size: of a head. long: with pairs beyond the relative table's reach, which other loops take.
    terms: whether scores have content to position, and position to content.
    """
    kind = f"attention, heads of {size}, {'long' if long else 'short'} rows"
    if not all(terms):
        kind += f", {'only c2p' if terms[0] else 'only p2c' if terms[1] else 'no position term'}"
    return kernel_check.check(device, dtype, kind, SOURCES,
                              partial(compare_fused, device, dtype, size, long, terms))


def compare_fused(device: torch.device, dtype: torch.dtype, size: int, long: bool,
                  terms: tuple[bool, bool]) -> tuple[float, str]:
    """Return `compare` of the Triton kernels."""
    from deberta_ds.model.kernels.attention import fused_path

    return compare(device, dtype, size, long, fused_path, terms)


def compare(device: torch.device, dtype: torch.dtype, size: int, long: bool,
            fused: Callable[..., Tensor], terms: tuple[bool, bool] = (True, True)
            ) -> tuple[float, str]:
    """Return the largest relative error of `fused` (NaN above all), and of what it is."""
    results, truth, names = [], [], []
    for rows in LONG if long else SHORT:
        case = _Case(device, dtype, size, rows, terms)
        truth += case.run(reference_attention, torch.float32)
        results += case.run(partial(fused, keep_terms=True) if rows.keep else fused, dtype)
        where = f"{rows.batch} rows of " + (f"{rows.gathered} of " if rows.gathered else "")
        names += [f"{name} in {where}{rows.length} tokens"
                  for name, present in zip(RESULTS, (True,) * 4 + terms, strict=True) if present]
    return kernel_check.largest_error(results, truth, tuple(names))


class _Case:
    """One problem: packed rows, all but the first with padding."""

    def __init__(self, device, dtype, size: int, kind: Rows, terms: tuple[bool, bool]):
        self.dropout, self.terms = kind.dropout, terms
        batch, heads, length, queries = kind.batch, kind.heads, kind.length, kind.gathered
        generator = torch.Generator().manual_seed(length)

        def draw(*shape):
            values = torch.randn(*shape, generator=generator).to(device, dtype)
            return values.transpose(1, 2) if len(shape) == 4 else values

        rows = queries or length
        self.tensors = [draw(batch, rows, heads, size),
                        *(draw(batch, length, heads, size) for _ in "kv"),
                        *(draw(heads, GEOMETRY.num_slots, size) for present in terms if present)]
        self.grad = draw(batch, rows, heads, size).transpose(1, 2)
        self.segments = torch.ones(batch, length, dtype=torch.int32)
        self.segments[1:, length // 3 :] = 2
        self.segments[1:, length - 20 :] = 0
        self.segments = self.segments.to(device)
        self.columns = None
        if queries is not None:
            columns = torch.randint(0, length, (batch, queries), generator=generator)
            self.columns = columns.to(device)

    def run(self, attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the context and all gradients."""
        leaves = [x.to(dtype).detach().requires_grad_() for x in self.tensors]
        tables = iter(leaves[3:])
        given = [next(tables) if present else None for present in self.terms]
        context = attention(*leaves[:3], *given, geometry=GEOMETRY, segments_BL=self.segments,
                            query_positions_BQ=self.columns, dropout=self.dropout,
                            seed=torch.ones(1, dtype=torch.int64, device=self.grad.device))
        return [context, *torch.autograd.grad(context, leaves, self.grad.to(context.dtype))]
