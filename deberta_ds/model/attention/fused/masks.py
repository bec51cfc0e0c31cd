"""Triton helpers: which pairs exist, and which of them dropout keeps."""

import triton
import triton.language as tl

from deberta_ds.model.attention.dropout import PAIR_MIX_1, PAIR_MIX_2

_MIX_1 = tl.constexpr(PAIR_MIX_1)
_MIX_2 = tl.constexpr(PAIR_MIX_2)


@triton.jit
def keep_pairs(row_words, column_words, threshold):
    """Return `dropout.keep_pairs`, bit for bit the mask of the other paths."""
    mixed = row_words + column_words
    mixed = (mixed ^ (mixed >> 15)) * _MIX_1
    mixed = (mixed ^ (mixed >> 13)) * _MIX_2
    return mixed >= threshold


@triton.jit
def piece_range(STARTS, STOPS, base, rows, count, limit):
    """Return the span of columns that any of these rows looks at; empty rows have start = stop."""
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
