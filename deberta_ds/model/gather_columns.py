"""Gather hidden states at given columns, with a gradient that is the same in every run.

The gradient of `gather` adds with atomics on a GPU: in any order, and in the tensor's own dtype, so
that the states of many tokens which share one [CLS] lose two digits in bf16. Here it is a matmul
with a one-hot matrix: a fixed order, summed in fp32. A matrix of all columns would have L x M
elements, so long sequences take some columns at a time.

Legend: B batch, L length, N columns of one matmul, C hidden, M gathered columns.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_COLUMNS = 512  # of one matmul


def gather_columns(hidden_BLC: Tensor, columns_BM: Tensor) -> Tensor:
    """Return [B, M, C]: row m is the state at column columns_BM[b, m]; columns may repeat."""
    return _GatherColumns.apply(hidden_BLC, columns_BM)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_BLC: Tensor, columns_BM: Tensor) -> Tensor:
        ctx.save_for_backward(columns_BM)
        ctx.length = hidden_BLC.size(1)
        return hidden_BLC.gather(1, columns_BM.unsqueeze(-1).expand(-1, -1, hidden_BLC.size(-1)))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BMC: Tensor) -> tuple[Tensor, None]:
        (columns_BM,) = ctx.saved_tensors
        parts = []
        for columns_N in torch.arange(ctx.length, device=columns_BM.device).split(_COLUMNS):
            one_hot_BNM = columns_N[:, None] == columns_BM[:, None, :]
            parts.append(torch.bmm(one_hot_BNM.to(grad_BMC.dtype), grad_BMC))
        return torch.cat(parts, 1), None
