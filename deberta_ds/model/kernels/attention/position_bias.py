"""Triton kernels that write the dense position bias matrices (c2p, p2c), and their gradients.

A bias matrix holds one position term as it is added to the scores, which count in powers of two:

    BIAS[r, y - base] = scale * x_r . T[y - r + RADIUS]

for the columns y in the band of row r (`geometry.Band`). T is the relative table with one row per
distance; the scale is applied here because in fp16 the unscaled term would overflow long before the
scores do. It is the matmul x T^T with every row moved by its own place r.

So that whole vectors are moved nevertheless, a program takes rows of one residue, r = 8 a + b, and
the table's rows 64 t - b + n: column y = 64 t + 8 a - RADIUS + n of the matrix begins at a multiple
of 8 in each of them. The price is that 64 rows span 512, and meet more distances. One writer per
element, no atomics, no zero-fill: a row has whole vectors of 8 columns that meet its segment, and
nobody reads others as they are.

Both terms are the same: rows are queries and columns keys for content-to-position, and the other
way round for position-to-content. Rows and columns are the N tokens of a sequence.

Gathered queries (those of the enhanced mask decoder) stand at any columns, and some of them at the
same one. Their position-to-content term is a few columns of the matrix for all, and the same for
both passes of the decoder: it is made once, by query, with -inf where a query does not see a key.
Their content-to-position term is a plain product with the whole table, which the forward kernel
reads at the columns' distances.

Names: D head size; table rows [C,H,D]; NQ, NK rows; BR, BC tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.blocks import (
    GROUP,
    VARIES,
    band_edges,
    bias_shape,
    head_of,
    table_radius,
)


@triton.jit
def row_vectors(SEEN, rows, r, count, SPAN, N, width):
    """Return of rows r: where they begin in a matrix, less their band, first column and columns.

    All in vectors of 8; the columns are those that a row's tokens attend to, within the band.
    """
    inside = r < count
    base, end = band_edges(r, SPAN, N)
    low = tl.maximum(tl.load(SEEN.start + rows + r, mask=inside, other=0), base) // 8
    high = (tl.minimum(tl.load(SEEN.stop + rows + r, mask=inside, other=0), end) + 7) // 8
    return r * (width // 8) - base // 8, low, tl.maximum(high - low, 0)


@triton.jit
def vectors(begin, low, count, column):
    """Return the elements of a matrix at columns from each row's `begin` on, and a mask.

    begin, low, count: see `row_vectors`, with a dimension for `column`, which begins at a vector
    and is not negative.
    """
    offset = (column // 8 - low).to(tl.uint32, bitcast=True)  # below 0: very large
    return begin * 8 + column, offset < count.to(tl.uint32, bitcast=True)


@triton.jit
def _rows_of_residue(SEEN, rows, SPAN, N, width, BR: tl.constexpr, BC: tl.constexpr):
    """Return this program's rows, their residue, `row_vectors` from tile 0 on, and the range of
    tiles that they meet.
    """
    residue, radius = tl.program_id(0) % 8, table_radius(SPAN, N)
    a = tl.program_id(0) // 8 * BR + tl.arange(0, BR)
    begin, low, count = row_vectors(SEEN, rows, 8 * a + residue, N, SPAN, N, width)
    moved, some = a - radius // 8, count > 0
    low -= moved
    first = tl.min(tl.where(some, low, radius // 4), 0) // (BC // 8)
    last = tl.max(tl.where(some, low + count, 0), 0)
    return 8 * a + residue, residue, begin + moved, low, count, first, tl.cdiv(last, BC // 8)


@triton.jit(do_not_specialize=VARIES)
def bias_kernel(X, TABLE, TERM, SEEN, N, H, SPAN, scale, FAR: tl.constexpr, D: tl.constexpr,
                BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Write a term; its edges with FAR alone."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    d = tl.arange(0, D)
    width, elements = bias_shape(N, SPAN, N)
    columns = 2 * table_radius(SPAN, N)
    table = TABLE + h * D
    bias = TERM.bias + bh * elements
    r, residue, begin, low, count, first, last = _rows_of_residue(
        SEEN, b * N, SPAN, N, width, BR, BC)
    inside = r < N
    x = tl.load(
        head_of(X, b, h) + r[:, None] * X.row + d[None, :], mask=inside[:, None], other=0.0)
    if FAR:
        edges = TERM.edges + bh.to(tl.int64) * N + r
        wide = x.to(tl.float32) * scale
        low_end = tl.load(table + d).to(tl.float32)
        high_end = tl.load(table + (columns - 1) * (H * D) + d).to(tl.float32)
        tl.store(edges, tl.sum(wide * low_end[None, :], 1), mask=inside)
        edges += tl.num_programs(1).to(tl.int64) * N
        tl.store(edges, tl.sum(wide * high_end[None, :], 1), mask=inside)
    half = tl.arange(0, 2)[:, None, None] * (BC // 2)  # a thread stores both: fewer rows' bounds
    column = half + tl.arange(0, BC // 2)[None, None, :]
    for t in range(first, last):
        c = tl.maximum(t * BC - residue + tl.arange(0, BC), 0)  # no row has the columns before
        rows = tl.load(table + c[None, :] * (H * D) + d[:, None])
        term = (tl.dot(x, rows, input_precision=PRECISION) * scale).to(TERM.bias.dtype.element_ty)
        place, own = vectors(
            begin[None, :, None], low[None, :, None], count[None, :, None], t * BC + column)
        tl.store(bias + place, tl.permute(tl.reshape(term, [BR, 2, BC // 2]), [1, 0, 2]), mask=own)


@triton.jit(do_not_specialize=VARIES)
def row_gradient_kernel(D_TERM, TABLE, DX, SEEN, N, H, SPAN, FAR: tl.constexpr, D: tl.constexpr,
                        BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Add the term's part to DX [B,N,H,D]: the gradient of the bias matrix times the table."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    d = tl.arange(0, D)
    width, elements = bias_shape(N, SPAN, N)
    columns = 2 * table_radius(SPAN, N)
    table = TABLE + h * D
    bias = D_TERM.bias + bh * elements
    r, residue, begin, low, count, first, last = _rows_of_residue(
        SEEN, b * N, SPAN, N, width, BR, BC)
    inside = r < N
    own_rows = DX + (b.to(tl.int64) * N * H + h) * D + (r[:, None] * (H * D) + d[None, :])
    acc = tl.zeros([BR, D], tl.float32)
    if FAR:
        edges = D_TERM.edges + bh.to(tl.int64) * N + r
        sums = tl.load(edges, mask=inside, other=0.0)
        acc += sums[:, None] * tl.load(table + d).to(tl.float32)[None, :]
        sums = tl.load(edges + tl.num_programs(1).to(tl.int64) * N, mask=inside, other=0.0)
        acc += sums[:, None] * tl.load(table + (columns - 1) * (H * D) + d).to(tl.float32)[None, :]
    column = tl.arange(0, BC)[None, :]
    for t in range(first, last):
        c = tl.maximum(t * BC - residue + tl.arange(0, BC), 0)
        rows = tl.load(table + c[:, None] * (H * D) + d[None, :])
        place, own = vectors(begin[:, None], low[:, None], count[:, None], t * BC + column)
        gradient = tl.load(bias + place, mask=own, other=0.0)
        acc = tl.dot(gradient, rows, acc, input_precision=PRECISION)
    acc += tl.load(own_rows, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(own_rows, acc.to(DX.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=VARIES)
def table_gradient_kernel(D_BIAS, X, D_TABLE, SEEN, B, N, H, SPAN, D: tl.constexpr,
                          BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """A block of table rows of one head: the part [C,H,D], in fp32, of the rows of one residue.

    D_TABLE has 8 parts for each of the S splits of the batch; split s takes sequences s, s + S, ...
    """
    residue, t, h = tl.program_id(0) % 8, tl.program_id(0) // 8, tl.program_id(1)
    d = tl.arange(0, D)
    width, elements = bias_shape(N, SPAN, N)
    radius = table_radius(SPAN, N)
    column = t * BC + (tl.arange(0, BC // 8) * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    acc = tl.zeros([BC, D], tl.float32)
    first = tl.maximum((radius - t * BC - BC) // 8, 0)  # only rows with a column at these distances
    last = tl.minimum((N + radius - t * BC + 7) // 8, (N + 7) // 8)
    for b in range(tl.program_id(2), B, tl.num_programs(2)):
        bias = D_BIAS + (b * H + h) * elements
        x_rows = X.data + tl.cast(b, tl.int64) * X.batch + h * X.head
        for a0 in range(first, last, BR):
            a = a0 + tl.arange(0, BR)
            r = 8 * a + residue
            begin, low, count = row_vectors(SEEN, b * N, r, N, SPAN, N, width)
            moved = a - radius // 8
            place, own = vectors((begin + moved)[:, None, None], (low - moved)[:, None, None],
                                 count[:, None, None], column)
            gradient = tl.reshape(tl.load(bias + place, mask=own, other=0.0), [BR, BC])
            x = tl.load(
                x_rows + r[:, None] * X.row + d[None, :], mask=(r < N)[:, None], other=0.0)
            acc = tl.dot(tl.trans(gradient), x, acc, input_precision=PRECISION)
    c = t * BC - residue + tl.arange(0, BC)
    part = tl.program_id(2) * 8 + residue
    rows = D_TABLE + (part.to(tl.int64) * (2 * radius) * H + h) * D
    rows += c[:, None] * (H * D) + d[None, :]
    tl.store(rows, acc, mask=(c >= 0)[:, None])
    if t == 2 * radius // BC - 1:  # the table's last rows are no distance of this residue
        tl.store(rows + BC * H * D, tl.zeros([BC, D], tl.float32),
                 mask=(c + BC < 2 * radius)[:, None])


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
