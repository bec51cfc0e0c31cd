"""Triton kernel: flash attention forward with two dense bias tiles.

Near the diagonal (see `bands`) both position terms come as dense tiles of planes that were written
beforehand, so the loop has no index arithmetic and loads whole vectors. Away from it they are
constant along a row or a column: two vectors instead of a tile. A program skips every key outside
the pieces of its own rows, so packed rows cost what their pieces cost.

Names: NQ, NK rows; D head size; BM, BN tile rows and columns.
"""

import triton
import triton.language as tl

from deberta_ds.model.kernels.attention.bands import band_edges, far_bias, near_bias
from deberta_ds.model.kernels.attention.blocks import head_of, planes_of, query_block
from deberta_ds.model.kernels.attention.masks import keep_pairs, loop_ranges

VARIES = ["NQ", "NK", "H", "SPAN", "threshold"]  # one binary, which the self-check has run
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _step(
    q, K, V, K_SEGMENT, K_WORDS, k_n, v_n, j, NK, segment_i, words_i, bias, scale, threshold,
    peak, total, acc,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
    """Take one block of keys into the running softmax."""
    d = tl.arange(0, D)
    in_keys = j < NK
    k = tl.load(K + j[None, :] * k_n + d[:, None], mask=in_keys[None, :], other=0.0)
    segment_j = tl.load(K_SEGMENT + j, mask=in_keys, other=0)
    allowed = (segment_i[:, None] == segment_j[None, :]) & (segment_i != 0)[:, None]
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if HAS_BIAS:
        scores += bias
    scores = tl.where(allowed, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
    probs = tl.exp2(scores * LOG2_E - shift[:, None])
    shrink = tl.exp2(peak * LOG2_E - shift)
    total = total * shrink + tl.sum(probs, 1)
    if DROPOUT:
        words_j = tl.load(K_WORDS + j, mask=in_keys, other=0)
        keep = keep_pairs(words_i[:, None], words_j[None, :], threshold)
        probs = tl.where(keep, probs, 0.0)
    v = tl.load(V + j[:, None] * v_n + d[None, :], mask=in_keys[:, None], other=0.0)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit(do_not_specialize=VARIES)
def forward_kernel(
    Q, K, V, KEY_PLANE, QUERY_PLANE, KEY_ENDS, QUERY_ENDS, OUT, LSE,
    Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, K_SEGMENT, Q_WORDS, K_WORDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    NQ, NK, H, SPAN, scale, keep_scale, threshold,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, DROPOUT: tl.constexpr,
    FAR: tl.constexpr, PICKED: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):
    """One block of queries: OUT [B,NQ,H,D] and the base-2 logsumexp LSE [B,H,NQ]."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    wide = bh.to(tl.int64)
    d = tl.arange(0, D)
    KEY_PLANE, QUERY_PLANE, width = planes_of(KEY_PLANE, QUERY_PLANE, bh, NQ, NK, SPAN)
    K, V = head_of(K, b, h, k_b, k_h), head_of(V, b, h, v_b, v_h)
    K_SEGMENT += b * NK
    K_WORDS += wide * NK
    i, in_rows, q, segment_i, position_i, words_i, base, end, first, last = query_block(
        head_of(Q, b, h, q_b, q_h), Q_SEGMENT, Q_POSITION, Q_START, Q_STOP, Q_WORDS, b, bh, q_n,
        tl.program_id(0) * BM, NQ, NK, SPAN, DROPOUT, PICKED, BM, D,
    )
    begin, near_begin, near_end, low_blocks, high_begin, high_blocks = loop_ranges(
        first, last, base, end, BN, FAR and not PICKED
    )
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j0 in range(near_begin, near_end, BN):
        j0 = tl.multiple_of(j0, BN)
        j = j0 + tl.arange(0, BN)
        base_j, end_j = band_edges(j0, SPAN, NK)
        bias = near_bias(
            KEY_PLANE, QUERY_PLANE, i, position_i, base, end, j, base_j, end_j, width,
            HAS_KEY_TERM, HAS_QUERY_TERM, PICKED, False,
        )
        peak, total, acc = _step(
            q, K, V, K_SEGMENT, K_WORDS, k_n, v_n, j, NK, segment_i, words_i, bias, scale,
            threshold, peak, total, acc, HAS_KEY_TERM or HAS_QUERY_TERM, DROPOUT, D, PRECISION,
        )
    if FAR and not PICKED:
        planes = tl.num_programs(1).to(tl.int64)
        for number in range(low_blocks + high_blocks):
            is_low = number < low_blocks
            j0 = tl.where(is_low, begin, high_begin - low_blocks * BN) + number * BN
            j = tl.multiple_of(j0, BN) + tl.arange(0, BN)
            bias = far_bias(
                KEY_ENDS + wide * NQ, QUERY_ENDS + wide * NK, is_low, i, NQ, j, NK, planes,
                HAS_KEY_TERM, HAS_QUERY_TERM,
            )
            peak, total, acc = _step(
                q, K, V, K_SEGMENT, K_WORDS, k_n, v_n, j, NK, segment_i, words_i, bias, scale,
                threshold, peak, total, acc, True, DROPOUT, D, PRECISION,
            )
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    acc = acc * (keep_scale / safe)[:, None]
    # A query without keys: output 0, and +inf makes its probabilities 0 in backward.
    lse = tl.where(seen, peak * LOG2_E + tl.log2(safe), float("inf"))
    own_rows = (b.to(tl.int64) * NQ * H + h) * D + (i[:, None] * (H * D) + d[None, :])
    tl.store(OUT + own_rows, acc.to(OUT.dtype.element_ty), mask=in_rows[:, None])
    tl.store(LSE + wide * NQ + i, lse, mask=in_rows)
