"""Triton kernels: flash attention with two position planes, forward and backward.

The planes hold one column per distance: KEY_TERM[i, c] = q_i . Tk[c] with c = j - i + R, and
QUERY_TERM[j, c] = k_j . Tq[c] with c = i - j + R, i and j being row columns; c is clamped to
[0, 2R] because the relative table is constant beyond its reach R. So every bias load is affine:
no bucket arithmetic, no look-up table. The planes themselves are plain matrix products.

Backward has one writer per element and no atomics. A pair within reach stores its gradient into the
plane column that only this pair uses; all pairs beyond reach add into two sums a row, stored last.

A program skips every key (query) outside the pieces of its own rows, so packed rows cost what their
pieces cost. Dropout is `dropout.keep_pairs`, bit for bit the same mask as on the other paths.

Names: NQ, NK rows; D head size; C plane columns; BM, BN tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.attention.dropout import PAIR_MIX_1, PAIR_MIX_2

_MIX_1 = tl.constexpr(PAIR_MIX_1)
_MIX_2 = tl.constexpr(PAIR_MIX_2)


@triton.jit
def _keep(row_words, column_words, threshold):
    mixed = row_words + column_words
    mixed = (mixed ^ (mixed >> 15)) * _MIX_1
    mixed = (mixed ^ (mixed >> 13)) * _MIX_2
    return mixed >= threshold


@triton.jit
def _key_range(STARTS, STOPS, base, rows, count, limit):
    """Return the span of columns that any of these rows looks at; empty rows have start = stop."""
    inside = rows < count
    starts = tl.load(STARTS + base + rows, mask=inside, other=0)
    stops = tl.load(STOPS + base + rows, mask=inside, other=0)
    first = tl.min(tl.where(stops > starts, starts, limit), 0)
    return first, tl.max(stops, 0)


@triton.jit
def forward_kernel(
    Q, K, V, KEY_TERM, QUERY_TERM, OUT, LSE,
    Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, K_SEGMENT, Q_WORDS, K_WORDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    NQ, NK, H, C, REACH, scale, keep_scale, threshold,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries: OUT [B,NQ,H,D] and the base-2 logsumexp LSE [B,H,NQ]."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    in_rows = i < NQ
    wide = bh.to(tl.int64)
    # Scalar bases and 32-bit offsets: tiles of 64-bit addresses would fill the registers.
    key_plane, query_plane = KEY_TERM + wide * NQ * C, QUERY_TERM + wide * NK * C
    q = tl.load(
        Q + b.to(tl.int64) * q_b + h * q_h + i[:, None] * q_n + d[None, :],
        mask=in_rows[:, None], other=0.0,
    )
    segment_i = tl.load(Q_SEGMENT + b * NQ + i, mask=in_rows, other=0)
    position_i = tl.load(Q_POSITION + b * NQ + i, mask=in_rows, other=0)
    if DROPOUT:
        words_i = tl.load(Q_WORDS + wide * NQ + i, mask=in_rows, other=0)
    first, last = _key_range(Q_START, Q_STOP, b * NQ, i, NQ, NK)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j0 in range(first // BN * BN, last, BN):
        j = j0 + tl.arange(0, BN)
        in_keys = j < NK
        k = tl.load(
            K + b.to(tl.int64) * k_b + h * k_h + j[None, :] * k_n + d[:, None],
            mask=in_keys[None, :], other=0.0,
        )
        segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=-1)
        allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
        bias = tl.zeros([BM, BN], tl.float32)
        if HAS_KEY_TERM:
            column = j[None, :] - position_i[:, None] + REACH
            column = tl.minimum(tl.maximum(column, 0), 2 * REACH)
            term = tl.load(key_plane + (i[:, None] * C + column), mask=allowed, other=0.0)
            bias += term.to(tl.float32)
        if HAS_QUERY_TERM:  # loaded the way it is stored, then turned
            column = position_i[None, :] - j[:, None] + REACH
            column = tl.minimum(tl.maximum(column, 0), 2 * REACH)
            term = tl.load(
                query_plane + (j[:, None] * C + column),
                mask=in_keys[:, None] & in_rows[None, :], other=0.0,
            )
            bias += tl.trans(term).to(tl.float32)
        scores = (tl.dot(q, k, input_precision=PRECISION) + bias) * (scale * 1.4426950408889634)
        scores = tl.where(allowed, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        probs = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(probs, 1)
        if DROPOUT:
            words_j = tl.load(K_WORDS + wide * NK + j, mask=in_keys, other=0)
            probs = tl.where(_keep(words_i[:, None], words_j[None, :], threshold), probs, 0.0)
        v = tl.load(
            V + b.to(tl.int64) * v_b + h * v_h + j[:, None] * v_n + d[None, :],
            mask=in_keys[:, None], other=0.0,
        )
        acc = acc * shrink[:, None]
        acc += tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    acc = acc * (keep_scale / safe)[:, None]
    # A query without keys: output 0, and +inf makes its probabilities 0 in backward.
    lse = tl.where(seen, peak + tl.log2(safe), float("inf"))
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    tl.store(OUT + own_rows, acc.to(OUT.dtype.element_ty), mask=in_rows[:, None])
    tl.store(LSE + wide * NQ + i, lse, mask=in_rows)


@triton.jit
def backward_query_kernel(
    Q, K, V, KEY_TERM, QUERY_TERM, GRAD, LSE, DELTA, DQ, D_KEY_TERM,
    Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, K_SEGMENT, Q_WORDS, K_WORDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    NQ, NK, H, C, REACH, scale, keep_scale, threshold,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries: content part of DQ [B,NQ,H,D], and D_KEY_TERM [B,H,NQ,C]."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    in_rows = i < NQ
    wide = bh.to(tl.int64)
    # Scalar bases and 32-bit offsets: tiles of 64-bit addresses would fill the registers.
    key_plane, query_plane = KEY_TERM + wide * NQ * C, QUERY_TERM + wide * NK * C
    d_key_plane = D_KEY_TERM + wide * NQ * C
    q = tl.load(
        Q + b.to(tl.int64) * q_b + h * q_h + i[:, None] * q_n + d[None, :],
        mask=in_rows[:, None], other=0.0,
    )
    own_rows = i[:, None] * (H * D) + d[None, :]
    plane = (b.to(tl.int64) * NQ * H + h) * D
    grad = tl.load(GRAD + plane + own_rows, mask=in_rows[:, None], other=0.0)
    lse = tl.load(LSE + wide * NQ + i, mask=in_rows, other=float("inf"))
    delta = tl.load(DELTA + wide * NQ + i, mask=in_rows, other=0.0)
    segment_i = tl.load(Q_SEGMENT + b * NQ + i, mask=in_rows, other=0)
    position_i = tl.load(Q_POSITION + b * NQ + i, mask=in_rows, other=0)
    if DROPOUT:
        words_i = tl.load(Q_WORDS + wide * NQ + i, mask=in_rows, other=0)
    first, last = _key_range(Q_START, Q_STOP, b * NQ, i, NQ, NK)
    low = tl.zeros([BM], tl.float32)
    high = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j0 in range(first // BN * BN, last, BN):
        j = j0 + tl.arange(0, BN)
        in_keys = j < NK
        k = tl.load(
            K + b.to(tl.int64) * k_b + h * k_h + j[:, None] * k_n + d[None, :],
            mask=in_keys[:, None], other=0.0,
        )
        v = tl.load(
            V + b.to(tl.int64) * v_b + h * v_h + j[:, None] * v_n + d[None, :],
            mask=in_keys[:, None], other=0.0,
        )
        segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=-1)
        allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
        distance = j[None, :] - position_i[:, None] + REACH
        bias = tl.zeros([BM, BN], tl.float32)
        if HAS_KEY_TERM:
            column = tl.minimum(tl.maximum(distance, 0), 2 * REACH)
            term = tl.load(key_plane + (i[:, None] * C + column), mask=allowed, other=0.0)
            bias += term.to(tl.float32)
        if HAS_QUERY_TERM:
            column = position_i[None, :] - j[:, None] + REACH
            column = tl.minimum(tl.maximum(column, 0), 2 * REACH)
            term = tl.load(
                query_plane + (j[:, None] * C + column),
                mask=in_keys[:, None] & in_rows[None, :], other=0.0,
            )
            bias += tl.trans(term).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) + bias
        scores = tl.where(allowed, scores * (scale * 1.4426950408889634), float("-inf"))
        probs = tl.exp2(scores - lse[:, None])
        d_probs = tl.dot(grad, tl.trans(v), input_precision=PRECISION) * keep_scale
        if DROPOUT:
            words_j = tl.load(K_WORDS + wide * NK + j, mask=in_keys, other=0)
            d_probs = tl.where(_keep(words_i[:, None], words_j[None, :], threshold), d_probs, 0.0)
        d_scores = probs * (d_probs - delta[:, None]) * scale
        acc += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
        if HAS_KEY_TERM:
            near = (distance > 0) & (distance < 2 * REACH)
            low += tl.sum(tl.where(distance <= 0, d_scores, 0.0), 1)
            high += tl.sum(tl.where(distance >= 2 * REACH, d_scores, 0.0), 1)
            tl.store(
                d_key_plane + (i[:, None] * C + distance),
                d_scores.to(D_KEY_TERM.dtype.element_ty),
                mask=allowed & near,
            )
    tl.store(DQ + plane + own_rows, acc.to(DQ.dtype.element_ty), mask=in_rows[:, None])
    if HAS_KEY_TERM:
        ends = d_key_plane + i * C
        tl.store(ends, low.to(D_KEY_TERM.dtype.element_ty), mask=in_rows)
        tl.store(ends + 2 * REACH, high.to(D_KEY_TERM.dtype.element_ty), mask=in_rows)


@triton.jit
def backward_key_kernel(
    Q, K, V, KEY_TERM, QUERY_TERM, GRAD, LSE, DELTA, DK, DV, D_QUERY_TERM,
    Q_SEGMENT, Q_POSITION, K_START, K_STOP, K_SEGMENT, Q_WORDS, K_WORDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    NQ, NK, H, C, REACH, scale, keep_scale, threshold,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, DROPOUT: tl.constexpr,
    PICKED: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: content part of DK, DV [B,NK,H,D], and D_QUERY_TERM.

    D_QUERY_TERM is [B,H,NK,C]; for PICKED queries it is the score gradient [B,H,NK,NQ], because
    queries may share a row column and its plane column would then have two writers.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    in_keys = j < NK
    wide = bh.to(tl.int64)
    # Scalar bases and 32-bit offsets: tiles of 64-bit addresses would fill the registers.
    key_plane, query_plane = KEY_TERM + wide * NQ * C, QUERY_TERM + wide * NK * C
    d_query_plane = D_QUERY_TERM + wide * NK * C
    k = tl.load(
        K + b.to(tl.int64) * k_b + h * k_h + j[:, None] * k_n + d[None, :],
        mask=in_keys[:, None], other=0.0,
    )
    v = tl.load(
        V + b.to(tl.int64) * v_b + h * v_h + j[:, None] * v_n + d[None, :],
        mask=in_keys[:, None], other=0.0,
    )
    segment_j = tl.load(K_SEGMENT + b * NK + j, mask=in_keys, other=0)
    if DROPOUT:
        words_j = tl.load(K_WORDS + wide * NK + j, mask=in_keys, other=0)
    if PICKED:
        first, last = 0, NQ
    else:
        first, last = _key_range(K_START, K_STOP, b * NK, j, NK, NQ)
    plane = (b.to(tl.int64) * NQ * H + h) * D
    low = tl.zeros([BN], tl.float32)
    high = tl.zeros([BN], tl.float32)
    acc_k = tl.zeros([BN, D], tl.float32)
    acc_v = tl.zeros([BN, D], tl.float32)
    for i0 in range(first // BM * BM, last, BM):
        i = i0 + tl.arange(0, BM)
        in_rows = i < NQ
        q = tl.load(
            Q + b.to(tl.int64) * q_b + h * q_h + i[:, None] * q_n + d[None, :],
            mask=in_rows[:, None], other=0.0,
        )
        grad = tl.load(
            GRAD + plane + (i[:, None] * (H * D) + d[None, :]), mask=in_rows[:, None], other=0.0
        )
        lse = tl.load(LSE + wide * NQ + i, mask=in_rows, other=float("inf"))
        delta = tl.load(DELTA + wide * NQ + i, mask=in_rows, other=0.0)
        segment_i = tl.load(Q_SEGMENT + b * NQ + i, mask=in_rows, other=-1)
        position_i = tl.load(Q_POSITION + b * NQ + i, mask=in_rows, other=0)
        allowed = (segment_j[:, None] == segment_i[None, :]) & (segment_j != 0)[:, None]
        distance = position_i[None, :] - j[:, None] + REACH
        bias = tl.zeros([BN, BM], tl.float32)
        if HAS_QUERY_TERM:
            column = tl.minimum(tl.maximum(distance, 0), 2 * REACH)
            term = tl.load(
                query_plane + (j[:, None] * C + column), mask=allowed, other=0.0
            )
            bias += term.to(tl.float32)
        if HAS_KEY_TERM:
            column = j[None, :] - position_i[:, None] + REACH
            column = tl.minimum(tl.maximum(column, 0), 2 * REACH)
            term = tl.load(
                key_plane + (i[:, None] * C + column),
                mask=in_rows[:, None] & in_keys[None, :], other=0.0,
            )
            bias += tl.trans(term).to(tl.float32)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) + bias
        scores = tl.where(allowed, scores * (scale * 1.4426950408889634), float("-inf"))
        probs = tl.exp2(scores - lse[None, :])
        d_probs = tl.dot(v, tl.trans(grad), input_precision=PRECISION) * keep_scale
        kept = probs
        if DROPOUT:
            words_i = tl.load(Q_WORDS + wide * NQ + i, mask=in_rows, other=0)
            keep = _keep(words_i[None, :], words_j[:, None], threshold)
            kept = tl.where(keep, probs, 0.0)
            d_probs = tl.where(keep, d_probs, 0.0)
        acc_v += tl.dot((kept * keep_scale).to(grad.dtype), grad, input_precision=PRECISION)
        d_scores = probs * (d_probs - delta[None, :]) * scale
        acc_k += tl.dot(d_scores.to(q.dtype), q, input_precision=PRECISION)
        if HAS_QUERY_TERM and PICKED:
            tl.store(
                D_QUERY_TERM + wide * NK * NQ + (j[:, None] * NQ + i[None, :]),
                d_scores.to(D_QUERY_TERM.dtype.element_ty),
                mask=in_keys[:, None] & in_rows[None, :],
            )
        elif HAS_QUERY_TERM:
            near = (distance > 0) & (distance < 2 * REACH)
            low += tl.sum(tl.where(distance <= 0, d_scores, 0.0), 1)
            high += tl.sum(tl.where(distance >= 2 * REACH, d_scores, 0.0), 1)
            tl.store(
                d_query_plane + (j[:, None] * C + distance),
                d_scores.to(D_QUERY_TERM.dtype.element_ty),
                mask=allowed & near,
            )
    own_keys = (b.to(tl.int64) * NK * H + h) * D + (j[:, None] * (H * D) + d[None, :])
    tl.store(DK + own_keys, acc_k.to(DK.dtype.element_ty), mask=in_keys[:, None])
    tl.store(DV + own_keys, acc_v.to(DV.dtype.element_ty), mask=in_keys[:, None])
    if HAS_QUERY_TERM and not PICKED:
        ends = d_query_plane + j * C
        tl.store(ends, low.to(D_QUERY_TERM.dtype.element_ty), mask=in_keys)
        tl.store(ends + 2 * REACH, high.to(D_QUERY_TERM.dtype.element_ty), mask=in_keys)
