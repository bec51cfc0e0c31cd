"""Dropout of hidden states as a function of (seed, place, element); LayerNorm and GELU next to it.

A mask is a hash of the element's index and of two keys. All places of a network get their keys at
once, on the device, from one number: a step is a function of (seed, step, rank), activation
checkpointing replays it, a CUDA graph reads new keys in each replay, and every device drops the
same elements. (On a CPU torch samples dropout masks one element at a time: 6 to 14 ns each, more
than the matmuls of a narrow network.) On a GPU one kernel computes LayerNorm(dropout(x) + y).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.base.splitmix import GAMMA, dropout_threshold, mix_tensor, signed
from deberta_ds.model import choose
from deberta_ds.model.precision import matmul_dtype

MIX_1, MIX_2 = 0x21F0AAAD, 0xD35A2D97
_VALUES = 1 << 32
_MOST_KEYS = 1 << 20  # of a pass


class _Passes:
    """Where the keys of passes through networks come from."""

    seed: Tensor | None = None  # int64 [1]; None: torch's CPU generator gives each pass its own
    count = 0  # passes since the seed was set


@contextmanager
def seeded(seed: Tensor | None) -> Iterator[None]:
    """Make dropout inside a function of `seed`, int64 [1] on the device, and the number of the pass
    through a network. A CUDA graph that is captured inside reads `seed` again in each replay.
    """
    before = _Passes.seed, _Passes.count
    _Passes.seed, _Passes.count = seed, 0
    try:
        yield
    finally:
        _Passes.seed, _Passes.count = before


def pass_keys(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return `count` keys, int64 [2] each, for one pass through a network."""
    seed, first = _Passes.seed, 1
    if seed is None:
        seed = torch.randint(2**62, (1,)).to(device)
    else:
        first += _Passes.count * _MOST_KEYS
        _Passes.count += 1
    counters = torch.arange(first, first + 2 * count, device=device)
    # Two words are 16 bytes: Triton compiles another binary for a pointer that is not aligned.
    return mix_tensor(counters * signed(GAMMA) + seed).view(count, 2).unbind()


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of any tensor are kept, by index; kept ones are multiplied by `scale`."""

    key: Tensor  # int64 [2] on the device, of which the lower 32 bits count
    threshold: int  # elements with random bits below it are dropped

    @property
    def scale(self) -> float:
        """Factor of the elements that stay."""
        return 1 / (1 - self.threshold / _VALUES)

    @property
    def signed_threshold(self) -> int:
        """The threshold as int32 has it."""
        return _signed(self.threshold)

    def apply(self, hidden: Tensor) -> Tensor:
        """Return dropout(hidden)."""
        return (hidden * self.mask(hidden)) * self.scale

    def mask(self, like: Tensor) -> Tensor:
        """Return 0 or 1 for each element of a contiguous tensor, in its dtype."""
        key, second_key = self.key.to(torch.int32).split(1)
        bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
        bits += key
        shifted = _shift_right(bits, 16)
        bits.bitwise_xor_(shifted).mul_(_signed(MIX_1)).bitwise_xor_(second_key)
        bits.bitwise_xor_(_shift_right(bits, 15)).mul_(_signed(MIX_2))
        bits.bitwise_xor_(_shift_right(bits, 15))
        bits.bitwise_xor_(-(1 << 31))  # unsigned order as signed order
        kept = bits.ge_(_signed(self.threshold ^ (1 << 31)))
        return kept.view(like.shape).to(like.dtype)


def mask_of(dropout: float, key: Tensor | None) -> DropoutMask | None:
    """Return the mask of a place that drops this share; None without dropout."""
    if not dropout:
        return None
    assert key is not None, "dropout in training needs a key (pass_keys)"
    return DropoutMask(key, dropout_threshold(dropout))


class Dropout(nn.Module):
    """nn.Dropout by a `DropoutMask`."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """Return dropout(hidden); `key`, int64 [2], is needed in training."""
        mask = mask_of(self.p if self.training else 0.0, key)
        if mask is None:
            return hidden
        fused = choose.find("dropout", "auto", hidden.device, (hidden.dtype,) * 2,
                            hidden.shape[-1])[1]
        return mask.apply(hidden) if fused is None else fused(hidden, mask)


class LinearGelu(nn.Linear):
    """GELU(linear(x)); on a GPU the bias is added where GELU is computed, one pass each way."""

    def forward(self, hidden: Tensor) -> Tensor:
        fused = fused_kernel("GELU", matmul_dtype(hidden), hidden)
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

    def forward(self, sublayer: Tensor, hidden: Tensor, key: Tensor | None = None
                ) -> tuple[Tensor, Tensor | None]:
        """`key`, int64 [2], is needed in training with dropout."""
        mask = mask_of(self.dropout if self.training else 0.0, key)
        fused = fused_kernel("LayerNorm", sublayer.dtype, hidden)
        if fused is not None:
            return fused(sublayer, hidden, self.weight, self.bias, self.eps, mask)
        if mask is not None:
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
    return choose.find(idea, "auto", device, (sublayer, dtype), hidden.shape[-1])[1]


def _signed(word: int) -> int:
    return word - _VALUES if word >= 1 << 31 else word


def _shift_right(values: Tensor, count: int) -> Tensor:
    """Return the logical shift, which torch does not have for int32."""
    return (values >> count).bitwise_and_((1 << (32 - count)) - 1)
