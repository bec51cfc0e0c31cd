"""Triton kernels: flash attention backward, by blocks of keys and, where it must be, of queries.

Both compute the probabilities again from the two dense bias tiles (see `forward`). Of pairs in the
band the key kernel writes the score gradients into both planes' gradients, and
`planes.row_gradient_kernel` makes the queries' gradients of them: five products a tile. Pairs
outside of the band, and all pairs of queries at explicit columns, take the query kernel as well:
seven. There is one writer per element and no atomic. Pairs outside of the band add into two sums a
row, in registers, stored last.

Names: NQ, NK rows; D head size; BM, BN tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.bands import band_edges, far_bias, near_bias
from deberta_ds.model.kernels.attention.blocks import (
    head_of,
    planes_of,
    query_block,
    skewed_plane_of,
)
from deberta_ds.model.kernels.attention.forward import LOG2_E, VARIES
from deberta_ds.model.kernels.attention.masks import keep_pairs, loop_ranges, piece_range


@triton.jit
def _query_step(
    q, grad, lse, delta, K, V, K_SEGMENT, K_WORDS, k_n, v_n, j, NK, segment_i, words_i, bias,
    scale, keep_scale, threshold, acc,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
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
        words_j = tl.load(K_WORDS + j, mask=in_keys, other=0)
        keep = keep_pairs(words_i[:, None], words_j[None, :], threshold)
        d_probs = tl.where(keep, d_probs, 0.0)
    d_scores = probs * (d_probs * keep_scale - delta[:, None]) * scale
    return tl.dot(d_scores.to(k.dtype), k, acc, input_precision=PRECISION), d_scores


@triton.jit(do_not_specialize=VARIES)
def query_kernel(
    Q, K, V, KEY_PLANE, QUERY_PLANE, KEY_ENDS, QUERY_ENDS, GRAD, LSE, DELTA,
    OUT, DQ, D_KEY_PLANE, D_KEY_ENDS,
    Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, K_SEGMENT, Q_WORDS, K_WORDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    NQ, NK, H, SPAN, scale, keep_scale, threshold,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, DROPOUT: tl.constexpr,
    FAR: tl.constexpr, PICKED: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):
    """One block of queries: DQ [B,NQ,H,D] of the pairs beyond the band, D_KEY_ENDS [2,B,H,NQ].

    Of PICKED queries all pairs, and D_KEY_PLANE. Also DELTA, as `delta_kernel`, for the key kernel.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    wide = bh.to(tl.int64)
    d = tl.arange(0, D)
    KEY_PLANE, QUERY_PLANE, width = planes_of(KEY_PLANE, QUERY_PLANE, bh, NQ, NK, SPAN)
    d_plane, step = skewed_plane_of(D_KEY_PLANE, bh, NQ, SPAN, NK)
    K, V = head_of(K, b, h, k_b, k_h), head_of(V, b, h, v_b, v_h)
    K_SEGMENT += b * NK
    K_WORDS += wide * NK
    i, in_rows, q, segment_i, position_i, words_i, base, end, first, last = query_block(
        head_of(Q, b, h, q_b, q_h), Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, Q_WORDS, b, bh, q_n,
        tl.program_id(0) * BM, NQ, NK, SPAN, DROPOUT, PICKED, BM, D,
    )
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    grad = tl.load(GRAD + own_rows, mask=in_rows[:, None], other=0.0)
    lse = tl.load(LSE + wide * NQ + i, mask=in_rows, other=float("inf"))
    out = tl.load(OUT + own_rows, mask=in_rows[:, None], other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + wide * NQ + i, delta, mask=in_rows)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BN, FAR and not PICKED
    )
    low = tl.zeros([BM], tl.float32)
    high = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    if PICKED:
        for j0 in range(near_begin, near_end, BN):
            j0 = tl.multiple_of(j0, BN)
            j = j0 + tl.arange(0, BN)
            base_j, end_j = band_edges(j0, SPAN, NK)
            bias = near_bias(
                KEY_PLANE, QUERY_PLANE, i, position_i, base, end, j, base_j, end_j, width,
                HAS_KEY_TERM, HAS_QUERY_TERM, PICKED, False,
            )
            acc, d_scores = _query_step(
                q, grad, lse, delta, K, V, K_SEGMENT, K_WORDS, k_n, v_n, j, NK, segment_i,
                words_i, bias, scale, keep_scale, threshold, acc,
                HAS_KEY_TERM or HAS_QUERY_TERM, DROPOUT, D, PRECISION,
            )
            if HAS_KEY_TERM:
                before, after = j[None, :] < base[:, None], j[None, :] >= end[:, None]
                tl.store(
                    d_plane + ((i * (step + 1) - position_i)[:, None] + j[None, :]),
                    d_scores.to(D_KEY_PLANE.dtype.element_ty),
                    mask=in_rows[:, None] & ~before & ~after,
                )
                low += tl.sum(tl.where(before, d_scores, 0.0), 1)
                high += tl.sum(tl.where(after, d_scores, 0.0), 1)
    planes = tl.num_programs(1).to(tl.int64)
    if FAR and not PICKED:
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            j0 = tl.where(is_low, begin, high_begin - low_blocks * BN) + number * BN
            j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
            bias = far_bias(
                KEY_ENDS + wide * NQ, QUERY_ENDS + wide * NK, is_low, i, NQ, j, NK, planes,
                HAS_KEY_TERM, HAS_QUERY_TERM,
            )
            acc, d_scores = _query_step(
                q, grad, lse, delta, K, V, K_SEGMENT, K_WORDS, k_n, v_n, j, NK, segment_i,
                words_i, bias, scale, keep_scale, threshold, acc, True, DROPOUT, D, PRECISION,
            )
            sums = tl.sum(d_scores, 1)
            low += tl.where(is_low, sums, 0.0)
            high += tl.where(is_low, 0.0, sums)
    tl.store(DQ + own_rows, acc.to(DQ.dtype.element_ty), mask=in_rows[:, None])
    if HAS_KEY_TERM and FAR:
        tl.store(D_KEY_ENDS + wide * NQ + i, low, mask=in_rows)
        tl.store(D_KEY_ENDS + (planes + wide) * NQ + i, high, mask=in_rows)


@triton.jit(do_not_specialize=["NQ", "H"])
def delta_kernel(GRAD, OUT, DELTA, NQ, H, D: tl.constexpr, BM: tl.constexpr):
    """DELTA [B,H,NQ], the product of a query's context and its gradient."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    in_rows = i < NQ
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    grad = tl.load(GRAD + own_rows, mask=in_rows[:, None], other=0.0).to(tl.float32)
    out = tl.load(OUT + own_rows, mask=in_rows[:, None], other=0.0).to(tl.float32)
    tl.store(DELTA + bh.to(tl.int64) * NQ + i, tl.sum(grad * out, 1), mask=in_rows)


@triton.jit
def _key_step(
    k, v, Q, GRAD, LSE, DELTA, Q_SEGMENT, Q_WORDS, q_n, g_n, i, NQ, segment_j, words_j, bias,
    scale, keep_scale, threshold, acc_k, acc_v,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return dK and dV / keep_scale with one block of queries added; score gradients [j, i]."""
    d = tl.arange(0, D)
    in_rows = i < NQ
    q = tl.load(Q + i[:, None] * q_n + d[None, :], mask=in_rows[:, None], other=0.0)
    grad = tl.load(GRAD + (i[:, None] * g_n + d[None, :]), mask=in_rows[:, None], other=0.0)
    lse = tl.load(LSE + i, mask=in_rows, other=float("inf"))
    delta = tl.load(DELTA + i, mask=in_rows, other=0.0)
    segment_i = tl.load(Q_SEGMENT + i, mask=in_rows, other=0)
    allowed = (segment_j[:, None] == segment_i[None, :]) & (segment_j != 0)[:, None]
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
    if HAS_BIAS:
        scores += bias
    scores = tl.where(allowed, scores, float("-inf"))
    probs = tl.exp2(scores * LOG2_E - lse[None, :])
    d_probs = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    kept = probs
    if DROPOUT:
        words_i = tl.load(Q_WORDS + i, mask=in_rows, other=0)
        keep = keep_pairs(words_i[None, :], words_j[:, None], threshold)
        kept = tl.where(keep, kept, 0.0)
        d_probs = tl.where(keep, d_probs, 0.0)
    acc_v = tl.dot(kept.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
    d_scores = probs * (d_probs * keep_scale - delta[None, :]) * scale
    acc_k = tl.dot(d_scores.to(q.dtype), q, acc_k, input_precision=PRECISION)
    return acc_k, acc_v, d_scores


@triton.jit(do_not_specialize=VARIES)
def key_kernel(
    Q, K, V, KEY_PLANE, QUERY_PLANE, KEY_ENDS, QUERY_ENDS, GRAD, LSE, DELTA,
    DK, DV, D_KEY_PLANE, D_QUERY_PLANE, D_QUERY_ENDS,
    Q_SEGMENT, Q_POSITION, K_START, K_STOP, K_SEGMENT, Q_WORDS, K_WORDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    NQ, NK, H, SPAN, scale, keep_scale, threshold,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, DROPOUT: tl.constexpr,
    FAR: tl.constexpr, PICKED: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):
    """One block of keys: content part of DK, DV [B,NK,H,D], D_QUERY_PLANE, D_QUERY_ENDS [2,B,H,NK].

    For PICKED queries D_QUERY_PLANE is the score gradient [B,H,NK,NQ] instead, because queries may
    share a column, which would then have two writers; `planes.spread_kernel` sums them. With WHOLE,
    D_KEY_PLANE gets the gradients of all scores, and K_START, K_STOP span the queries whose pieces
    have the key between their ends.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    d = tl.arange(0, D)
    in_keys = j < NK
    wide = bh.to(tl.int64)
    KEY_PLANE, QUERY_PLANE, width = planes_of(KEY_PLANE, QUERY_PLANE, bh, NQ, NK, SPAN)
    if PICKED:
        D_QUERY_PLANE += wide * NK * NQ
    else:
        d_plane, step = skewed_plane_of(D_QUERY_PLANE, bh, NK, SPAN, NK)
    if WHOLE:
        d_key_plane, key_step = skewed_plane_of(D_KEY_PLANE, bh, NQ, SPAN, NK)
    Q, K, V = head_of(Q, b, h, q_b, q_h), head_of(K, b, h, k_b, k_h), head_of(V, b, h, v_b, v_h)
    GRAD += (b.to(tl.int64) * NQ * H + h) * D
    LSE += wide * NQ
    DELTA += wide * NQ
    Q_SEGMENT += b * NQ
    Q_WORDS += wide * NQ
    k = tl.load(K + j[:, None] * k_n + d[None, :], mask=in_keys[:, None], other=0.0)
    v = tl.load(V + j[:, None] * v_n + d[None, :], mask=in_keys[:, None], other=0.0)
    segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=0)
    words_j = segment_j
    if DROPOUT:
        words_j = tl.load(K_WORDS + wide * NK + j, mask=in_keys, other=0)
    base, end = band_edges(j0, SPAN, NK)
    first, last = 0, NQ
    if not PICKED:
        first, last = piece_range(K_START, K_STOP, b * NK, j, NK, NQ)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BM, FAR and not PICKED
    )
    low = tl.zeros([BN], tl.float32)
    high = tl.zeros([BN], tl.float32)
    acc_k = tl.zeros([BN, D], tl.float32)
    acc_v = tl.zeros([BN, D], tl.float32)
    for i0 in range(near_begin, near_end, BM):
        i0 = tl.multiple_of(i0, BM)
        i = i0 + tl.arange(0, BM)
        position_i = i
        base_i, end_i = band_edges(i0, SPAN, NK)
        if PICKED:
            position_i = tl.load(Q_POSITION + b * NQ + i, mask=i < NQ, other=0)
            base_i, end_i = band_edges(position_i, SPAN, NK)
        bias = near_bias(
            KEY_PLANE, QUERY_PLANE, i, position_i, base_i, end_i, j, base, end, width,
            HAS_KEY_TERM, HAS_QUERY_TERM, PICKED, True,
        )
        acc_k, acc_v, d_scores = _key_step(
            k, v, Q, GRAD, LSE, DELTA, Q_SEGMENT, Q_WORDS, q_n, H * D, i, NQ, segment_j, words_j,
            bias, scale, keep_scale, threshold, acc_k, acc_v,
            HAS_KEY_TERM or HAS_QUERY_TERM, DROPOUT, D, PRECISION,
        )
        if HAS_QUERY_TERM:
            gradient = d_scores.to(D_QUERY_PLANE.dtype.element_ty)
            if PICKED:
                tl.store(
                    D_QUERY_PLANE + (j[:, None] * NQ + i[None, :]),
                    gradient, mask=in_keys[:, None] & (i < NQ)[None, :],
                )
                low += tl.sum(tl.where((position_i < base)[None, :], d_scores, 0.0), 1)
                high += tl.sum(tl.where((position_i >= end)[None, :], d_scores, 0.0), 1)
            else:
                tl.store(d_plane + (j[:, None] * step + i[None, :]), gradient)
        if WHOLE:
            tl.store(
                d_key_plane + (i[:, None] * key_step + j[None, :]),
                tl.trans(d_scores.to(D_KEY_PLANE.dtype.element_ty)),
            )
    planes = tl.num_programs(1).to(tl.int64)
    if FAR and not PICKED:
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            i0 = tl.where(is_low, begin, high_begin - low_blocks * BM) + number * BM
            i = tl.multiple_of(i0, BM) + tl.arange(0, BM)
            bias = far_bias(
                QUERY_ENDS + wide * NK, KEY_ENDS + wide * NQ, is_low, j, NK, i, NQ, planes,
                HAS_QUERY_TERM, HAS_KEY_TERM,
            )
            acc_k, acc_v, d_scores = _key_step(
                k, v, Q, GRAD, LSE, DELTA, Q_SEGMENT, Q_WORDS, q_n, H * D, i, NQ, segment_j,
                words_j, bias, scale, keep_scale, threshold, acc_k, acc_v, True, DROPOUT, D,
                PRECISION,
            )
            sums = tl.sum(d_scores, 1)
            low += tl.where(is_low, sums, 0.0)
            high += tl.where(is_low, 0.0, sums)
    own_keys = (b.to(tl.int64) * NK * H + h) * D + (j[:, None] * (H * D) + d[None, :])
    tl.store(DK + own_keys, acc_k.to(DK.dtype.element_ty), mask=in_keys[:, None])
    acc_v *= keep_scale
    tl.store(DV + own_keys, acc_v.to(DV.dtype.element_ty), mask=in_keys[:, None])
    if HAS_QUERY_TERM and FAR:
        tl.store(D_QUERY_ENDS + wide * NK + j, low, mask=in_keys)
        tl.store(D_QUERY_ENDS + (planes + wide) * NK + j, high, mask=in_keys)
