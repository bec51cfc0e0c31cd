"""Dropout of hidden states as a function of (seed, element); LayerNorm and GELU next to it.

On a CPU torch samples dropout masks one element at a time: 6 to 14 ns each, more than the matmuls
of a narrow network. Here the mask is a hash of the element's index and of two keys, so a
step is a function of (seed, step, rank), and activation checkpointing replays it. On a GPU one
kernel computes LayerNorm(dropout(x) + y) with the same mask; dropout by itself is torch's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.base.splitmix import dropout_threshold
from deberta_ds.model.kernels import kernel_table

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


class Dropout(nn.Module):
    """nn.Dropout; on a CPU with a `DropoutMask`."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.p:
            return hidden
        if is_hashed(hidden):
            return sample_dropout_mask(self.p).apply(hidden)
        return F.dropout(hidden, self.p)


class LinearGelu(nn.Linear):
    """GELU(linear(x)); on a GPU the bias is added where GELU is computed, one pass each way."""

    def forward(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        fused = fused_kernel("GELU", product or hidden.dtype, hidden)
        if fused is None:
            return F.gelu(super().forward(hidden))
        return fused(F.linear(hidden, self.weight), self.bias)


class ResidualNorm(nn.LayerNorm):
    """LayerNorm(dropout(sublayer output) + residual).

    On a GPU it is one pass each way, and the result is returned twice: one output feeds the next
    sublayer, the other its residual connection. The backward kernel adds their gradients. Elsewhere
    the second output is None.
    """

    def __init__(self, size: int, eps: float, dropout: float):
        super().__init__(size, eps=eps)
        self.dropout = dropout

    def forward(self, sublayer: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        p = self.dropout if self.training else 0.0
        fused = fused_kernel("LayerNorm", sublayer.dtype, hidden)
        if p and not (fused or is_hashed(sublayer)):
            sublayer, p = F.dropout(sublayer, p), 0.0
        mask = sample_dropout_mask(p) if p else DropoutMask(0, 0, 0)
        if fused is not None:
            return fused(sublayer, hidden, self.weight, self.bias, self.eps, mask)
        if p:
            sublayer = mask.apply(sublayer)
        return super().forward(sublayer + hidden), None


def fused_kernel(idea: str, sublayer: torch.dtype, hidden: Tensor) -> Callable | None:
    """Return the kernel of "LayerNorm" or "GELU" for a dtype; None: torch's operators.

    The result has the dtype of `hidden`: where torch's would be wider, its operators are taken.
    """
    if torch.jit.is_tracing():
        return None
    device, dtype = hidden.device, hidden.dtype
    if dtype != torch.float32 and (
            sublayer != dtype or torch.is_autocast_enabled(device.type)):
        return None
    request = kernel_table.Request(device, sublayer, hidden.shape[-1], dtype)
    return kernel_table.pick(idea, request).load()


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
