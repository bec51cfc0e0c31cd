"""Position terms (c2p, p2c) without gather or scatter: matmuls read through skewed views.

Expand the relative table to one row per distance, T[c] for c = y - x + radius. Then the term
x_x . T[y - x + radius] of a block of n consecutive rows x against w columns y is a view of the
product P = X T^T [n, w + n - 1]: element (x, y) lies at P[x, y - x + n - 1], so the row stride of
the view is one less than that of P. Backward copies the score gradient through the same view into a
zero buffer ("un-skew") and multiplies. Nothing is indexed, one writer per element: deterministic.

At distances of `reach` and more the table is constant, so far columns cost one product per row, not
one per pair. Rows are queries for the content-to-position term; keys for position-to-content.

Shape legend: G heads of a tile's sequences (all of one head, then of the next), X rows, Y columns,
C rows of the expanded table, D head size, H heads, S slots.
"""

import math
import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deberta_ds.model.attention.geometry import Geometry

ALIGNED = 16  # products are this many columns or a multiple: odd widths cost a third of the speed


def block_rows(dtype: torch.dtype, rows: int) -> int:
    """Return how many of `rows` rows are multiplied at once.

    A block of n rows against w columns takes w + n - 1 columns of products, so that short rows want
    small blocks; but products are only fast when they are large, most so in half precision.
    """
    if rows > 256:
        return 128
    return 64 if rows > 128 or dtype.itemsize == 2 else 32


@dataclass(frozen=True)
class PositionTerm:
    """One position term. T[c] is the relative table's row for pairs with y - x = c - radius."""

    reach: int  # columns at least this far away share the end rows of the table
    block: int  # rows multiplied at once
    radius: int
    slots_C: Tensor  # int64 row of the relative table for each c
    table_HCD: Tensor  # the expanded table, scaled, in both layouts
    table_HDC: Tensor

    def of_heads(self, heads: slice) -> "PositionTerm":
        """Return the term of some heads."""
        return replace(self, table_HCD=self.table_HCD[heads], table_HDC=self.table_HDC[heads])


def make_term(geometry: Geometry, table_HSD: Tensor, longest: int, rows_are_queries: bool,
              clip: bool, scale: float) -> PositionTerm:
    """Expand a relative table, scaled, for spans of up to `longest` columns.

    clip: treat columns beyond the table's reach as saturated.
    """
    reach = min(geometry.reach, longest) if clip else longest
    block = block_rows(table_HSD.dtype, longest)
    radius = reach + block - 1
    # Further rows at the end, so that a product of aligned width finds as many.
    distances_C = torch.arange(-radius, radius + ALIGNED, device=table_HSD.device)
    # With queries as rows, y - x is key minus query.
    slots_C = geometry.slots(-distances_C if rows_are_queries else distances_C)
    table_HCD = table_HSD.index_select(1, slots_C).mul_(scale)
    return PositionTerm(reach, block, radius, slots_C, table_HCD,
                        table_HCD.transpose(1, 2).contiguous())


def _bands(term: PositionTerm, offset: int, rows: int, columns: int):
    """Yield (start, stop, near start, near stop, first table row, last + 1) per block of rows."""
    for start in range(0, rows, term.block):
        stop = min(start + term.block, rows)
        shift = offset + start
        near = min(max(shift - term.reach, 0), columns)
        far = max(min(shift + stop - start + term.reach, columns), near)
        table_start = near - shift - (stop - start - 1) + term.radius
        width = far - near + stop - start - 1
        yield start, stop, near, far, table_start, table_start - (-width // ALIGNED) * ALIGNED


def skewed_view(buffer: Tensor, columns: int) -> Tensor:
    """Return the view [G,X,Y] of a contiguous buffer of products: (x, y) lies at y - x + X - 1."""
    groups, rows, width = buffer.shape
    shape, strides = (groups, rows, columns), (rows * width, width - 1, 1)
    return buffer.as_strided(shape, strides, rows - 1)


class Scratch:
    """Buffers kept from tile to tile: a fresh page costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._flat: dict[tuple, Tensor] = {}
        self._written: dict[tuple, tuple] = {}

    def take(self, use: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialized buffer; the next call with the same `use` overwrites it."""
        key, size = (use, like.dtype), math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            with torch.inference_mode(False):  # it may outlive the caller's mode
                flat = torch.empty(size, dtype=like.dtype, device=like.device)
            self._flat[key] = flat
            self._written.pop(key, None)
        return flat[:size].view(shape)

    def take_skewed(self, shape: tuple[int, ...], columns: int, like: Tensor) -> Tensor:
        """Return a buffer that is 0 outside of the view `skewed_view(buffer, columns)`.

        It is zeroed only when the shape changes: callers must write every element of the view.
        """
        buffer = self.take("skewed", shape, like)
        key = ("skewed", like.dtype)
        if self._written.get(key) != (shape, columns):
            buffer.zero_()
            self._written[key] = (shape, columns)
        return buffer


_LOCAL = threading.local()


def own_scratch() -> Scratch:
    """Return this thread's scratch, some tiles large."""
    if not hasattr(_LOCAL, "scratch"):
        _LOCAL.scratch = Scratch()
    return _LOCAL.scratch


def _padded_rows(tensor_GXY: Tensor, scratch: Scratch) -> Tensor:
    """Return the tensor, or a copy of it if its rows lie a multiple of 1 KiB apart.

    Such rows fall on few sets of the cache: reading along columns costs three times as much.
    """
    groups, rows, columns = tensor_GXY.shape
    if columns * tensor_GXY.dtype.itemsize % 1024:
        return tensor_GXY
    buffer = scratch.take("apart", (groups, rows, columns + ALIGNED), tensor_GXY)
    return buffer[:, :, :columns].copy_(tensor_GXY)


def add_term(scores: Tensor, x_GXD: Tensor, term: PositionTerm, offset: int, transposed: bool,
             scratch: Scratch) -> None:
    """Add x . T[y - x + radius] to `scores` [G,X,Y], or to [G,Y,X] when `transposed`.

    offset: number of the first row, less that of the first column, of the tile of scores.
    """
    scores_GXY = scores.transpose(1, 2) if transposed else scores
    heads, (groups, rows, columns) = len(term.table_HCD), scores_GXY.shape
    for start, stop, near, far, table_start, table_stop in _bands(term, offset, rows, columns):
        x_HRD = x_GXD[:, start:stop].reshape(heads, -1, x_GXD.shape[2])
        target = scores_GXY[:, start:stop]
        if far > near:
            table = term.table_HDC[:, :, table_start:table_stop]
            shape = (groups, stop - start, table.shape[2])
            product = scratch.take("product", shape, x_GXD)
            torch.bmm(x_HRD, table, out=product.view(heads, -1, shape[2]))
            values = skewed_view(product, far - near)
            if transposed:  # a transposing copy, then an add: 4 x faster than a transposed add
                swapped = scratch.take("swapped", (groups, far - near, stop - start), x_GXD)
                values = swapped.copy_(values.transpose(1, 2)).transpose(1, 2)
            target[:, :, near:far].add_(values)
        for end, lo, hi in ((0, 0, near), (-1, far, columns)):
            if hi > lo:
                constant = x_HRD @ term.table_HCD[:, end, :, None]
                target[:, :, lo:hi].add_(constant.view(groups, -1, 1))


def collect_term(grad: Tensor, x_GXD: Tensor, term: PositionTerm, offset: int, transposed: bool,
                 grad_x_GXD: Tensor, grad_table_HCD: Tensor, scratch: Scratch) -> None:
    """Accumulate the gradients of `add_term` for score gradients `grad` (laid out like scores)."""
    grad_GXY = _padded_rows(grad, scratch).transpose(1, 2) if transposed else grad
    heads, (groups, rows, columns) = len(term.table_HCD), grad_GXY.shape
    for start, stop, near, far, table_start, table_stop in _bands(term, offset, rows, columns):
        grad_x, source = grad_x_GXD[:, start:stop], grad_GXY[:, start:stop]
        # All rows of a head share one table.
        x_HRD = x_GXD[:, start:stop].reshape(heads, -1, x_GXD.shape[2])
        if far > near:
            table = term.table_HCD[:, table_start:table_stop]
            shape = (groups, stop - start, table.shape[1])
            buffer = scratch.take_skewed(shape, far - near, grad)
            values = source[:, :, near:far]
            if transposed:
                values = scratch.take("swapped back", values.shape, grad).copy_(values)
            skewed_view(buffer, far - near).copy_(values)
            rows_HRC = buffer.view(heads, -1, shape[2])
            grad_x.add_(torch.bmm(rows_HRC, table).view_as(grad_x))
            grad_table_HCD[:, table_start:table_stop].add_(
                torch.bmm(rows_HRC.transpose(1, 2), x_HRD))
        for end, lo, hi in ((0, 0, near), (-1, far, columns)):
            if hi > lo:
                part_H1R = source[:, :, lo:hi].sum(2).view(heads, 1, -1)
                outer = part_H1R.transpose(1, 2) * term.table_HCD[:, end, None]
                grad_x.add_(outer.view_as(grad_x))
                grad_table_HCD[:, end, None].add_(torch.bmm(part_H1R, x_HRD))
