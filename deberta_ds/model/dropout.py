"""Dropout of hidden states as a pure function of (seed, element), and its LayerNorm.

On a CPU torch draws dropout's numbers one by one: 6 to 14 ns an element, more than the matmuls of
a narrow network. Here an element's word is a hash (keep.py). On a GPU LayerNorm(dropout(x) + y)
drops by the same words in one kernel; dropout by itself is torch's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.model.keep import Keep, draw_keep, is_hashed
from deberta_ds.model.kernels import kernel_table


class Dropout(nn.Module):
    """nn.Dropout, on a CPU with `Keep`'s mask."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.share:
            return hidden
        if is_hashed(hidden):
            return draw_keep(self.share).apply(hidden)
        return F.dropout(hidden, self.share)


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
    """LayerNorm(dropout(update) + hidden).

    On a GPU it is one pass each way, and returned twice, for the block that follows and for what
    goes around that block: the two gradients are then added inside of the backward pass. Elsewhere
    the second is None.
    """

    def __init__(self, size: int, eps: float, dropout: float):
        super().__init__(size, eps=eps)
        self.dropout = dropout

    def forward(self, update: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        share = self.dropout if self.training else 0.0
        fused = fused_kernel("LayerNorm", update.dtype, hidden)
        if share and not (fused or is_hashed(update)):
            update, share = F.dropout(update, share), 0.0
        keep = draw_keep(share) if share else Keep(0, 0, 0)
        if fused is not None:
            return fused(update, hidden, self.weight, self.bias, self.eps, keep)
        if share:
            update = keep.apply(update)
        return super().forward(update + hidden), None


def fused_kernel(idea: str, update: torch.dtype, hidden: Tensor) -> Callable | None:
    """Return the kernel of "LayerNorm" or "GELU" for updates of a dtype; None: torch's operators.

    The result has the dtype of `hidden`: where torch's would be wider, its operators are taken.
    """
    if torch.jit.is_tracing():
        return None
    device, dtype = hidden.device, hidden.dtype
    if dtype != torch.float32 and (
            update != dtype or torch.is_autocast_enabled(device.type)):
        return None
    request = kernel_table.Request(device, update, hidden.shape[-1], dtype)
    return kernel_table.pick(idea, request).load()
