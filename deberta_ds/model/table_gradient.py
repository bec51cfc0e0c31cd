"""The gradient of a word table that is looked up and predicts words, summed in one tensor.

Autograd would make one gradient of the table's size for each use, of which the look-up's is nearly
all zeros, and add them. On a CPU that is most of what the table costs: fresh pages, filled and read
again. So the prediction, whose backward pass comes first, leaves its gradient for the look-up's.
A look-up without a prediction takes its zeros from memory that is kept (`kept_memory`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds import kept_memory, native


class TableGradient:
    """What the prediction, if there is one, leaves for the look-up of the same forward pass.

    The look-up's vectors must lead to the prediction, or the gradient is lost.
    """

    def __init__(self) -> None:
        self._sum_VC: Tensor | None = None

    @staticmethod
    def serves(weight_VC: Tensor) -> bool:
        """Return whether sums into one tensor are exact and cheap: not in 16 bits or on a GPU."""
        wide = weight_VC.dtype.itemsize >= 4
        learns = weight_VC.requires_grad and torch.is_grad_enabled()
        return (wide and learns and native.is_here(weight_VC) and not torch.jit.is_tracing()
                and not torch.compiler.is_compiling())

    def leave(self, sum_VC: Tensor) -> None:
        self._sum_VC = sum_VC

    def take(self, weight_VC: Tensor) -> Tensor:
        """Return what was left, or zeros."""
        sum_VC, self._sum_VC = self._sum_VC, None
        return kept_memory.empty_like(weight_VC).zero_() if sum_VC is None else sum_VC


def look_up(weight_VC: Tensor, ids: Tensor, gradient: TableGradient) -> Tensor:
    """Return rows [..., C] of the table for ids; the table's gradient adds to what was left."""
    return _LookUp.apply(weight_VC, ids, gradient)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VC, ids, gradient):
        ctx.save_for_backward(weight_VC, ids)
        ctx.gradient = gradient
        return F.embedding(ids, weight_VC)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight_VC, ids = ctx.saved_tensors
        sum_VC = ctx.gradient.take(weight_VC)
        sum_VC.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(sum_VC.dtype))
        return sum_VC, None, None
