"""Triton helpers: pointers to the tensors of one head, and the loads of a block of queries."""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.bands import (
    band_edges,
    bias_shape,
    skewed_shape,
    table_radius,
)
from deberta_ds.model.kernels.attention.masks import column_range

# Scalar bases and 32-bit offsets everywhere: tiles of 64-bit addresses would fill the registers.


@triton.jit
def head_of(X, b, h, x_b, x_h):
    """Return the pointer to one head of one batch row."""
    return X + b.to(tl.int64) * x_b + h * x_h


@triton.jit
def biases_of(C2P_BIAS, P2C_BIAS, bh, NQ, NK, SPAN):
    """Return both bias matrices of one head, and their width."""
    width, elements = bias_shape(NQ, SPAN, NK)
    C2P_BIAS += bh * elements
    width, elements = bias_shape(NK, SPAN, NK)
    P2C_BIAS += bh * elements
    return C2P_BIAS, P2C_BIAS, width


@triton.jit
def skewed_gradient_of(D_BIAS, bh, rows, SPAN, NK):
    """Return the pointer to (row 0, column 0) of one head of a bias gradient, and its row stride.

    Assumes that row r is at column r; for gathered rows subtract pos(r) - r.
    """
    columns, elements = skewed_shape(rows, SPAN, NK)
    return D_BIAS + (bh * elements + table_radius(SPAN, NK)), columns - 1


@triton.jit
def query_block(
    Q, SEGMENT, POSITION, START, STOP, BITS, b, bh, q_n, i0, NQ, NK, SPAN,
    DROPOUT: tl.constexpr, GATHERED: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):
    """Return the data of queries [i0, i0 + BM), for forward and backward.

    That is: their indices, which of them exist, vectors, segments, positions, dropout bits, the
    first band column and the first one after the band, and the range of keys that any of them
    attends to.
    """
    i = i0 + tl.arange(0, BM)
    in_rows = i < NQ
    d = tl.arange(0, D)
    q = tl.load(Q + i[:, None] * q_n + d[None, :], mask=in_rows[:, None], other=0.0)
    segment = tl.load(SEGMENT + b * NQ + i, mask=in_rows, other=0)
    position = i
    base, end = band_edges(i0, SPAN, NK)
    if GATHERED:
        position = tl.load(POSITION + b * NQ + i, mask=in_rows, other=0)
        base, end = band_edges(position, SPAN, NK)
    bits = segment
    if DROPOUT:
        bits = tl.load(BITS + bh.to(tl.int64) * NQ + i, mask=in_rows, other=0)
    first, last = column_range(START, STOP, b * NQ, i, NQ, NK)
    return i, in_rows, q, segment, position, bits, base, end, first, last
