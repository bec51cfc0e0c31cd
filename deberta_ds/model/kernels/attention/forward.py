"""Triton kernel: flash attention forward with two dense bias tiles.

Near the diagonal (`geometry.Band`) both position terms are dense tiles of bias matrices, written
beforehand, so the loop has no index arithmetic and loads whole vectors. Away from it they are
constant along a row or a column: two vectors instead of a tile. A program skips every key outside
the documents of its own queries, so packed sequences cost what their documents cost.

As in FlashAttention, m is the running maximum of a row, l its running sum of exponentials, and
alpha the factor that rescales older sums.

Names: NQ, NK rows; D head size; BM, BN tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.blocks import (
    band_edges,
    biases_of,
    far_bias,
    head_of,
    kept_pairs,
    loop_ranges,
    near_bias,
    query_block,
    run_of,
    words_of,
)

VARIES = ["NQ", "NK", "H", "SPAN"]  # one binary, which the self-check has run
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _step(q, K, V, K_SEGMENT, DROPPED, k_n, v_n, i, j, j0, rows, NK, segment_i, whole, bias, scale,
          m_i, l_i, acc, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr,
          PRECISION: tl.constexpr):
    """Add one block of keys to the online softmax."""
    d = tl.arange(0, D)
    in_keys = j < NK
    k = tl.load(K + j[None, :] * k_n + d[:, None], mask=in_keys[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if HAS_BIAS:
        scores += bias
    segment_j = tl.load(K_SEGMENT + j, mask=in_keys, other=0)
    if not whole:
        allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
        scores = tl.where(allowed, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) * LOG2_E
    probs = tl.exp2(scores * LOG2_E - shift[:, None])
    alpha = tl.exp2(m_i * LOG2_E - shift)
    l_i = l_i * alpha + tl.sum(probs, 1)
    if DROPOUT:
        kept = kept_pairs(DROPPED, i, j0, rows, j.shape[0], False)
        probs = tl.where(kept, probs, 0.0)
    v = tl.load(V + j[:, None] * v_n + d[None, :], mask=in_keys[:, None], other=0.0)
    acc = tl.dot(probs.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i, acc


@triton.jit(do_not_specialize=VARIES)
def forward_kernel(Q, K, V, C2P_BIAS, P2C_BIAS, C2P_EDGES, P2C_EDGES, OUT, LSE, Q_SEGMENT,
                   Q_POSITION, Q_START, Q_STOP, K_SEGMENT, RUN_START, RUN_STOP, DROPPED, q_b, q_h,
                   q_n, k_b, k_h, k_n, v_b, v_h, v_n, NQ, NK, H, SPAN, scale, keep_scale,
                   HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr, SUMMED: tl.constexpr,
                   DROPOUT: tl.constexpr, FAR: tl.constexpr, GATHERED: tl.constexpr,
                   D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """One block of queries: OUT [B,NQ,H,D] and the base-2 logsumexp LSE [B,H,NQ].

    SUMMED: C2P_BIAS becomes the sum of both bias matrices.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    i0 = tl.program_id(0) * BM
    wide = bh.to(tl.int64)
    d = tl.arange(0, D)
    C2P_BIAS, P2C_BIAS, width = biases_of(C2P_BIAS, P2C_BIAS, bh, NQ, NK, SPAN)
    K, V = head_of(K, b, h, k_b, k_h), head_of(V, b, h, v_b, v_h)
    K_SEGMENT += b * NK
    DROPPED, rows = words_of(DROPPED, bh, NQ, NK)
    i, in_rows, q, segment_i, position_i, base, end, first, last = query_block(
        head_of(Q, b, h, q_b, q_h), Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, b, q_n,
        i0, NQ, NK, SPAN, GATHERED, BM, D)
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BN, FAR and not GATHERED)
    run_start, run_stop = run_of(RUN_START, RUN_STOP, b, i0, BM, NK, GATHERED)
    m_i = tl.full([BM], float("-inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j0 in range(near_begin, near_end, BN):
        j0 = tl.multiple_of(j0, BN)
        j = j0 + tl.arange(0, BN)
        base_j, end_j = band_edges(j0, SPAN, NK)
        bias = near_bias(
            C2P_BIAS, P2C_BIAS, i, position_i, base, end, j, base_j, end_j, width,
            HAS_C2P, HAS_P2C, GATHERED, False, SUMMED)
        if SUMMED:  # the sum takes the place of its first term, which nobody reads again
            tl.store(C2P_BIAS + (i[:, None] * width + (j - base)[None, :]), bias)
        m_i, l_i, acc = _step(
            q, K, V, K_SEGMENT, DROPPED, k_n, v_n, i, j, j0, rows, NK, segment_i,
            (j0 >= run_start) & (j0 + BN <= run_stop), bias, scale, m_i, l_i, acc,
            HAS_C2P or HAS_P2C, DROPOUT, D, PRECISION)
    if FAR and not GATHERED:
        batch_heads = tl.num_programs(1).to(tl.int64)
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            j0 = tl.where(is_low, begin, high_begin - low_blocks * BN) + number * BN
            j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
            bias = far_bias(
                C2P_EDGES + wide * NQ, P2C_EDGES + wide * NK, is_low, i, NQ, j, NK, batch_heads,
                HAS_C2P, HAS_P2C)
            m_i, l_i, acc = _step(
                q, K, V, K_SEGMENT, DROPPED, k_n, v_n, i, j, j0, rows, NK, segment_i,
                (j0 >= run_start) & (j0 + BN <= run_stop), bias, scale, m_i, l_i, acc,
                True, DROPOUT, D, PRECISION)
    seen = l_i > 0
    l_safe = tl.where(seen, l_i, 1.0)
    acc = acc * (keep_scale / l_safe)[:, None]
    # A query without keys: output 0, and +inf makes its probabilities 0 in backward.
    lse = tl.where(seen, m_i * LOG2_E + tl.log2(l_safe), float("inf"))
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    tl.store(OUT + own_rows, acc.to(OUT.dtype.element_ty), mask=in_rows[:, None])
    tl.store(LSE + wide * NQ + i, lse, mask=in_rows)
