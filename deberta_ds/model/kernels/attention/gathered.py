"""Triton kernels of the position terms of gathered queries (those of the enhanced mask decoder).

Queries stand at any columns, and some of them at the same one. Their position-to-content term is a
few columns of the matrix that `position_bias` writes for all, and the same for both passes of the
decoder: it is made once, by query, with -inf where a query does not see a key. Their
content-to-position term is a plain product with the whole table, which the forward kernel reads at
the columns' distances. One writer per element, no atomics.

Names: NQ, NK rows; BR, BC tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.blocks import GROUP, band_edges, bias_shape, table_radius
from deberta_ds.model.kernels.attention.forward import VARIES


@triton.jit(do_not_specialize=VARIES)
def columns_kernel(TERM, OUT, SEGMENT, POSITION, K_SEGMENT, NQ, NK, H, SPAN,
                   HAS_BIAS: tl.constexpr, FAR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """OUT [B,H,NQ,NK], in whole groups: the bias of keys TERM at the queries' columns, or zero."""
    bh, batch_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    b = tl.program_id(1) // H
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    segment = tl.load(SEGMENT + b * NQ + i, mask=i < NQ, other=0)
    position = tl.load(POSITION + b * NQ + i, mask=i < NQ, other=0)
    width, elements = bias_shape(NK, SPAN, NK)
    keys = (NK + GROUP - 1) // GROUP * GROUP
    out = OUT + bh * ((NQ + GROUP - 1) // GROUP * GROUP) * keys
    for j0 in range(0, keys, BC):
        j = j0 + tl.arange(0, BC)
        term = tl.zeros([BR, BC], tl.float32)
        if HAS_BIAS:
            base, end = band_edges(j0, SPAN, NK)
            column = tl.minimum(tl.maximum(position, base), end - 1) - base
            place = j[:, None] * width + column[None, :]
            term = tl.load(TERM.bias + bh * elements + place).to(tl.float32)
            if FAR:
                low = tl.load(TERM.edges + bh * NK + j, mask=j < NK, other=0.0)
                high = tl.load(TERM.edges + (batch_heads + bh) * NK + j, mask=j < NK, other=0.0)
                term = tl.where((position < base)[None, :], low[:, None], term)
                term = tl.where((position >= end)[None, :], high[:, None], term)
            term = tl.trans(term)
        segment_j = tl.load(K_SEGMENT + b * NK + j, mask=j < NK, other=0)
        allowed = (segment[:, None] == segment_j[None, :]) & (segment != 0)[:, None]
        tl.store(out + (i[:, None] * keys + j[None, :]), tl.where(allowed, term, float("-inf")))


@triton.jit(do_not_specialize=VARIES)
def skew_kernel(D_SCORES, OUT, POSITION, NQ, NK, H, SPAN, FAR: tl.constexpr, BR: tl.constexpr,
                BC: tl.constexpr):
    """OUT [H,B,NQ,C]: the score gradients [B,H,NQ,NK] by table row, those of one row summed."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = (i < NQ)[:, None]
    radius = table_radius(SPAN, NK)
    keys = (NK + GROUP - 1) // GROUP * GROUP
    rows = D_SCORES + bh.to(tl.int64) * ((NQ + GROUP - 1) // GROUP * GROUP) * keys
    rows += i[:, None] * keys
    first = tl.load(POSITION + b * NQ + i, mask=i < NQ, other=0) - radius  # key of table row 0
    low = tl.zeros([BR], tl.float32)
    high = tl.zeros([BR], tl.float32)
    if FAR:
        for j0 in range(0, NK, BC):
            j = j0 + tl.arange(0, BC)[None, :]
            distance = j - first[:, None]
            gradient = tl.load(rows + j, mask=inside & (j < NK), other=0.0).to(tl.float32)
            low += tl.sum(tl.where(distance <= 0, gradient, 0.0), 1)
            high += tl.sum(tl.where(distance >= 2 * radius - 1, gradient, 0.0), 1)
    out = OUT + (h * (tl.num_programs(1) // H) + b).to(tl.int64) * NQ * (2 * radius)
    for c0 in range(0, 2 * radius, BC):
        c = c0 + tl.arange(0, BC)[None, :]
        j = c + first[:, None]
        gradient = tl.load(rows + j, mask=inside & (j >= 0) & (j < NK), other=0.0).to(tl.float32)
        if FAR:
            gradient = tl.where(c == 0, low[:, None], gradient)
            gradient = tl.where(c == 2 * radius - 1, high[:, None], gradient)
        tl.store(out + (i[:, None] * (2 * radius) + c), gradient, mask=inside)


@triton.jit(do_not_specialize=VARIES)
def spread_kernel(D_SCORES, D_TERM, POSITION, NQ, NK, H, SPAN, FAR: tl.constexpr,
                  BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of the keys' bias from score gradients [B,H,NQ,NK]; equal columns are summed.

    A matmul with a one-hot matrix instead of a scatter: the order of every sum is fixed.
    """
    bh, batch_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    b = tl.program_id(1) // H
    r0 = tl.program_id(0) * BR
    r = r0 + tl.arange(0, BR)
    width, elements = bias_shape(NK, SPAN, NK)
    base, end = band_edges(r0, SPAN, NK)
    keys = (NK + GROUP - 1) // GROUP * GROUP
    scores = D_SCORES + bh * ((NQ + GROUP - 1) // GROUP * GROUP) * keys
    for y0 in range(base, end, BC):
        y = y0 + tl.arange(0, BC)
        acc = tl.zeros([BR, BC], tl.float32)
        for i0 in range(0, NQ, BC):
            i = i0 + tl.arange(0, BC)
            gradient = tl.load(
                scores + (i[:, None] * keys + r[None, :]), mask=(i < NQ)[:, None], other=0.0)
            position = tl.load(POSITION + b * NQ + i, mask=i < NQ, other=-1)
            one_hot = (position[:, None] == y[None, :]).to(gradient.dtype)
            acc = tl.dot(tl.trans(gradient), one_hot, acc, input_precision=PRECISION)
        place = r[:, None] * width + (y - base)[None, :]
        tl.store(D_TERM.bias + bh * elements + place, acc.to(D_TERM.bias.dtype.element_ty))
    if FAR:
        low = tl.zeros([BR], tl.float32)
        high = tl.zeros([BR], tl.float32)
        for i0 in range(0, NQ, BC):
            i = i0 + tl.arange(0, BC)
            gradient = tl.load(scores + (i[:, None] * keys + r[None, :]),
                               mask=(i < NQ)[:, None], other=0.0).to(tl.float32)
            position = tl.load(POSITION + b * NQ + i, mask=i < NQ, other=base)
            low += tl.sum(tl.where((position < base)[:, None], gradient, 0.0), 0)
            high += tl.sum(tl.where((position >= end)[:, None], gradient, 0.0), 0)
        tl.store(D_TERM.edges + bh * NK + r, low, mask=r < NK)
        tl.store(D_TERM.edges + (batch_heads + bh) * NK + r, high, mask=r < NK)
