"""Triton kernel: flash attention forward with two dense bias tiles.

Near the diagonal (`geometry.Band`) both position terms are dense tiles of bias matrices, written
beforehand, so the loop has no index arithmetic and loads whole vectors. Away from it they are
constant along a row or a column: two vectors instead of a tile. A program skips every key outside
the documents of its own queries, so packed sequences cost what their documents cost.

As in FlashAttention, m is the running maximum of a row, l its running sum of exponentials, and
alpha the factor that rescales older sums. Scores count in powers of two.

Names: NQ, NK rows; D head size; BM, BN tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.blocks import (
    GROUP,
    VARIES,
    band_edges,
    bias_shape,
    column_range,
    far_bias,
    head_of,
    kept_pairs,
    loop_ranges,
    run_of,
    shuffled,
    table_radius,
    to_vectors,
    vector_places,
    words_of,
)


@triton.jit
def _step(q, K, V, DROPPED, k_n, v_n, i, j, j0, rows, NK, bias, scale, m_i, l_i, acc,
          DROPOUT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """Add one block of keys, in the order of j, to the online softmax."""
    d = tl.arange(0, D)
    in_keys = j < NK
    k = tl.load(K + j[None, :] * k_n + d[:, None], mask=in_keys[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale + bias
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    probs = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(probs, 1)
    if DROPOUT:
        kept = kept_pairs(DROPPED, i, j0, rows, j.shape[0], False)
        probs = tl.where(kept, probs, 0.0)
    v = tl.load(V + j[:, None] * v_n + d[None, :], mask=in_keys[:, None], other=0.0)
    acc = tl.dot(probs.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i, acc


@triton.jit
def _mask_tile(TERM, r, y, width, segment_r, segment_y, value):
    """Write a value where rows r and columns y of a bias matrix do not see each other."""
    allowed = (segment_r[:, None] == segment_y[None, :]) & (segment_r != 0)[:, None]
    place = TERM + (r[:, None] * width + y[None, :])
    tl.store(place, tl.where(allowed, tl.load(place), value))


@triton.jit
def _mask_tiles(C2P, P2C, K_SEGMENT, r, segment_r, base, j0, width, reach, NQ, NK,
                HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr, BN: tl.constexpr):
    """Make the sum of both terms -inf for queries r and a block of keys that they do not see."""
    j = j0 + tl.arange(0, BN)
    segment_j = tl.load(K_SEGMENT + j, mask=j < NK, other=0)
    if HAS_C2P:
        _mask_tile(C2P, r, j - base, width, segment_r, segment_j, float("-inf"))
    if HAS_P2C:
        _mask_tile(P2C, j, r - band_edges(j0, reach, NQ)[0], width, segment_j, segment_r,
                   0.0 if HAS_C2P else float("-inf"))


@triton.jit
def _sum_of_tiles(C2P, P2C, i, j, column, first_i, width, HAS_C2P: tl.constexpr,
                  HAS_P2C: tl.constexpr, BM: tl.constexpr):
    """Return the sum of the terms that exist, [i, j], in their dtype."""
    if HAS_C2P:
        bias = tl.load(C2P + (i[:, None] * width + column[None, :]))
    if HAS_P2C:
        row = tl.max_contiguous(first_i + shuffled(tl.arange(0, BM)), 2)
        row = tl.multiple_of(row, 2)
        p2c = tl.trans(tl.load(P2C + (j[:, None] * width + row[None, :])))
        bias = bias + p2c if HAS_C2P else p2c
    return bias


@triton.jit(do_not_specialize=VARIES)
def forward_kernel(Q, K, V, C2P, P2C, SUMS, OUT, LSE, Q_SEGMENT, Q_POSITION, SEEN, K_SEGMENT, COVER,
                   RUN, DROPPED, NQ, NK, H, SPAN, scale, keep_scale, HAS_C2P: tl.constexpr,
                   HAS_P2C: tl.constexpr, KEEP: tl.constexpr, ONLY_SUMS: tl.constexpr,
                   DROPOUT: tl.constexpr, FAR: tl.constexpr, GATHERED: tl.constexpr,
                   D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """One block of queries: OUT [B,NQ,H,D] and the base-2 logsumexp LSE [B,H,NQ].

    KEEP: SUMS becomes the sum of both bias matrices, transposed, -inf where a query does not see
    the key, for every tile that the key kernel reads; it may be P2C itself. ONLY_SUMS: that alone.
    GATHERED: queries at Q_POSITION; C2P [H,B,NQ,C] has a column for each table row, and P2C
    [B,H,rows,width] is stored by query.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i0 = tl.program_id(0) * BM
    wide = bh.to(tl.int64)
    d = tl.arange(0, D)
    keys, values, c2p = head_of(K, b, h), head_of(V, b, h), C2P.bias
    K_SEGMENT += b * NK
    DROPPED, rows = words_of(DROPPED, bh, NQ, NK)
    i, r = i0 + shuffled(tl.arange(0, BM)), i0 + tl.arange(0, BM)  # the same queries
    in_rows = i < NQ
    q = tl.load(head_of(Q, b, h) + i[:, None] * Q.row + d[None, :],
                mask=in_rows[:, None], other=0.0)
    first, last = column_range(SEEN, b * NQ, r, NQ, NK)
    reach = SPAN
    if GATHERED:
        reach = (tl.maximum(NQ, NK) + GROUP - 1) // GROUP  # all columns
    base, end = band_edges(i0, reach, NK)
    width, elements = bias_shape(NQ, reach, NK)
    p2c = P2C.bias + bh * elements
    sums_width, sums_elements = bias_shape(NK, reach, NQ)
    SUMS += bh * sums_elements
    outer_first, outer_last = 0, NK
    if GATHERED:
        columns = 2 * table_radius(SPAN, NK)
        c2p += (h * (tl.num_programs(1) // H) + b).to(tl.int64) * NQ * columns
        position = tl.load(Q_POSITION + b * NQ + i, mask=in_rows, other=0)
    else:
        c2p += bh * elements
        outer_first, outer_last = column_range(COVER, b * NK, r, NK, NK)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BN, FAR and not GATHERED)
    run_start, run_stop = run_of(RUN, b, i0, BM, NK, GATHERED)
    m_i = tl.full([BM], float("-inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    if not GATHERED:
        segment_r = tl.load(Q_SEGMENT + b * NQ + r, mask=r < NQ, other=0)
        for j0 in range(near_begin, near_end, BN):
            if (j0 < run_start) | (j0 + BN > run_stop):
                _mask_tiles(c2p, p2c, K_SEGMENT, r, segment_r, base, j0, width, reach, NQ, NK,
                            HAS_C2P, HAS_P2C, BN)
        tl.debug_barrier()  # the loop reads what other threads have written
    for j0 in range(near_begin, near_end, BN):
        j0 = tl.multiple_of(j0, BN)
        j = j0 + tl.arange(0, BN)
        first_i = i0 - band_edges(j0, reach, NQ)[0]
        if GATHERED:
            bias = tl.load(p2c + (i[:, None] * width + j[None, :]))
            if HAS_C2P:
                column = j[None, :] + (columns // 2 - position)[:, None]
                column = tl.minimum(tl.maximum(column, 0), columns - 1)
                bias += tl.load(
                    c2p + (i[:, None] * columns + column), mask=in_rows[:, None], other=0.0)
        else:
            bias = _sum_of_tiles(
                c2p, p2c, i, j, j - base, first_i, width, HAS_C2P, HAS_P2C, BM)
        if KEEP:
            tl.store(
                SUMS + (j0 * sums_width + first_i) + vector_places(sums_width, BN, BM, False),
                to_vectors(tl.trans(bias)))
        if not ONLY_SUMS:
            m_i, l_i, acc = _step(q, keys, values, DROPPED, K.row, V.row, i, j, j0, rows, NK, bias,
                                  scale, m_i, l_i, acc, DROPOUT, D, PRECISION)
    if KEEP:  # what the key kernel reads besides
        for j0 in range(tl.maximum(outer_first // GROUP * GROUP, base),
                        tl.minimum((outer_last + GROUP - 1) // GROUP * GROUP, end), BN):
            if (j0 < near_begin) | (j0 >= near_end):
                place = (r - band_edges(j0, reach, NQ)[0])[None, :]
                place += (j0 + tl.arange(0, BN))[:, None] * sums_width
                tl.store(SUMS + place, tl.full([BN, BM], float("-inf"), tl.float32))
    if FAR and not (GATHERED or ONLY_SUMS):
        batch_heads = tl.num_programs(1).to(tl.int64)
        segment_i = tl.load(Q_SEGMENT + b * NQ + i, mask=in_rows, other=0)
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            j0 = tl.where(is_low, begin, high_begin - low_blocks * BN) + number * BN
            j0 = tl.multiple_of(j0, BN)
            j = j0 + tl.arange(0, BN)
            bias = far_bias(
                C2P.edges + wide * NQ, P2C.edges + wide * NK, is_low, i, NQ, j, NK, batch_heads,
                HAS_C2P, HAS_P2C)
            segment_j = tl.load(K_SEGMENT + j, mask=j < NK, other=0)
            if (j0 < run_start) | (j0 + BN > run_stop):
                allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
                bias = tl.where(allowed, bias, float("-inf"))
            m_i, l_i, acc = _step(q, keys, values, DROPPED, K.row, V.row, i, j, j0, rows, NK, bias,
                                  scale, m_i, l_i, acc, DROPOUT, D, PRECISION)
    if not ONLY_SUMS:
        seen = l_i > 0
        l_safe = tl.where(seen, l_i, 1.0)
        acc = acc * (keep_scale / l_safe)[:, None]
        # A query without keys: output 0, and +inf makes its probabilities 0 in backward.
        lse = tl.where(seen, m_i + tl.log2(l_safe), float("inf"))
        own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
        tl.store(OUT + own_rows, acc.to(OUT.dtype.element_ty), mask=in_rows[:, None])
        tl.store(LSE + wide * NQ + i, lse, mask=in_rows)
