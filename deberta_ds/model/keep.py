"""Which elements dropout of hidden states keeps: a hash of their number and of two keys.

An element's word depends on nothing else, so a step is a function of (seed, step, rank), and
activation checkpointing replays it. The Triton kernels compute the same words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deberta_ds.base.splitmix import words_of_share

MIX_1, MIX_2 = 0x21F0AAAD, 0xD35A2D97
_WORDS = 1 << 32


@dataclass(frozen=True)
class Keep:
    """Which elements are kept, and by how much they grow: element i of any tensor."""

    key: int
    second_key: int
    threshold: int  # words below it are dropped

    @property
    def scale(self) -> float:
        return 1 / (1 - self.threshold / _WORDS)

    def signed(self) -> tuple[int, int, int]:
        """Return keys and threshold as int32 has them."""
        return _signed(self.key), _signed(self.second_key), _signed(self.threshold)

    def apply(self, hidden: Tensor) -> Tensor:
        """Return a tensor's elements, dropped or grown."""
        return (hidden * self.mask(hidden)) * self.scale

    def mask(self, like: Tensor) -> Tensor:
        """Return 0 or 1 for each element of a contiguous tensor, in its dtype."""
        words = torch.arange(like.numel(), dtype=torch.int32)
        words += _signed(self.key)
        shifted = _shift_right(words, 16)
        words.bitwise_xor_(shifted).mul_(_signed(MIX_1)).bitwise_xor_(_signed(self.second_key))
        words.bitwise_xor_(_shift_right(words, 15)).mul_(_signed(MIX_2))
        words.bitwise_xor_(_shift_right(words, 15))
        words.bitwise_xor_(-(1 << 31))  # unsigned order as signed order
        kept = words.ge_(_signed(self.threshold ^ (1 << 31)))
        return kept.view(like.shape).to(like.dtype)


def is_hashed(tensor: Tensor) -> bool:
    """Return whether torch's operators drop this tensor's elements by hash: on a CPU.

    Fake tensors do not count: the planner traces a GPU's memory with them.
    """
    return tensor.is_cpu and type(tensor) in (Tensor, nn.Parameter)


def draw_keep(dropout: float) -> Keep:
    """Return fresh keys from torch's CPU generator."""
    key, second_key = torch.randint(_WORDS, (2,)).tolist()
    return Keep(key, second_key, words_of_share(dropout))


def _signed(word: int) -> int:
    return word - _WORDS if word >= 1 << 31 else word


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Return the logical shift, which torch does not have for int32."""
    return (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)
