"""Triton kernels: flash attention backward, a key kernel and, for some pairs, a query kernel.

Both recompute the probabilities with the two dense bias tiles (see `forward`). For pairs in the
band, the key kernel writes the score gradients into the gradients of both bias matrices, from which
`position_bias.row_gradient_kernel` computes dQ: five matmuls per tile. Pairs outside of the band,
and all pairs of gathered queries, run through the query kernel as well: seven. One writer per
element, no atomics. Pairs outside of the band add to two sums per row, which stay in registers.

Names: NQ, NK rows; D head size; BM, BN tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.blocks import (
    band_edges,
    biases_of,
    column_range,
    far_bias,
    head_of,
    kept_pairs,
    loop_ranges,
    near_bias,
    query_block,
    skewed_gradient_of,
    words_of,
)
from deberta_ds.model.kernels.attention.forward import LOG2_E, VARIES


@triton.jit
def _query_step(q, grad, lse, row_dot, K, V, K_SEGMENT, DROPPED, k_n, v_n, i, j, j0, rows, NK,
                segment_i, bias, scale, keep_scale, acc, HAS_BIAS: tl.constexpr,
                DROPOUT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """Return dQ with one block of keys added, and the score gradients [i, j] of the block."""
    d = tl.arange(0, D)
    in_keys = j < NK
    k = tl.load(K + j[:, None] * k_n + d[None, :], mask=in_keys[:, None], other=0.0)
    v = tl.load(V + j[:, None] * v_n + d[None, :], mask=in_keys[:, None], other=0.0)
    segment_j = tl.load(K_SEGMENT + j, mask=in_keys, other=0)
    allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        scores += bias
    scores = tl.where(allowed, scores, float("-inf"))
    probs = tl.exp2(scores * LOG2_E - lse[:, None])
    d_probs = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        kept = kept_pairs(DROPPED, i, j0, rows, j.shape[0], False)
        d_probs = tl.where(kept, d_probs, 0.0)
    d_scores = probs * (d_probs * keep_scale - row_dot[:, None]) * scale
    return tl.dot(d_scores.to(k.dtype), k, acc, input_precision=PRECISION), d_scores


@triton.jit(do_not_specialize=VARIES)
def query_kernel(Q, K, V, C2P_BIAS, P2C_BIAS, C2P_EDGES, P2C_EDGES, GRAD, LSE, ROW_DOT, OUT, DQ,
                 D_C2P_BIAS, D_C2P_EDGES, Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, K_SEGMENT,
                 DROPPED, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, NQ, NK, H, SPAN, scale,
                 keep_scale, HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr,
                 DROPOUT: tl.constexpr, FAR: tl.constexpr, GATHERED: tl.constexpr, D: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """One block of queries: DQ [B,NQ,H,D] of the pairs beyond the band, D_C2P_EDGES [2,B,H,NQ].

    If GATHERED: DQ of all pairs, and D_C2P_BIAS. Always writes ROW_DOT, which the key kernel reads,
    so launch this one first.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    wide = bh.to(tl.int64)
    d = tl.arange(0, D)
    C2P_BIAS, P2C_BIAS, width = biases_of(C2P_BIAS, P2C_BIAS, bh, NQ, NK, SPAN)
    d_bias, step = skewed_gradient_of(D_C2P_BIAS, bh, NQ, SPAN, NK)
    K, V = head_of(K, b, h, k_b, k_h), head_of(V, b, h, v_b, v_h)
    K_SEGMENT += b * NK
    DROPPED, rows = words_of(DROPPED, bh, NQ, NK)
    i, in_rows, q, segment_i, position_i, base, end, first, last = query_block(
        head_of(Q, b, h, q_b, q_h), Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, b, q_n,
        tl.program_id(0) * BM, NQ, NK, SPAN, GATHERED, BM, D)
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    grad = tl.load(GRAD + own_rows, mask=in_rows[:, None], other=0.0)
    lse = tl.load(LSE + wide * NQ + i, mask=in_rows, other=float("inf"))
    out = tl.load(OUT + own_rows, mask=in_rows[:, None], other=0.0)
    row_dot = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(ROW_DOT + wide * NQ + i, row_dot, mask=in_rows)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BN, FAR and not GATHERED)
    low = tl.zeros([BM], tl.float32)
    high = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    if GATHERED:
        for j0 in range(near_begin, near_end, BN):
            j0 = tl.multiple_of(j0, BN)
            j = j0 + tl.arange(0, BN)
            base_j, end_j = band_edges(j0, SPAN, NK)
            bias = near_bias(
                C2P_BIAS, P2C_BIAS, i, position_i, base, end, j, base_j, end_j, width,
                HAS_C2P, HAS_P2C, GATHERED, False, False)
            acc, d_scores = _query_step(
                q, grad, lse, row_dot, K, V, K_SEGMENT, DROPPED, k_n, v_n, i, j, j0, rows, NK,
                segment_i, bias, scale, keep_scale, acc, HAS_C2P or HAS_P2C, DROPOUT, D, PRECISION)
            if HAS_C2P:
                before, after = j[None, :] < base[:, None], j[None, :] >= end[:, None]
                tl.store(d_bias + ((i * (step + 1) - position_i)[:, None] + j[None, :]),
                         d_scores.to(D_C2P_BIAS.dtype.element_ty),
                         mask=in_rows[:, None] & ~before & ~after)
                low += tl.sum(tl.where(before, d_scores, 0.0), 1)
                high += tl.sum(tl.where(after, d_scores, 0.0), 1)
    batch_heads = tl.num_programs(1).to(tl.int64)
    if FAR and not GATHERED:
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            j0 = tl.where(is_low, begin, high_begin - low_blocks * BN) + number * BN
            j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
            bias = far_bias(
                C2P_EDGES + wide * NQ, P2C_EDGES + wide * NK, is_low, i, NQ, j, NK, batch_heads,
                HAS_C2P, HAS_P2C)
            acc, d_scores = _query_step(
                q, grad, lse, row_dot, K, V, K_SEGMENT, DROPPED, k_n, v_n, i, j, j0, rows, NK,
                segment_i, bias, scale, keep_scale, acc, True, DROPOUT, D, PRECISION)
            sums = tl.sum(d_scores, 1)
            low += tl.where(is_low, sums, 0.0)
            high += tl.where(is_low, 0.0, sums)
    tl.store(DQ + own_rows, acc.to(DQ.dtype.element_ty), mask=in_rows[:, None])
    if HAS_C2P and FAR:
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


@triton.jit
def _key_step(k, v, Q, GRAD, LSE, ROW_DOT, Q_SEGMENT, DROPPED, q_n, g_n, i, j, j0, rows, NQ,
              segment_j, bias, scale, keep_scale, acc_k, acc_v, HAS_BIAS: tl.constexpr,
              DROPOUT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """Return dK and dV / keep_scale with one block of queries added; score gradients [j, i]."""
    d = tl.arange(0, D)
    in_rows = i < NQ
    q = tl.load(Q + i[:, None] * q_n + d[None, :], mask=in_rows[:, None], other=0.0)
    grad = tl.load(GRAD + (i[:, None] * g_n + d[None, :]), mask=in_rows[:, None], other=0.0)
    lse = tl.load(LSE + i, mask=in_rows, other=float("inf"))
    row_dot = tl.load(ROW_DOT + i, mask=in_rows, other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
    if HAS_BIAS:
        scores += bias
    segment_i = tl.load(Q_SEGMENT + i, mask=in_rows, other=0)
    allowed = (segment_j[:, None] == segment_i[None, :]) & (segment_j != 0)[:, None]
    scores = tl.where(allowed, scores, float("-inf"))
    probs = tl.exp2(scores * LOG2_E - lse[None, :])
    d_probs = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    kept_probs = probs
    if DROPOUT:
        kept = kept_pairs(DROPPED, i, j0, rows, j.shape[0], True)
        kept_probs = tl.where(kept, probs, 0.0)
        d_probs = tl.where(kept, d_probs, 0.0)
    acc_v = tl.dot(kept_probs.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
    d_scores = probs * (d_probs * keep_scale - row_dot[None, :]) * scale
    acc_k = tl.dot(d_scores.to(q.dtype), q, acc_k, input_precision=PRECISION)
    return acc_k, acc_v, d_scores


@triton.jit(do_not_specialize=VARIES)
def key_kernel(Q, K, V, C2P_BIAS, P2C_BIAS, C2P_EDGES, P2C_EDGES, GRAD, LSE, ROW_DOT, DK, DV,
               D_C2P_BIAS, D_P2C_BIAS, D_P2C_EDGES, Q_SEGMENT, Q_POSITION, K_START, K_STOP,
               K_SEGMENT, DROPPED, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, NQ, NK, H, SPAN,
               scale, keep_scale, HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr,
               SUMMED: tl.constexpr, DROPOUT: tl.constexpr, FAR: tl.constexpr,
               GATHERED: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys: content part of DK, DV [B,NK,H,D], D_P2C_BIAS, D_P2C_EDGES [2,B,H,NK].

    For GATHERED queries D_P2C_BIAS is the score gradient [B,H,NK,NQ] instead, because queries may
    share a column, which would then have two writers; `position_bias.spread_kernel` sums them. With
    WHOLE, D_C2P_BIAS gets the gradients of all scores, and [K_START, K_STOP) are the queries of all
    documents whose first and last token enclose the key. SUMMED: see `forward_kernel`.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    d = tl.arange(0, D)
    in_keys = j < NK
    wide = bh.to(tl.int64)
    C2P_BIAS, P2C_BIAS, width = biases_of(C2P_BIAS, P2C_BIAS, bh, NQ, NK, SPAN)
    if GATHERED:
        D_P2C_BIAS += wide * NK * NQ
    else:
        d_bias, step = skewed_gradient_of(D_P2C_BIAS, bh, NK, SPAN, NK)
    if WHOLE:
        d_c2p_bias, c2p_step = skewed_gradient_of(D_C2P_BIAS, bh, NQ, SPAN, NK)
    Q, K, V = head_of(Q, b, h, q_b, q_h), head_of(K, b, h, k_b, k_h), head_of(V, b, h, v_b, v_h)
    GRAD += (b.to(tl.int64) * NQ * H + h) * D
    LSE += wide * NQ
    ROW_DOT += wide * NQ
    Q_SEGMENT += b * NQ
    DROPPED, rows = words_of(DROPPED, bh, NQ, NK)
    k = tl.load(K + j[:, None] * k_n + d[None, :], mask=in_keys[:, None], other=0.0)
    v = tl.load(V + j[:, None] * v_n + d[None, :], mask=in_keys[:, None], other=0.0)
    segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=0)
    base, end = band_edges(j0, SPAN, NK)
    first, last = 0, NQ
    if not GATHERED:
        first, last = column_range(K_START, K_STOP, b * NK, j, NK, NQ)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BM, FAR and not GATHERED)
    low = tl.zeros([BN], tl.float32)
    high = tl.zeros([BN], tl.float32)
    acc_k = tl.zeros([BN, D], tl.float32)
    acc_v = tl.zeros([BN, D], tl.float32)
    for i0 in range(near_begin, near_end, BM):
        i0 = tl.multiple_of(i0, BM)
        i = i0 + tl.arange(0, BM)
        position_i = i
        base_i, end_i = band_edges(i0, SPAN, NK)
        if GATHERED:
            position_i = tl.load(Q_POSITION + b * NQ + i, mask=i < NQ, other=0)
            base_i, end_i = band_edges(position_i, SPAN, NK)
        bias = near_bias(
            C2P_BIAS, P2C_BIAS, i, position_i, base_i, end_i, j, base, end, width,
            HAS_C2P, HAS_P2C and not SUMMED, GATHERED, True, False)
        acc_k, acc_v, d_scores = _key_step(
            k, v, Q, GRAD, LSE, ROW_DOT, Q_SEGMENT, DROPPED, q_n, H * D, i, j, j0, rows, NQ,
            segment_j, bias, scale, keep_scale, acc_k, acc_v, HAS_C2P or HAS_P2C, DROPOUT, D,
            PRECISION)
        if HAS_P2C:
            gradient = d_scores.to(D_P2C_BIAS.dtype.element_ty)
            if GATHERED:
                tl.store(
                    D_P2C_BIAS + (j[:, None] * NQ + i[None, :]),
                    gradient, mask=in_keys[:, None] & (i < NQ)[None, :])
                low += tl.sum(tl.where((position_i < base)[None, :], d_scores, 0.0), 1)
                high += tl.sum(tl.where((position_i >= end)[None, :], d_scores, 0.0), 1)
            else:
                tl.store(d_bias + (j[:, None] * step + i[None, :]), gradient)
        if WHOLE:
            tl.store(
                d_c2p_bias + (i[:, None] * c2p_step + j[None, :]),
                tl.trans(d_scores.to(D_C2P_BIAS.dtype.element_ty)))
    batch_heads = tl.num_programs(1).to(tl.int64)
    if FAR and not GATHERED:
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            i0 = tl.where(is_low, begin, high_begin - low_blocks * BM) + number * BM
            i = tl.multiple_of(i0, BM) + tl.arange(0, BM)
            bias = far_bias(
                P2C_EDGES + wide * NK, C2P_EDGES + wide * NQ, is_low, j, NK, i, NQ, batch_heads,
                HAS_P2C, HAS_C2P)
            acc_k, acc_v, d_scores = _key_step(
                k, v, Q, GRAD, LSE, ROW_DOT, Q_SEGMENT, DROPPED, q_n, H * D, i, j, j0, rows, NQ,
                segment_j, bias, scale, keep_scale, acc_k, acc_v, True, DROPOUT, D, PRECISION)
            sums = tl.sum(d_scores, 1)
            low += tl.where(is_low, sums, 0.0)
            high += tl.where(is_low, 0.0, sums)
    own_keys = (b.to(tl.int64) * NK * H + h) * D + (j[:, None] * (H * D) + d[None, :])
    tl.store(DK + own_keys, acc_k.to(DK.dtype.element_ty), mask=in_keys[:, None])
    acc_v *= keep_scale
    tl.store(DV + own_keys, acc_v.to(DV.dtype.element_ty), mask=in_keys[:, None])
    if HAS_P2C and FAR:
        tl.store(D_P2C_EDGES + wide * NK + j, low, mask=in_keys)
        tl.store(D_P2C_EDGES + (batch_heads + wide) * NK + j, high, mask=in_keys)
