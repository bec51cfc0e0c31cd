"""Triton helpers of the flash kernels: blocks of queries, their ranges of keys, dropout bits, and
tiles of the position bias inside of the band around the diagonal and outside (`geometry.Band`).

The band is symmetric: key j is in the band of query i exactly when i is in the band of j. A tile of
a flash kernel covers at most one group of rows and one of columns, so it is dense in both bias
matrices or in neither.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deberta_ds.base.splitmix import GAMMA, MULTIPLIERS
from deberta_ds.model.attention.dropout import (
    DIGIT_STEP,
    PAIR_MIX_1,
    PAIR_MIX_2,
    STREAM_FACTOR,
    STREAM_TERM,
    WORD_KEYS,
)
from deberta_ds.model.attention.geometry import GROUP_COLUMNS

VARIES = ["N", "NQ", "NK", "H", "SPAN", "B"]  # one binary, which the check has run
GROUP = tl.constexpr(GROUP_COLUMNS)
_GAMMA = tl.constexpr(GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(MULTIPLIERS[1])
_MIX_1, _MIX_2 = tl.constexpr(PAIR_MIX_1), tl.constexpr(PAIR_MIX_2 & 0xFFFFFFFF)
_STREAM_FACTOR, _STREAM_TERM = tl.constexpr(STREAM_FACTOR), tl.constexpr(STREAM_TERM)
_STEP, WORD = tl.constexpr(DIGIT_STEP & 0xFFFFFFFF), tl.constexpr(WORD_KEYS)
# Scalar bases and 32-bit offsets everywhere: tiles of 64-bit addresses would fill the registers.


# Structs of kernels' arguments. Counts of rows stay out of them: Triton would compile another
# binary for each that is 1 or a multiple of 16, whatever `do_not_specialize` says.
Vectors = namedtuple("Vectors", "data batch head row")  # [B,H,rows,D], and its strides
# Of a position term, scaled, or of the gradient of the unscaled one: the pairs within the band
# [B,H,rows,W], and the terms of all pairs before and behind it, fp32 [2,B,H,rows].
Term = namedtuple("Term", "bias edges")
Bounds = namedtuple("Bounds", "start stop")  # of ranges of columns, [B,rows]: first, last + 1


@triton.jit
def column_range(BOUNDS, base, rows, count, limit):
    """Return the range of columns that any of these rows attends to; start = stop: none."""
    inside = rows < count
    starts = tl.load(BOUNDS.start + base + rows, mask=inside, other=0)
    stops = tl.load(BOUNDS.stop + base + rows, mask=inside, other=0)
    first = tl.min(tl.where(stops > starts, starts, limit), 0)
    return first, tl.max(stops, 0)


@triton.jit
def run_of(RUN, b, first, COUNT: tl.constexpr, NK, GATHERED: tl.constexpr):
    """Return the columns that all of COUNT columns from `first` on attend to without a mask.

    That is the run of one segment around them; 0, 0 if they are no part of one run.
    """
    start, stop = 0, 0
    if not GATHERED:
        start = tl.load(RUN.start + b * NK + first)
        stop = tl.load(RUN.stop + b * NK + first)
        stop = tl.where(first + COUNT <= stop, stop, 0)
    return start, stop


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
    """Return splitmix64 of a counter, cut to 32 bits."""
    state = (counter + 1).to(tl.uint64) * _GAMMA + start
    state = (state ^ (state >> 30)) * _MULTIPLIER_1
    state = (state ^ (state >> 27)) * _MULTIPLIER_2
    return (state ^ (state >> 31)).to(tl.uint32)


@triton.jit
def words_of(WORDS, bh, NQ, NK):
    """Return the pointer to the words of one head, and how far a word is from its neighbor."""
    rows = (NQ + GROUP - 1) // GROUP * GROUP
    return WORDS + bh.to(tl.int64) * rows * ((NK + GROUP - 1) // GROUP * (GROUP // WORD)), rows


@triton.jit(do_not_specialize=["threshold", "NQ", "NK", "H"])
def dropped_kernel(WORDS, SEEN, SEED, threshold, NQ, NK, H, DIGITS: tl.constexpr,
                   BR: tl.constexpr, BW: tl.constexpr):
    """WORDS [B,H,W,rows]: `dropout.dropped_words`, transposed, of what these queries attend to."""
    bh = tl.program_id(1)
    i, w = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BW)
    start = tl.load(SEED).to(tl.uint64) * _STREAM_FACTOR + _STREAM_TERM
    counter = bh.to(tl.int64) << 32
    row_bits = _random_bits(i.to(tl.int64) + counter, start)
    WORDS, rows = words_of(WORDS, bh, NQ, NK)
    first, last = column_range(SEEN, bh // H * NQ, i, NQ, NK)
    for w0 in range(first // WORD, tl.cdiv(last, WORD), BW):
        column_bits = _random_bits((w0 + w).to(tl.int64) + (counter + (1 << 31)), start)
        sums = row_bits[:, None] + column_bits[None, :]
        below = tl.zeros([BR, BW], tl.int32)
        for digit in tl.static_range(DIGITS):
            sums += _STEP
            mixed = (sums ^ (sums >> 16)) * _MIX_1
            mixed = (mixed ^ (mixed >> 15)) * _MIX_2
            mixed = ~(mixed ^ (mixed >> 15)).to(tl.int32, bitcast=True)
            is_one = -((threshold >> digit) & 1)
            below = (below & mixed) | (is_one & (below | mixed))
        tl.store(WORDS + (((w0 + w) * rows)[None, :] + i[:, None]), below,
                 mask=(w0 + w < tl.cdiv(last, WORD))[None, :])


@triton.jit
def kept_pairs(WORDS, i, first, rows, KEYS: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr):
    """Return the kept pairs of queries i and KEYS keys from `first` on, [i, j] or [j, i].

    WORDS, rows: see `words_of`.
    """
    w, bit = first // WORD + tl.arange(0, KEYS // WORD), tl.arange(0, WORD)
    bit = 1 << (shuffled(bit) if ROWS_ARE_KEYS else bit)
    if ROWS_ARE_KEYS:
        word = tl.load(WORDS + ((w * rows)[:, None] + i[None, :]))
        dropped = tl.reshape(word[:, None, :] & bit[None, :, None], [KEYS, i.shape[0]])
    else:
        word = tl.load(WORDS + (i[:, None] + (w * rows)[None, :]))
        dropped = tl.reshape(word[:, :, None] & bit[None, None, :], [i.shape[0], KEYS])
    return dropped == 0


@triton.jit
def band_edges(position, SPAN, NK):
    """Return the first column of the band of rows at `position`, and the first one after it."""
    group = position // GROUP
    groups = (NK + GROUP - 1) // GROUP
    return tl.maximum(group - SPAN, 0) * GROUP, tl.minimum(group + SPAN + 1, groups) * GROUP


@triton.jit
def bias_shape(rows, SPAN, NK):
    """Return the width of a bias and its elements a head."""
    groups = (NK + GROUP - 1) // GROUP
    width = tl.minimum(2 * SPAN + 1, groups) * GROUP
    return width, ((rows + GROUP - 1) // GROUP * GROUP).to(tl.int64) * width


@triton.jit
def table_radius(SPAN, NK):
    """Return the table row of distance 0; the table has twice as many rows."""
    return tl.minimum(SPAN + 1, (NK + GROUP - 1) // GROUP) * GROUP


@triton.jit
def shuffled(m):
    """Return where in memory the row or column m of a flash tile lies, within its block of 32.

    A thread holds the columns 8 n + 2 c + x of a product's rows, for one c and all n and x. In this
    order eight of them are neighbors: whole vectors go from memory into registers and back, with no
    exchange between threads. (The order is that of mma.sync and wgmma; others are only slower.)
    """
    return (m & -32) | ((m >> 1 & 3) << 3) | ((m >> 3 & 3) << 1) | (m & 1)


@triton.jit
def vector_places(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHUFFLED: tl.constexpr):
    """Return the elements [COLUMNS / 16, ROWS / 2, 32] of a tile of a matrix, for `from_vectors`.

    SHUFFLED: whether the tile's rows are, too.
    """
    half, row = tl.arange(0, COLUMNS // 16), tl.arange(0, ROWS // 2)
    row = (row // 8 * 16 + row % 8)[None, :] + (half % 2 * 8)[:, None]
    if SHUFFLED:
        row = shuffled(row)
    return (row * width + (half // 2 * 32)[:, None])[:, :, None] + tl.arange(0, 32)[None, None, :]


@triton.jit
def from_vectors(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile [ROWS, COLUMNS] of vectors at `vector_places`, its columns `shuffled`."""
    x = tl.reshape(x, [COLUMNS // 32, 2, ROWS // 16, 8, 4, 4, 2])
    return tl.reshape(tl.permute(x, [2, 1, 3, 0, 5, 4, 6]), [ROWS, COLUMNS])


@triton.jit
def to_vectors(tile):
    """Return a tile as `from_vectors` takes it."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    x = tl.reshape(tile, [ROWS // 16, 2, 8, COLUMNS // 32, 4, 4, 2])
    return tl.reshape(tl.permute(x, [3, 1, 0, 2, 5, 4, 6]), [COLUMNS // 16, ROWS // 2, 32])


@triton.jit
def far_bias(OWN_EDGES, OTHER_EDGES, is_low, own, own_count, other, other_count, batch_heads,
             HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr):
    """Return the bias [own, other] of a block of columns before (is_low) or behind the band.

    EDGES: terms with the table's first row, then (`batch_heads` x count elements on) with its last.
    For keys before the band, c2p takes the table's first row and p2c its last; behind the band it
    is the other way round.
    """
    bias = tl.zeros([own.shape[0], other.shape[0]], tl.float32)
    if HAS_OWN:
        edges = OWN_EDGES + tl.where(is_low, 0, batch_heads) * own_count
        bias += tl.load(edges + own, mask=own < own_count, other=0.0)[:, None]
    if HAS_OTHER:
        edges = OTHER_EDGES + tl.where(is_low, batch_heads, 0) * other_count
        bias += tl.load(edges + other, mask=other < other_count, other=0.0)[None, :]
    return bias


@triton.jit
def head_of(X, b, h):
    """Return the pointer to one head of one batch row."""
    return X.data + b.to(tl.int64) * X.batch + h * X.head
