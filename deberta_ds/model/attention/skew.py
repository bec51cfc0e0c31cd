"""Position terms without gather or scatter: plain matrix products seen through skewed views.

Expand the relative table to one row per distance, T[c] for c = y - x + radius. Then the term
x_x . T[y - x + radius] of a block of n consecutive rows x against w columns y is a view of the
product P = X T^T [n, w + n - 1]: element (x, y) lies at P[x, y - x + n - 1], so the row stride of
the view is one less than that of P. Backward copies the score gradient through the same view into a
zero buffer ("un-skew") and multiplies. Nothing is indexed, one writer per element: deterministic.

Beyond `reach` a side of the table is constant, so far columns cost one product per row, not per
pair. Rows are queries for the content-to-position term; keys for position-to-content.

Shape legend: G heads of a tile, X rows, Y columns, C rows of the expanded table, D head size, H
heads, S slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds.model.attention.geometry import Geometry

BLOCK_ROWS = 64


@dataclass(frozen=True)
class Expansion:
    """How one relative table is expanded: T[c] serves the pair with y - x = c - radius."""

    reach: int  # columns at least this far away share the end rows of the table
    radius: int
    slots_C: Tensor  # int64 row of the relative table for each c

    def expand(self, table_HSD: Tensor) -> Tensor:
        """Return the expanded table [H,C,D]."""
        return table_HSD.index_select(1, self.slots_C)

    def collapse(self, grad_HCD: Tensor, num_slots: int) -> Tensor:
        """Return the gradient [H,S,D] of the relative table, summed in a fixed order."""
        heads, _, size = grad_HCD.shape
        if grad_HCD.is_cuda:  # index_add_ is atomic there
            one_hot_SC = self.slots_C == torch.arange(num_slots, device=grad_HCD.device)[:, None]
            return one_hot_SC.to(grad_HCD.dtype) @ grad_HCD
        grad_HSD = grad_HCD.new_zeros(heads, num_slots, size)
        return grad_HSD.index_add_(1, self.slots_C, grad_HCD)


def expansion(
    geometry: Geometry, longest: int, rows_are_queries: bool, clip: bool, device: torch.device
) -> Expansion:
    """Return the expansion for spans of up to `longest` columns.

    clip: treat columns beyond the table's reach as saturated.
    """
    reach = min(geometry.reach, longest) if clip else longest
    radius = reach + BLOCK_ROWS - 1
    distances_C = torch.arange(-radius, radius + 1, device=device)
    if rows_are_queries:  # y - x is then key minus query
        distances_C = -distances_C
    return Expansion(reach, radius, geometry.slots(distances_C))


@dataclass(frozen=True)
class Frame:
    """Where a tile of scores lies: column numbers of its first row and of its first column."""

    first_row: int
    first_column: int


def _bands(expanded: Expansion, frame: Frame, rows: int, columns: int):
    """Yield (start, stop, near start, near stop, first table row, last + 1) per block of rows."""
    for start in range(0, rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, rows)
        shift = frame.first_row + start - frame.first_column
        near = min(max(shift - expanded.reach, 0), columns)
        far = max(min(shift + stop - start + expanded.reach, columns), near)
        table_start = near - shift - (stop - start - 1) + expanded.radius
        yield start, stop, near, far, table_start, table_start + far - near + stop - start - 1


def _skewed(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """Return the view [G,X,Y] of a contiguous buffer [G,X,Y+X-1]: (x, y) lies at y - x + X - 1."""
    width = columns + rows - 1
    shape, strides = (buffer.shape[0], rows, columns), (rows * width, width - 1, 1)
    return buffer.as_strided(shape, strides, rows - 1)


@dataclass(frozen=True)
class Side:
    """One position term: how its table was expanded, and the expanded table in both layouts."""

    expansion: Expansion
    table_HCD: Tensor
    table_HDC: Tensor

    def of_heads(self, heads: slice) -> "Side":
        return Side(self.expansion, self.table_HCD[heads], self.table_HDC[heads])


def make_side(expanded: Expansion, table_HSD: Tensor, scale: float = 1.0) -> Side:
    """Expand a relative table, scaled."""
    table_HCD = expanded.expand(table_HSD).mul_(scale)
    return Side(expanded, table_HCD, table_HCD.transpose(1, 2).contiguous())


class Scratch:
    """Buffers kept from tile to tile: a fresh page costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], like: Tensor, new=torch.empty) -> Tensor:
        """Return the buffer of this use and shape, with what it last held."""
        key = (use, *shape)
        if key not in self._buffers:
            self._buffers[key] = new(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]


def add_term(
    scores: Tensor, x_GXD: Tensor, side: Side, frame: Frame, transposed: bool, scratch: Scratch
) -> None:
    """Add x . T[y - x + radius] to `scores` [G,X,Y], or to [G,Y,X] when `transposed`."""
    columns = scores.shape[1 if transposed else 2]
    bands = _bands(side.expansion, frame, x_GXD.shape[1], columns)
    for start, stop, near, far, table_start, table_stop in bands:
        x = x_GXD[:, start:stop]
        target = scores[:, :, start:stop] if transposed else scores[:, start:stop]
        if far > near:
            shape = (x.shape[0], stop - start, table_stop - table_start)
            product = scratch.take("product", shape, x)
            torch.bmm(x, side.table_HDC[:, :, table_start:table_stop], out=product)
            term = _skewed(product, stop - start, far - near)
            if transposed:  # a transposing copy, then an add: 4 x faster than a transposed add
                turned = scratch.take("turned", (x.shape[0], far - near, stop - start), x)
                target[:, near:far].add_(turned.copy_(term.transpose(1, 2)))
            else:
                target[:, :, near:far].add_(term)
        for end, lo, hi in ((0, 0, near), (-1, far, columns)):
            if hi > lo:
                constant = x @ side.table_HCD[:, end, :, None]
                if transposed:
                    target[:, lo:hi].add_(constant.transpose(1, 2))
                else:
                    target[:, :, lo:hi].add_(constant)


def collect_term(
    grad: Tensor,
    x_GXD: Tensor,
    side: Side,
    frame: Frame,
    transposed: bool,
    grad_x_GXD: Tensor,
    grad_table_GCD: Tensor,
    scratch: Scratch,
) -> None:
    """Accumulate the gradients of `add_term` for score gradients `grad` (laid out like scores)."""
    columns = grad.shape[1 if transposed else 2]
    bands = _bands(side.expansion, frame, x_GXD.shape[1], columns)
    for start, stop, near, far, table_start, table_stop in bands:
        x, grad_x = x_GXD[:, start:stop], grad_x_GXD[:, start:stop]
        source = grad[:, :, start:stop] if transposed else grad[:, start:stop]
        if far > near:
            shape = (grad.shape[0], stop - start, table_stop - table_start)
            # Only the skewed view is ever written: the corners stay zero.
            buffer = scratch.take("skewed", shape, grad, torch.zeros)
            if transposed:
                part = scratch.take("turned back", (*shape[:2], far - near), grad)
                part.copy_(source[:, near:far].transpose(1, 2))
            else:
                part = source[:, :, near:far]
            _skewed(buffer, stop - start, far - near).copy_(part)
            grad_x.add_(torch.bmm(buffer, side.table_HCD[:, table_start:table_stop]))
            part = torch.bmm(buffer.transpose(1, 2), x)
            grad_table_GCD[:, table_start:table_stop].add_(part)
        for end, lo, hi in ((0, 0, near), (-1, far, columns)):
            if hi > lo:
                part = source[:, lo:hi].sum(1) if transposed else source[:, :, lo:hi].sum(2)
                grad_x.add_(part[:, :, None] * side.table_HCD[:, end, None])
                grad_table_GCD[:, end, None].add_(torch.bmm(part[:, None], x))
