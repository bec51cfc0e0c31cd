"""Dropout of hidden states as a pure function of (seed, element), and its LayerNorm.

On a CPU torch draws dropout's numbers one by one: 6 to 14 ns an element, more than the products of
a narrow network. Here an element's word is a hash (keep.py). On a GPU LayerNorm(dropout(x) + y)
drops by the same words in one kernel; dropout by itself is torch's.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deberta_ds import native
from deberta_ds.model import elementwise
from deberta_ds.model.keep import Keep, draw_keep


class Dropout(nn.Module):
    """nn.Dropout, on a CPU with `Keep`'s mask."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.share:
            return hidden
        if not native.is_here(hidden):
            return F.dropout(hidden, self.share)
        return draw_keep(self.share).apply(hidden)


class LinearGelu(nn.Linear):
    """GELU(linear(x)); on a GPU the bias is added where GELU is computed, one pass each way."""

    def forward(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        fused = elementwise.kernels(product or hidden.dtype, hidden)
        if fused is None:
            return F.gelu(super().forward(hidden))
        return fused.biased_gelu(F.linear(hidden, self.weight), self.bias)


class ResidualNorm(nn.LayerNorm):
    """LayerNorm(dropout(update) + hidden), in one pass each way.

    On a GPU it is returned twice, for the block that follows and for what goes around that block:
    the two gradients are then added inside of the backward pass. Elsewhere the second is None.
    """

    def __init__(self, size: int, eps: float, dropout: float):
        super().__init__(size, eps=eps)
        self.dropout = dropout

    def forward(self, update: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        share = self.dropout if self.training else 0.0
        fused = elementwise.kernels(update.dtype, hidden)
        if share and not (fused or native.is_here(update)):
            update, share = F.dropout(update, share), 0.0
        keep = draw_keep(share) if share else Keep(0, 0, 0)
        if fused is not None:
            return fused.residual_norm(update, hidden, self.weight, self.bias, self.eps, keep)
        if not (self.training and self._is_native(update, hidden)):
            if share:
                update = keep.apply(update)
            out = super().forward(update + hidden)
        else:
            out = _ResidualNorm.apply(update.contiguous(), hidden.contiguous(), self.weight,
                                      self.bias, self.eps, keep)
        return out, None

    @staticmethod
    def _is_native(update: Tensor, hidden: Tensor) -> bool:
        if not native.takes(update, hidden):
            return False
        # torch's sum would be wider than `hidden`, and autocast's norm wider than both.
        wide = hidden.dtype == torch.float32
        return wide or (update.dtype == hidden.dtype and not torch.is_autocast_enabled("cpu"))


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, update, hidden, weight_C, bias_C, eps, keep):
        size = hidden.shape[-1]
        rows = hidden.numel() // size
        total, out = torch.empty_like(hidden), torch.empty_like(hidden)
        statistics = torch.empty(rows, 2)
        tensors = (update, hidden, weight_C.float(), bias_C.float(), total, out, statistics)
        kernel, places = native.library().residual_norm, [native.address(t) for t in tensors]
        rest = (*_settings(keep), update.dtype != torch.float32, hidden.dtype != torch.float32)

        def work(first: int, last: int, _part: int) -> None:
            kernel(ctypes.c_long(first), ctypes.c_long(last), *places, ctypes.c_long(size),
                   ctypes.c_float(eps), *rest)

        native.over_rows(rows, work)
        ctx.save_for_backward(total, statistics, weight_C)
        ctx.keep, ctx.update_dtype, ctx.bias_dtype = keep, update.dtype, bias_C.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, out_grad):
        total, statistics, weight_C = ctx.saved_tensors
        size = total.shape[-1]
        rows = total.numel() // size
        out_grad = out_grad.to(total.dtype).contiguous()
        update_grad = torch.empty_like(total, dtype=ctx.update_dtype)
        hidden_grad = torch.empty_like(total)
        sums = torch.zeros(native.parts_of(rows), 4, size)
        tensors = (out_grad, total, statistics, weight_C.float(), update_grad, hidden_grad)
        kernel = native.library().residual_norm_gradients
        places = [native.address(t) for t in tensors]
        halves = (ctx.update_dtype != torch.float32, total.dtype != torch.float32)
        rest = (*_settings(ctx.keep), *halves)

        def work(first: int, last: int, part: int) -> None:
            kernel(ctypes.c_long(first), ctypes.c_long(last), *places, native.address(sums[part]),
                   ctypes.c_long(size), *rest)

        native.over_rows(rows, work)
        weight_grad, bias_grad = sums.sum(0)[:2]
        return (update_grad, hidden_grad, weight_grad.to(weight_C.dtype),
                bias_grad.to(ctx.bias_dtype), None, None)


def _settings(keep: Keep) -> tuple:
    return (ctypes.c_uint32(keep.key), ctypes.c_uint32(keep.second_key),
            ctypes.c_uint32(keep.threshold), ctypes.c_float(keep.scale))
