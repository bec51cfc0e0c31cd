"""Triton helpers: where the tensors of one program's head begin, and its block of queries."""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.bands import (
    band_edges,
    plane_shape,
    skewed_shape,
    table_radius,
)
from deberta_ds.model.kernels.attention.masks import piece_range

# Scalar bases and 32-bit offsets everywhere: tiles of 64-bit addresses would fill the registers.


@triton.jit
def head_of(X, b, h, x_b, x_h):
    """Return the pointer to one head of one batch row."""
    return X + b.to(tl.int64) * x_b + h * x_h


@triton.jit
def planes_of(KEY_PLANE, QUERY_PLANE, bh, NQ, NK, SPAN):
    """Return both planes of one head, and the width of either."""
    width, elements = plane_shape(NQ, SPAN, NK)
    KEY_PLANE += bh * elements
    width, elements = plane_shape(NK, SPAN, NK)
    QUERY_PLANE += bh * elements
    return KEY_PLANE, QUERY_PLANE, width


@triton.jit
def skewed_plane_of(D_PLANE, bh, rows, SPAN, NK):
    """Return where row 0, column 0 of one head of a plane's gradient lies, and from row to row.

    That is for rows at their own columns; a row at column p lies p - r elements before.
    """
    columns, elements = skewed_shape(rows, SPAN, NK)
    return D_PLANE + (bh * elements + table_radius(SPAN, NK)), columns - 1


@triton.jit
def query_block(
    Q, SEGMENT, POSITION, START, STOP, WORDS, b, bh, q_n, i0, NQ, NK, SPAN,
    DROPOUT: tl.constexpr, PICKED: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):
    """Return what forward and backward know of queries [i0, i0 + BM).

    That is: their numbers, which exist, vectors, segments, positions, dropout words, the first band
    column and the first one after the band, and the span of keys that any of them looks at.
    """
    i = i0 + tl.arange(0, BM)
    in_rows = i < NQ
    d = tl.arange(0, D)
    q = tl.load(Q + i[:, None] * q_n + d[None, :], mask=in_rows[:, None], other=0.0)
    segment = tl.load(SEGMENT + b * NQ + i, mask=in_rows, other=0)
    position = i
    base, end = band_edges(i0, SPAN, NK)
    if PICKED:
        position = tl.load(POSITION + b * NQ + i, mask=in_rows, other=0)
        base, end = band_edges(position, SPAN, NK)
    words = segment
    if DROPOUT:
        words = tl.load(WORDS + bh.to(tl.int64) * NQ + i, mask=in_rows, other=0)
    first, last = piece_range(START, STOP, b * NQ, i, NQ, NK)
    return i, in_rows, q, segment, position, words, base, end, first, last
