"""Attention dropout as a pure function of (seed, sequence, head, query, key).

Every path (reference, tiled, dense, fused) and every recomputation under activation checkpointing
must drop the same pairs, whatever order or tile size it works in. So the mask is counter based: no
generator, no state. It has one bit per pair, and a word for 32 neighboring keys: a query and a
block of keys have 32 random bits each, and hashes of their sum are the binary digits, last one
first, of 32 numbers that are compared with the threshold at once.

Shape legend: B batch, H heads, Q queries, L keys, W words of 32 keys; K digits.
"""

import torch
from torch import Tensor

from deberta_ds.base.splitmix import GAMMA, mix_tensor, signed

WORD_KEYS = 32
DIGITS = 16  # a rate is a multiple of 2^-16
# Multipliers of the "lowbias32" finalizer and the step from digit to digit, as signed numbers.
PAIR_MIX_1 = 0x21F0AAAD
PAIR_MIX_2 = 0xD35A2D97 - (1 << 32)
DIGIT_STEP = 0x9E3779B9 - (1 << 32)


def drop_threshold(dropout: float) -> int:
    """Return how many of the 2^16 numbers are dropped: some, and not all."""
    return min(max(round(dropout * (1 << DIGITS)), 1), (1 << DIGITS) - 1)


def random_bits(seed: Tensor, batch: int, heads: int, queries: int, keys: int
                ) -> tuple[Tensor, Tensor]:
    """Return int32 random bits of the queries [B,H,Q] and of the blocks of keys [B,H,W].

    seed: int64 [1] on the device of the result.
    """
    device = seed.device
    heads_of_batch = torch.arange(batch * heads, device=device).view(batch, heads, 1) << 32
    rows = torch.arange(queries, device=device) + heads_of_batch
    columns = torch.arange(-(-keys // WORD_KEYS), device=device) + heads_of_batch + (1 << 31)
    return _bits(seed, rows), _bits(seed, columns)


def dropped_words(row_bits: Tensor, column_bits: Tensor, dropout: float) -> Tensor:
    """Return int32 [...,Q,W], of which bit n is set where the word's n-th key is dropped."""
    threshold = drop_threshold(dropout)
    first = (threshold & -threshold).bit_length() - 1  # digits behind it decide nothing
    steps_K = torch.arange(first + 1, DIGITS + 1, dtype=torch.int32, device=row_bits.device)
    sums = row_bits[..., :, None] + column_bits[..., None, :]
    mixed = sums + (steps_K * DIGIT_STEP).view(-1, *[1] * sums.dim())
    for shift, factor in _FINALIZER:
        logical = mixed >> shift & (1 << 32 - shift) - 1  # torch shifts int32 with its sign
        mixed.bitwise_xor_(logical).mul_(factor)
    below = ~mixed[0]
    for digit, bits in enumerate(mixed[1:], first + 1):
        below = below | ~bits if threshold >> digit & 1 else below & ~bits
    return below


def keep_pairs(seed: Tensor, batch: int, heads: int, queries: int, keys: int, dropout: float
               ) -> Tensor:
    """Return the bool mask [B,H,Q,L] of kept pairs, on the device of `seed` [1]."""
    words = dropped_words(*random_bits(seed, batch, heads, queries, keys), dropout)
    shifts = torch.arange(WORD_KEYS, dtype=torch.int32, device=seed.device)
    return (words[..., None] >> shifts & 1 == 0).flatten(-2)[..., :keys]


def mark_dropped(probs: Tensor, words: Tensor, first: int, buffer: Tensor) -> None:
    """Give the dropped pairs of `probs` [...,Q,L], none below 0, a minus sign.

    words: [...,Q,W], of which the bit `first` is that of the first key. buffer: int32 [...,Q,32 W]
    to work in. Integer arithmetic throughout: on the CPU an operation on bools costs ten times as
    much.
    """
    shifts = torch.arange(WORD_KEYS - 1, -1, -1, dtype=torch.int32)
    marks = buffer.view(*words.shape, WORD_KEYS)
    torch.bitwise_left_shift(words[..., None], shifts, out=marks)
    marks = marks.flatten(-2)[..., first : first + probs.shape[-1]]
    if probs.dtype != torch.float32:
        marks = marks.bitwise_and_(-(1 << 31))  # 0.0 or -0.0
    torch.copysign(probs, marks.view(torch.float32).to(probs.dtype), out=probs)


def clear_dropped(tensor: Tensor, probs: Tensor, buffer: Tensor) -> None:
    """Set `tensor` to 0 at the pairs that `mark_dropped` marked in `probs`; `buffer` is alike."""
    integers, top_bit = _INTEGERS[probs.dtype.itemsize]
    kept = torch.bitwise_right_shift(probs.view(integers), top_bit, out=buffer.view(integers))
    tensor.view(integers).bitwise_and_(kept.bitwise_not_())


_FINALIZER = ((16, PAIR_MIX_1), (15, PAIR_MIX_2), (15, 1))
_INTEGERS = {2: (torch.int16, 15), 4: (torch.int32, 31), 8: (torch.int64, 63)}


# splitmix64's state for a seed before counter 0 is seed * STREAM_FACTOR + STREAM_TERM.
STREAM_FACTOR, STREAM_TERM = 0xD1342543DE82EF95, 0x2545F4914F6CDD1D


def _bits(seed: Tensor, counters: Tensor) -> Tensor:
    """Return splitmix64(seed, counter) cut to int32."""
    stream = seed * signed(STREAM_FACTOR) + STREAM_TERM
    bits = mix_tensor((counters + 1) * signed(GAMMA) + stream) & 0xFFFFFFFF
    return ((bits ^ (1 << 31)) - (1 << 31)).to(torch.int32)
