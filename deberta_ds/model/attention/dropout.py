"""Attention dropout as a pure function of (seed, plane, query, key).

Every path (reference, tiled, fused) and every recomputation under activation checkpointing must
drop the same pairs, whatever order or tile size it works in. So the mask is counter based: each
query row and each key column of a plane (one head of one batch row) owns a random 32-bit word, and
a pair is kept when the mixed sum of its two words is above a threshold. No generator, no state.

Shape legend: B batch, H heads, Q queries, L keys.
"""

import torch

from deberta_ds.base.splitmix import GAMMA, MASK64, mix_tensor, signed, words_of_share

# Multipliers of the "lowbias32" finalizer, as signed numbers.
PAIR_MIX_1 = 0x21F0AAAD
PAIR_MIX_2 = 0xD35A2D97 - (1 << 32)


def drop_threshold(dropout: float) -> int:
    """Return the signed 32-bit threshold below which a mixed word means "dropped"."""
    return words_of_share(dropout) - (1 << 31)


def dropout_words(
    seed: int, batch: int, heads: int, queries: int, keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 words of the query rows [B,H,Q] and of the key columns [B,H,L]."""
    planes = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    rows = torch.arange(queries, device=device) + (planes << 32)
    columns = torch.arange(keys, device=device) + (planes << 32) + (1 << 31)
    return _words(seed, rows), _words(seed, columns)


def keep_pairs(
    row_words: torch.Tensor, column_words: torch.Tensor, threshold: int
) -> torch.Tensor:
    """Return the bool mask [..., Q, L] of kept pairs for words [..., Q] and [..., L]."""
    return _mixed(row_words, column_words, None, None) >= threshold


def mark_dropped(
    probs: torch.Tensor,
    row_words: torch.Tensor,
    column_words: torch.Tensor,
    threshold: int,
    buffers: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Give the dropped pairs of `probs` [..., Q, L], none below 0, a minus sign.

    buffers: two int32 tensors of that shape to work in. Integer arithmetic throughout: on the CPU
    an operation on bools costs ten times as much.
    """
    integers, top_bit = _INTEGERS[probs.dtype.itemsize]
    dropped = _mixed(row_words, column_words, *buffers).lt_(threshold)
    probs.view(integers).bitwise_or_(dropped.to(integers).bitwise_left_shift_(top_bit))


def clear_dropped(tensor: torch.Tensor, probs: torch.Tensor, buffer: torch.Tensor) -> None:
    """Set `tensor` to 0 at the pairs that `mark_dropped` marked in `probs`; `buffer` is alike."""
    integers, top_bit = _INTEGERS[probs.dtype.itemsize]
    kept = torch.bitwise_right_shift(probs.view(integers), top_bit, out=buffer.view(integers))
    tensor.view(integers).bitwise_and_(kept.bitwise_not_())


_INTEGERS = {2: (torch.int16, 15), 4: (torch.int32, 31), 8: (torch.int64, 63)}


def _mixed(row_words, column_words, mixed, shifted) -> torch.Tensor:
    """Return the mixed word [..., Q, L] of every pair, worked out in the two buffers if given."""
    # The shifts are arithmetic on purpose: int32 has no other in torch, and Triton agrees.
    mixed = torch.add(row_words[..., :, None], column_words[..., None, :], out=mixed)
    shifted = torch.bitwise_right_shift(mixed, 15, out=shifted)
    mixed.bitwise_xor_(shifted).mul_(PAIR_MIX_1)
    torch.bitwise_right_shift(mixed, 13, out=shifted)
    return mixed.bitwise_xor_(shifted).mul_(PAIR_MIX_2)


def word_stream(seed: int) -> int:
    """Return where the words of a seed begin: splitmix64's state before counter 0, signed."""
    return signed((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & MASK64)


def _words(seed: int, counters: torch.Tensor) -> torch.Tensor:
    """Return splitmix64(seed, counter) cut to int32."""
    words = mix_tensor((counters + 1) * signed(GAMMA) + word_stream(seed)) & 0xFFFFFFFF
    return ((words ^ (1 << 31)) - (1 << 31)).to(torch.int32)
