"""Attention dropout as a pure function of (seed, sequence, head, query, key).

Every path (reference, tiled, fused) and every recomputation under activation checkpointing must
drop the same pairs, whatever order or tile size it works in. So the mask is counter based: each
query and each key of a head has 32 random bits, and a pair is kept when a hash of the sum of both
is at least a threshold. No generator, no state.

Shape legend: B batch, H heads, Q queries, L keys.
"""

import torch

from deberta_ds.base.splitmix import GAMMA, MASK64, dropout_threshold, mix_tensor, signed

# Multipliers of the "lowbias32" finalizer, as signed numbers.
PAIR_MIX_1 = 0x21F0AAAD
PAIR_MIX_2 = 0xD35A2D97 - (1 << 32)


def drop_threshold(dropout: float) -> int:
    """Return the signed 32-bit threshold: pairs with a hash below it are dropped."""
    return dropout_threshold(dropout) - (1 << 31)


def dropout_bits(seed: int, batch: int, heads: int, queries: int, keys: int, device: torch.device
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 random bits of the queries [B,H,Q] and of the keys [B,H,L]."""
    heads_of_batch = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    rows = torch.arange(queries, device=device) + (heads_of_batch << 32)
    columns = torch.arange(keys, device=device) + (heads_of_batch << 32) + (1 << 31)
    return _bits(seed, rows), _bits(seed, columns)


def keep_pairs(row_bits: torch.Tensor, column_bits: torch.Tensor, threshold: int) -> torch.Tensor:
    """Return the bool mask [..., Q, L] of kept pairs for random bits [..., Q] and [..., L]."""
    return _mixed(row_bits, column_bits, None, None) >= threshold


def mark_dropped(probs: torch.Tensor, row_bits: torch.Tensor, column_bits: torch.Tensor,
                 threshold: int, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Give the dropped pairs of `probs` [..., Q, L], none below 0, a minus sign.

    buffers: two int32 tensors of that shape to work in. Integer arithmetic throughout: on the CPU
    an operation on bools costs ten times as much.
    """
    integers, top_bit = _INTEGERS[probs.dtype.itemsize]
    dropped = _mixed(row_bits, column_bits, *buffers).lt_(threshold)
    probs.view(integers).bitwise_or_(dropped.to(integers).bitwise_left_shift_(top_bit))


def clear_dropped(tensor: torch.Tensor, probs: torch.Tensor, buffer: torch.Tensor) -> None:
    """Set `tensor` to 0 at the pairs that `mark_dropped` marked in `probs`; `buffer` is alike."""
    integers, top_bit = _INTEGERS[probs.dtype.itemsize]
    kept = torch.bitwise_right_shift(probs.view(integers), top_bit, out=buffer.view(integers))
    tensor.view(integers).bitwise_and_(kept.bitwise_not_())


_INTEGERS = {2: (torch.int16, 15), 4: (torch.int32, 31), 8: (torch.int64, 63)}


def _mixed(row_bits, column_bits, mixed, shifted) -> torch.Tensor:
    """Return the hash [..., Q, L] of every pair, worked out in the two buffers if given."""
    # The shifts are arithmetic on purpose: int32 has no other in torch, and Triton agrees.
    mixed = torch.add(row_bits[..., :, None], column_bits[..., None, :], out=mixed)
    shifted = torch.bitwise_right_shift(mixed, 15, out=shifted)
    mixed.bitwise_xor_(shifted).mul_(PAIR_MIX_1)
    torch.bitwise_right_shift(mixed, 13, out=shifted)
    return mixed.bitwise_xor_(shifted).mul_(PAIR_MIX_2)


def bits_stream(seed: int) -> int:
    """Return splitmix64's state for a seed before counter 0, signed."""
    return signed((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & MASK64)


def _bits(seed: int, counters: torch.Tensor) -> torch.Tensor:
    """Return splitmix64(seed, counter) cut to int32."""
    bits = mix_tensor((counters + 1) * signed(GAMMA) + bits_stream(seed)) & 0xFFFFFFFF
    return ((bits ^ (1 << 31)) - (1 << 31)).to(torch.int32)
