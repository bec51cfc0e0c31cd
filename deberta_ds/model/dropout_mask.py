"""The dropout mask of hidden states: a hash of the element's index and of two keys.

An element's random bits depend on nothing else, so a step is a function of (seed, step, rank), and
activation checkpointing replays it. The Triton kernels compute the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deberta_ds.base.splitmix import dropout_threshold

MIX_1, MIX_2 = 0x21F0AAAD, 0xD35A2D97
_VALUES = 1 << 32


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of any tensor are kept, by index; kept ones are multiplied by `scale`."""

    key: int
    second_key: int
    threshold: int  # elements with random bits below it are dropped

    @property
    def scale(self) -> float:
        return 1 / (1 - self.threshold / _VALUES)

    def signed(self) -> tuple[int, int, int]:
        """Return keys and threshold as int32 has them."""
        return _signed(self.key), _signed(self.second_key), _signed(self.threshold)

    def apply(self, hidden: Tensor) -> Tensor:
        """Return dropout(hidden)."""
        return (hidden * self.mask(hidden)) * self.scale

    def mask(self, like: Tensor) -> Tensor:
        """Return 0 or 1 for each element of a contiguous tensor, in its dtype."""
        bits = torch.arange(like.numel(), dtype=torch.int32)
        bits += _signed(self.key)
        shifted = _shift_right(bits, 16)
        bits.bitwise_xor_(shifted).mul_(_signed(MIX_1)).bitwise_xor_(_signed(self.second_key))
        bits.bitwise_xor_(_shift_right(bits, 15)).mul_(_signed(MIX_2))
        bits.bitwise_xor_(_shift_right(bits, 15))
        bits.bitwise_xor_(-(1 << 31))  # unsigned order as signed order
        kept = bits.ge_(_signed(self.threshold ^ (1 << 31)))
        return kept.view(like.shape).to(like.dtype)


def is_hashed(tensor: Tensor) -> bool:
    """Return whether torch's operators drop this tensor's elements by hash: on a CPU.

    Fake tensors do not count: the planner traces a GPU's memory with them.
    """
    return tensor.is_cpu and type(tensor) in (Tensor, nn.Parameter)


def sample_dropout_mask(dropout: float) -> DropoutMask:
    """Return fresh keys from torch's CPU generator."""
    key, second_key = torch.randint(_VALUES, (2,)).tolist()
    return DropoutMask(key, second_key, dropout_threshold(dropout))


def _signed(word: int) -> int:
    return word - _VALUES if word >= 1 << 31 else word


def _shift_right(values: Tensor, count: int) -> Tensor:
    """Return the logical shift, which torch does not have for int32."""
    return (values >> count).bitwise_and_((1 << (32 - count)) - 1)
