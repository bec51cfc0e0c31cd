"""Triton helpers: ranges of keys to visit, and the attention dropout mask."""

import triton
import triton.language as tl

from deberta_ds.base.splitmix import GAMMA, MULTIPLIERS
from deberta_ds.model.attention.dropout import PAIR_MIX_1, PAIR_MIX_2

_GAMMA = tl.constexpr(GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(MULTIPLIERS[1])
_MIX_1 = tl.constexpr(PAIR_MIX_1)
_MIX_2 = tl.constexpr(PAIR_MIX_2)


@triton.jit
def keep_pairs(row_bits, column_bits, threshold):
    """Return `dropout.keep_pairs`, bit for bit the mask of the other paths."""
    mixed = row_bits + column_bits
    mixed = (mixed ^ (mixed >> 15)) * _MIX_1
    mixed = (mixed ^ (mixed >> 13)) * _MIX_2
    return mixed >= threshold


@triton.jit
def column_range(STARTS, STOPS, base, rows, count, limit):
    """Return the range of columns that any of these rows attends to; start = stop: none."""
    inside = rows < count
    starts = tl.load(STARTS + base + rows, mask=inside, other=0)
    stops = tl.load(STOPS + base + rows, mask=inside, other=0)
    first = tl.min(tl.where(stops > starts, starts, limit), 0)
    return first, tl.max(stops, 0)


@triton.jit
def loop_ranges(first, last, base, end, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """Return how the blocks of [first, last) split at the band [base, end).

    That is: begin, first and last + 1 column of the near loop, number of blocks before the band,
    first column after the band, number of blocks there. Without FAR all blocks are near.
    """
    begin = first // BLOCK * BLOCK
    near_begin, near_end, low_blocks, high_begin, high_blocks = begin, last, 0, 0, 0
    if FAR:
        near_begin, near_end = tl.maximum(begin, base), tl.minimum(last, end)
        low_blocks = tl.maximum(tl.minimum(base, last) - begin + BLOCK - 1, 0) // BLOCK
        high_begin = tl.maximum(begin, end)
        high_blocks = tl.maximum(last - high_begin + BLOCK - 1, 0) // BLOCK
    return begin, near_begin, near_end, low_blocks, high_begin, high_blocks


@triton.jit
def _random_bits(counter, start):
    """Return splitmix64 of a counter, cut to int32."""
    state = (counter + 1).to(tl.uint64) * _GAMMA + start.to(tl.uint64)
    state = (state ^ (state >> 30)) * _MULTIPLIER_1
    state = (state ^ (state >> 27)) * _MULTIPLIER_2
    return (state ^ (state >> 31)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["start", "NQ", "NK"])
def bits_kernel(Q_BITS, K_BITS, start, NQ, NK, BLOCK: tl.constexpr):
    """The random bits of `dropout.dropout_bits`, [B,H,NQ] and [B,H,NK]."""
    bh = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.cast(start, tl.int64)
    counter = n.to(tl.int64) + (bh << 32)
    tl.store(Q_BITS + bh * NQ + n, _random_bits(counter, start), mask=n < NQ)
    tl.store(K_BITS + bh * NK + n, _random_bits(counter + (1 << 31), start), mask=n < NK)
