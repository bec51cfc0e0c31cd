"""Triton kernels that write the dense position bias matrices (c2p, p2c), and their gradients.

A bias matrix holds one position term as it is added to the scores:

    BIAS[r, y - base] = scale * x_r . T[y - p_r + RADIUS]

for the columns y in the band of row r (`geometry.Band`). T is the relative table with one row per
distance, p_r the column of row r; the scale is applied here because in fp16 the unscaled term would
overflow long before the scores do. It is the matmul x T^T with every row shifted by p_r, so the
kernels compute plain matmuls and shift when they store. The gradient is not shifted (see
`blocks.skewed_shape`). One writer per element, no atomics, no zero-fill: elements outside of a
row's own segment are never read as they are.

Both terms are the same: rows are queries and columns keys for content-to-position, and the other
way round for position-to-content.

Names: N rows; D head size; C table rows [C,H,D]; BR, BC tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.blocks import (
    band_edges,
    bias_shape,
    skewed_shape,
    table_radius,
)

VARIES = ["N", "NQ", "NK", "H", "SPAN", "B"]


@triton.jit
def _row_columns(POSITION, START, STOP, rows, r, inside, SPAN, NK, GATHERED: tl.constexpr):
    """Return position, first band column, first and last + 1 valid column of rows r."""
    position = r
    if GATHERED:
        position = tl.load(POSITION + rows + r, mask=inside, other=0)
    base, end = band_edges(position, SPAN, NK)
    low = tl.maximum(tl.load(START + rows + r, mask=inside, other=0), base)
    high = tl.minimum(tl.load(STOP + rows + r, mask=inside, other=0), end)
    return position, base, low, high


@triton.jit
def _table_rows(position, low, high, radius):
    """Return the range of table rows that these rows need; empty rows need none."""
    first = tl.min(tl.where(high > low, low - position, radius), 0) + radius
    last = tl.max(tl.where(high > low, high - position, -radius), 0) + radius
    return first, last


@triton.jit(do_not_specialize=VARIES)
def bias_kernel(X, TABLE, BIAS, EDGES, POSITION, START, STOP, x_b, x_h, x_n, N, NK, H, SPAN, scale,
                GATHERED: tl.constexpr, FAR: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
                BC: tl.constexpr, PRECISION: tl.constexpr):
    """BIAS [B,H,rows,width]; with FAR, EDGES [2,B,H,N]: the edge terms."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, D)
    inside = r < N
    width, elements = bias_shape(N, SPAN, NK)
    radius = table_radius(SPAN, NK)
    table = TABLE + h * D
    bias = BIAS + bh * elements
    x = tl.load(
        X + b.to(tl.int64) * x_b + h * x_h + r[:, None] * x_n + d[None, :],
        mask=inside[:, None], other=0.0)
    position, base, low, high = _row_columns(
        POSITION, START, STOP, b * N, r, inside, SPAN, NK, GATHERED)
    if FAR:
        edges = EDGES + bh.to(tl.int64) * N + r
        wide = x.to(tl.float32) * scale
        low_end = tl.load(table + d).to(tl.float32)
        high_end = tl.load(table + (2 * radius - 1) * (H * D) + d).to(tl.float32)
        tl.store(edges, tl.sum(wide * low_end[None, :], 1), mask=inside)
        edges += tl.num_programs(1).to(tl.int64) * N
        tl.store(edges, tl.sum(wide * high_end[None, :], 1), mask=inside)
    first, last = _table_rows(position, low, high, radius)
    for c0 in range(first, last, BC):
        c = c0 + tl.arange(0, BC)
        t = tl.load(
            table + c[None, :] * (H * D) + d[:, None], mask=(c < 2 * radius)[None, :], other=0.0)
        term = tl.dot(x, t, input_precision=PRECISION) * scale
        column = c[None, :] + (position - radius)[:, None]
        tl.store(bias + ((r * width - base + position - radius)[:, None] + c[None, :]),
                 term.to(BIAS.dtype.element_ty),
                 mask=(column >= low[:, None]) & (column < high[:, None]))


@triton.jit
def _distance_range(position, low, high, radius):
    """Return the first and the last + 1 table row that each row's valid columns meet."""
    return low - position + radius, high - position + radius


@triton.jit(do_not_specialize=VARIES)
def row_gradient_kernel(D_BIAS, TABLE, OTHER, DX, D_EDGES, POSITION, START, STOP, o_b, o_h, o_n, N,
                        NK, H, SPAN, TERM: tl.constexpr, CONTENT: tl.constexpr,
                        GATHERED: tl.constexpr, FAR: tl.constexpr, D: tl.constexpr,
                        BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Add the TERM's part to DX [B,N,H,D]: the gradient of the bias matrix times the table.

    With CONTENT the product with the vectors OTHER of the columns, too; DX holds what pairs beyond
    the band gave (FAR), or nothing yet.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, D)
    inside = r < N
    columns, elements = skewed_shape(N, SPAN, NK)
    radius = table_radius(SPAN, NK)
    table = TABLE + h * D
    bias = D_BIAS + bh * elements
    position, base, low, high = _row_columns(
        POSITION, START, STOP, b * N, r, inside, SPAN, NK, GATHERED)
    own_rows = DX + (b.to(tl.int64) * N * H + h) * D + (r[:, None] * (H * D) + d[None, :])
    if CONTENT and not FAR:
        acc = tl.zeros([BR, D], tl.float32)
    else:
        acc = tl.load(own_rows, mask=inside[:, None], other=0.0).to(tl.float32)
    if CONTENT:
        other = OTHER + b.to(tl.int64) * o_b + h * o_h
        begin = tl.min(tl.where(high > low, low, NK), 0) // BC * BC
        for y0 in range(begin, tl.max(high, 0), BC):
            y = y0 + tl.arange(0, BC)
            gradient = tl.load(
                bias + ((r * columns - position + radius)[:, None] + y[None, :]),
                mask=(y[None, :] >= low[:, None]) & (y[None, :] < high[:, None]), other=0.0)
            vectors = tl.load(
                other + y[:, None] * o_n + d[None, :], mask=(y < NK)[:, None], other=0.0)
            acc = tl.dot(gradient, vectors, acc, input_precision=PRECISION)
    if TERM and FAR:
        edges = D_EDGES + bh.to(tl.int64) * N + r
        sums = tl.load(edges, mask=inside, other=0.0)
        acc += sums[:, None] * tl.load(table + d).to(tl.float32)[None, :]
        sums = tl.load(edges + tl.num_programs(1).to(tl.int64) * N, mask=inside, other=0.0)
        acc += sums[:, None] * tl.load(table + (columns - 1) * (H * D) + d).to(tl.float32)[None, :]
    if TERM:
        first, last = _table_rows(position, low, high, radius)
        low, high = _distance_range(position, low, high, radius)
        for c0 in range(first // BC * BC, last, BC):
            c = tl.multiple_of(c0, BC) + tl.arange(0, BC)
            gradient = tl.load(bias + (r[:, None] * columns + c[None, :]))
            own = (c[None, :] >= low[:, None]) & (c[None, :] < high[:, None])
            gradient = tl.where(own, gradient, 0.0)  # other elements were not written
            t = tl.load(table + c[:, None] * (H * D) + d[None, :])
            acc = tl.dot(gradient, t, acc, input_precision=PRECISION)
    tl.store(own_rows, acc.to(DX.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=VARIES)
def table_gradient_kernel(D_BIAS, X, D_TABLE, POSITION, START, STOP, x_b, x_h, x_n, B, N, NK, H,
                          SPAN, GATHERED: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr,
                          BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """One block of table rows of one head: its part of D_TABLE [splits,C,H,D] in fp32.

    The rows of the batch are cut into chunks, and split s of S takes the chunks s, s + S, ...
    """
    first_c = tl.program_id(0) * BC
    h = tl.program_id(1)
    c = tl.multiple_of(first_c, BC) + tl.arange(0, BC)
    d = tl.arange(0, D)
    columns, elements = skewed_shape(N, SPAN, NK)
    radius = table_radius(SPAN, NK)
    chunks = (N + CHUNK - 1) // CHUNK
    acc = tl.zeros([BC, D], tl.float32)
    for unit in range(tl.program_id(2), B * chunks, tl.num_programs(2)):
        b = unit // chunks
        first = unit % chunks * CHUNK
        last = tl.minimum(first + CHUNK, N)
        if not GATHERED:  # only rows that have a column at these distances
            first = tl.maximum(first, radius - first_c - BC + 1)
            last = tl.minimum(last, NK + radius - first_c)
        bias = D_BIAS + (b * H + h) * elements
        x_rows = X + b.to(tl.int64) * x_b + h * x_h
        for r0 in range(first, last, BR):
            r = r0 + tl.arange(0, BR)
            inside = r < last
            position, base, low, high = _row_columns(
                POSITION, START, STOP, b * N, r, inside, SPAN, NK, GATHERED)
            low, high = _distance_range(position, low, high, radius)
            gradient = tl.load(
                bias + (r[:, None] * columns + c[None, :]), mask=inside[:, None], other=0.0)
            own = (c[None, :] >= low[:, None]) & (c[None, :] < high[:, None])
            gradient = tl.where(own, gradient, 0.0)
            x = tl.load(
                x_rows + r[:, None] * x_n + d[None, :], mask=inside[:, None], other=0.0)
            acc = tl.dot(tl.trans(gradient), x, acc, input_precision=PRECISION)
    part = D_TABLE + (tl.program_id(2).to(tl.int64) * columns * H + h) * D
    tl.store(part + c[:, None] * (H * D) + d[None, :], acc)


@triton.jit(do_not_specialize=VARIES)
def spread_kernel(D_SCORES, D_BIAS, POSITION, NQ, NK, H, SPAN, BR: tl.constexpr, BC: tl.constexpr,
                  PRECISION: tl.constexpr):
    """Scatter score gradients [B,H,NK,NQ] of gathered queries to D_BIAS; equal columns are summed.

    A matmul with a one-hot matrix instead of a scatter: the order of every sum is fixed.
    """
    bh = tl.program_id(1)
    b = bh // H
    r0 = tl.program_id(0) * BR
    r = r0 + tl.arange(0, BR)
    columns, elements = skewed_shape(NK, SPAN, NK)
    base, end = band_edges(r0, SPAN, NK)
    scores = D_SCORES + bh.to(tl.int64) * NK * NQ
    for y0 in range(base, end, BC):
        y = y0 + tl.arange(0, BC)
        acc = tl.zeros([BR, BC], tl.float32)
        for i0 in range(0, NQ, BC):
            i = i0 + tl.arange(0, BC)
            gradient = tl.load(
                scores + (r[:, None] * NQ + i[None, :]),
                mask=(r < NK)[:, None] & (i < NQ)[None, :], other=0.0)
            position = tl.load(POSITION + b * NQ + i, mask=i < NQ, other=-1)
            one_hot = (position[:, None] == y[None, :]).to(gradient.dtype)
            acc = tl.dot(gradient, one_hot, acc, input_precision=PRECISION)
        skewed = (r * (columns - 1) + table_radius(SPAN, NK))[:, None] + y[None, :]
        tl.store(D_BIAS + bh * elements + skewed, acc.to(D_BIAS.dtype.element_ty))
