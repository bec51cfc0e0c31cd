"""Triton kernels: flash attention backward by blocks of keys, and by queries what is left of dQ.

The key kernel recomputes the probabilities with the sum of both bias matrices that the forward
kernel left. For pairs in the band it writes the score gradients twice, by query and by key: the
gradients of both bias matrices. `content_kernel` makes dQ of the first, and
`position_bias.row_gradient_kernel` adds to dQ and dK: five matmuls per tile. Pairs outside of the
band run through the query kernel as well: seven. One writer per element, no atomics. Pairs outside
of the band add to two sums per row, which stay in registers.

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
    from_vectors,
    head_of,
    kept_pairs,
    loop_ranges,
    shuffled,
    to_vectors,
    vector_places,
    words_of,
)
from deberta_ds.model.kernels.attention.position_bias import row_vectors, vectors

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=VARIES)
def query_kernel(Q, K, V, C2P_EDGES, P2C_EDGES, GRAD, LSE, ROW_DOT, OUT, DQ, D_C2P_EDGES, Q_SEGMENT,
                 SEEN, K_SEGMENT, DROPPED, NQ, NK, H, SPAN, scale, keep_scale,
                 HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr, DROPOUT: tl.constexpr,
                 D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """One block of queries and the keys beyond the band: DQ [B,NQ,H,D], D_C2P_EDGES [2,B,H,NQ].

    Also writes ROW_DOT, which the key kernel reads, so launch this one first.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i0 = tl.program_id(0) * BM
    wide, batch_heads = bh.to(tl.int64), tl.num_programs(1).to(tl.int64)
    d = tl.arange(0, D)
    keys, values = head_of(K, b, h), head_of(V, b, h)
    DROPPED, rows = words_of(DROPPED, bh, NQ, NK)
    i = i0 + tl.arange(0, BM)
    in_rows = i < NQ
    q = tl.load(head_of(Q, b, h) + i[:, None] * Q.row + d[None, :],
                mask=in_rows[:, None], other=0.0)
    segment_i = tl.load(Q_SEGMENT + b * NQ + i, mask=in_rows, other=0)
    first, last = column_range(SEEN, b * NQ, i, NQ, NK)
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    grad = tl.load(GRAD + own_rows, mask=in_rows[:, None], other=0.0)
    lse = tl.load(LSE + wide * NQ + i, mask=in_rows, other=float("inf"))
    out = tl.load(OUT + own_rows, mask=in_rows[:, None], other=0.0)
    row_dot = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(ROW_DOT + wide * NQ + i, row_dot, mask=in_rows)
    base, end = band_edges(i0, SPAN, NK)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BN, True)
    low = tl.zeros([BM], tl.float32)
    high = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for number in range(low_blocks + high_blocks):
        is_low = number < low_blocks
        j0 = tl.where(is_low, begin, high_begin - low_blocks * BN) + number * BN
        j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
        in_keys = j < NK
        k = tl.load(keys + j[:, None] * K.row + d[None, :], mask=in_keys[:, None], other=0.0)
        v = tl.load(values + j[:, None] * V.row + d[None, :], mask=in_keys[:, None], other=0.0)
        segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=0)
        bias = far_bias(
            C2P_EDGES + wide * NQ, P2C_EDGES + wide * NK, is_low, i, NQ, j, NK, batch_heads,
            HAS_C2P, HAS_P2C)
        allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E) + bias
        probs = tl.exp2(tl.where(allowed, scores, float("-inf")) - lse[:, None])
        d_probs = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            kept = kept_pairs(DROPPED, i, j0, rows, BN, False)
            d_probs = tl.where(kept, d_probs, 0.0)
        d_scores = probs * (d_probs * keep_scale - row_dot[:, None]) * scale
        acc = tl.dot(d_scores.to(k.dtype), k, acc, input_precision=PRECISION)
        sums = tl.sum(d_scores, 1)
        low += tl.where(is_low, sums, 0.0)
        high += tl.where(is_low, 0.0, sums)
    tl.store(DQ + own_rows, acc.to(DQ.dtype.element_ty), mask=in_rows[:, None])
    if HAS_C2P:
        tl.store(D_C2P_EDGES + wide * NQ + i, low, mask=in_rows)
        tl.store(D_C2P_EDGES + (batch_heads + wide) * NQ + i, high, mask=in_rows)


@triton.jit(do_not_specialize=["NQ", "H"])
def row_dot_kernel(GRAD, OUT, ROW_DOT, NQ, H, D: tl.constexpr, BM: tl.constexpr):
    """ROW_DOT [B,H,NQ] = rowsum(dO * O): D of the FlashAttention papers."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    in_rows = i < NQ
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    grad = tl.load(GRAD + own_rows, mask=in_rows[:, None], other=0.0).to(tl.float32)
    out = tl.load(OUT + own_rows, mask=in_rows[:, None], other=0.0).to(tl.float32)
    tl.store(ROW_DOT + bh.to(tl.int64) * NQ + i, tl.sum(grad * out, 1), mask=in_rows)


@triton.jit(do_not_specialize=VARIES)
def content_kernel(D_SCORES, K, DQ, SEEN, NQ, NK, H, SPAN,
                   FAR: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
                   PRECISION: tl.constexpr):
    """One block of queries: DQ [B,NQ,H,D] of the pairs in the band; FAR: DQ has the others'."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, D)
    in_rows = i < NQ
    width, elements = bias_shape(NQ, SPAN, NK)
    keys = head_of(K, b, h)
    begin, low, count = row_vectors(SEEN, b * NQ, i, NQ, SPAN, NK, width)
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    acc = tl.zeros([BR, D], tl.float32)
    if FAR:
        acc = tl.load(DQ + own_rows, mask=in_rows[:, None], other=0.0).to(tl.float32)
    first = tl.min(tl.where(count > 0, low * 8, NK), 0) // BC * BC
    for j0 in range(first, tl.max(tl.where(count > 0, (low + count) * 8, 0), 0), BC):
        j = tl.multiple_of(j0, BC) + tl.arange(0, BC)
        place, own = vectors(begin[:, None], low[:, None], count[:, None], j[None, :])
        gradient = tl.load(D_SCORES + bh * elements + place, mask=own, other=0.0)
        k = tl.load(keys + j[:, None] * K.row + d[None, :], mask=(j < NK)[:, None], other=0.0)
        acc = tl.dot(gradient, k, acc, input_precision=PRECISION)
    tl.store(DQ + own_rows, acc.to(DQ.dtype.element_ty), mask=in_rows[:, None])


@triton.jit
def _key_step(k, v, Q, GRAD, LSE, ROW_DOT, DROPPED, q_n, g_n, i, j0, rows, NQ, bias, scale,
              keep_scale, acc_k, acc_v, DROPOUT: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
              PRECISION: tl.constexpr):
    """Return dK and dV with one block of queries added; score gradients [j, i].

    Queries from NQ on have a bias of -inf. What a product does not need is loaded behind it: fewer
    registers. One factor drops pairs from both sums: two selections of rounded pairs cost more.
    """
    d = tl.arange(0, D)
    in_rows = i < NQ
    q = tl.load(Q + i[:, None] * q_n + d[None, :], mask=in_rows[:, None], other=0.0)
    grad = tl.load(GRAD + (i[:, None] * g_n + d[None, :]), mask=in_rows[:, None], other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2_E) + bias
    lse = tl.load(LSE + i, mask=in_rows, other=0.0)
    probs = tl.exp2(scores - lse[None, :])
    d_probs = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    factor, kept_probs = keep_scale, probs
    if DROPOUT:
        factor = tl.where(kept_pairs(DROPPED, i, j0, rows, BN, True), keep_scale, 0.0)
        kept_probs = probs * factor
    acc_v = tl.dot(kept_probs.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
    row_dot = tl.load(ROW_DOT + i, mask=in_rows, other=0.0)
    d_scores = probs * (d_probs * factor - row_dot[None, :]) * scale
    acc_k = tl.dot(d_scores.to(q.dtype), q, acc_k, input_precision=PRECISION)
    return acc_k, acc_v, d_scores


@triton.jit(do_not_specialize=VARIES)
def key_kernel(Q, K, V, SUMS, C2P_EDGES, P2C_EDGES, GRAD, LSE, ROW_DOT, DK, DV, D_C2P, D_P2C,
               Q_SEGMENT, COVER, K_SEGMENT, DROPPED, NQ, NK, H, SPAN, scale, keep_scale,
               HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr, DROPOUT: tl.constexpr,
               FAR: tl.constexpr, GATHERED: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys: content part of DK, DV [B,NK,H,D], the score gradients D_C2P [i, j] and,
    unless GATHERED, D_P2C [j, i] with its edges.

    SUMS: see `forward_kernel`; it has the masks, too. COVER: the queries of all documents whose
    first and last token enclose the key.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    j0 = tl.program_id(0) * BN
    j = j0 + shuffled(tl.arange(0, BN))
    d = tl.arange(0, D)
    in_keys = j < NK
    wide = bh.to(tl.int64)
    reach = SPAN
    if GATHERED:
        reach = (tl.maximum(NQ, NK) + GROUP - 1) // GROUP  # all columns
    base, end = band_edges(j0, reach, NQ)
    width, elements = bias_shape(NK, reach, NQ)
    SUMS += bh * elements
    d_p2c = D_P2C.bias + bh * elements
    own_vectors = j0 * width - base + vector_places(width, BN, BM, True)
    c2p_width, elements = bias_shape(NQ, reach, NK)
    D_C2P += bh * elements + j0
    c2p_vectors = vector_places(c2p_width, BM, BN, True)
    GRAD += (b.to(tl.int64) * NQ * H + h) * D
    LSE += wide * NQ
    ROW_DOT += wide * NQ
    DROPPED, rows = words_of(DROPPED, bh, NQ, NK)
    queries = head_of(Q, b, h)
    k = tl.load(head_of(K, b, h) + j[:, None] * K.row + d[None, :], mask=in_keys[:, None],
                other=0.0)
    v = tl.load(head_of(V, b, h) + j[:, None] * V.row + d[None, :], mask=in_keys[:, None],
                other=0.0)
    first, last = 0, NQ
    if not GATHERED:
        first, last = column_range(COVER, b * NK, j, NK, NQ)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BM, FAR)
    low = tl.zeros([BN], tl.float32)
    high = tl.zeros([BN], tl.float32)
    acc_k = tl.zeros([BN, D], tl.float32)
    acc_v = tl.zeros([BN, D], tl.float32)
    for i0 in range(near_begin, near_end, BM):
        i0 = tl.multiple_of(i0, BM)
        i = i0 + shuffled(tl.arange(0, BM))
        bias = from_vectors(tl.load(SUMS + i0 + own_vectors), BN, BM).to(tl.float32)
        acc_k, acc_v, d_scores = _key_step(
            k, v, queries, GRAD, LSE, ROW_DOT, DROPPED, Q.row, H * D, i, j0, rows, NQ, bias, scale,
            keep_scale, acc_k, acc_v, DROPOUT, BN, D, PRECISION)
        gradient = d_scores.to(D_C2P.dtype.element_ty)
        if HAS_P2C:
            tl.store(d_p2c + i0 + own_vectors, to_vectors(gradient))
        c2p_first = i0 * c2p_width - band_edges(i0, reach, NK)[0]
        tl.store(D_C2P + c2p_first + c2p_vectors, to_vectors(tl.trans(gradient)))
    if FAR:
        segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=0)
        batch_heads = tl.num_programs(1).to(tl.int64)
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            i0 = tl.where(is_low, begin, high_begin - low_blocks * BM) + number * BM
            i = tl.multiple_of(i0, BM) + tl.arange(0, BM)
            segment_i = tl.load(Q_SEGMENT + b * NQ + i, mask=i < NQ, other=0)
            bias = far_bias(
                P2C_EDGES + wide * NK, C2P_EDGES + wide * NQ, is_low, j, NK, i, NQ, batch_heads,
                HAS_P2C, HAS_C2P)
            allowed = (segment_j[:, None] == segment_i[None, :]) & (segment_j != 0)[:, None]
            acc_k, acc_v, d_scores = _key_step(
                k, v, queries, GRAD, LSE, ROW_DOT, DROPPED, Q.row, H * D, i, j0, rows, NQ,
                tl.where(allowed, bias, float("-inf")), scale, keep_scale, acc_k, acc_v, DROPOUT,
                BN, D, PRECISION)
            sums = tl.sum(d_scores, 1)
            low += tl.where(is_low, sums, 0.0)
            high += tl.where(is_low, 0.0, sums)
    own_keys = (b.to(tl.int64) * NK * H + h) * D + (j[:, None] * (H * D) + d[None, :])
    tl.store(DK + own_keys, acc_k.to(DK.dtype.element_ty), mask=in_keys[:, None])
    tl.store(DV + own_keys, acc_v.to(DV.dtype.element_ty), mask=in_keys[:, None])
    if HAS_P2C and FAR:
        tl.store(D_P2C.edges + wide * NK + j, low, mask=in_keys)
        tl.store(D_P2C.edges + (batch_heads + wide) * NK + j, high, mask=in_keys)
