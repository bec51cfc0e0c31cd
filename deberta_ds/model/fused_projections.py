"""Projections as one autograd function, on a GPU: of queries, keys, values and positions at once.

Queries, keys and values are projections of the same states, and the relative table is projected by
the weights of queries and keys again. Autograd computes a gradient per use and adds them: a pass
over three tensors and a launch for every sum. Here each matmul of the backward pass adds to the
result of the one before (addmm), at no cost. It rounds where the sums would, after every matmul.
The gradient of a bias is a sum of columns, which one kernel takes for all of them.

Not under ZeRO-3, which gathers a module's weights while that module runs and no longer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deberta_ds.model import choose


def find(inputs: list[Tensor], linears: list[nn.Linear]) -> Callable | None:
    """Return `fused_projections` where it runs, or None."""
    first = inputs[0]
    return choose.find("projections", "auto", first.device, (first.dtype,), first.shape[-1], (),
                       obstacle(inputs, linears))[1]


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return linear(x)."""
    fused = find([x], [linear])
    return linear(x) if fused is None else fused([x], [linear], [(0, 0)])[0]


def obstacle(inputs: list[Tensor], linears: list[nn.Linear]) -> str:
    """Return why these projections cannot be fused, or an empty string."""
    # Asked for outside of its module, ZeRO-3 gathers a weight with the module around it, which
    # then keeps it for all its uses: fewer bytes are sent.
    tensors = [*inputs, *(x.weight for x in linears)]
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return "no training"
    if torch.is_autocast_enabled(inputs[0].device.type):
        return "autocast"
    if any(hasattr(x, "ds_id") for x in tensors):
        return "ZeRO-3"
    return "several dtypes" if len({x.dtype for x in tensors}) > 1 else ""


def fused_projections(inputs: list[Tensor], linears: list[nn.Linear], pairs: list[tuple[int, int]]
                    ) -> tuple[Tensor, ...]:
    """Return linears[m](inputs[i]) for every pair (i, m)."""
    weights, biases = [x.weight for x in linears], [x.bias for x in linears]
    return _FusedProjections.apply(len(inputs), pairs, *inputs, *weights, *biases)


class _FusedProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, num_inputs, pairs, *tensors):
        ctx.pairs, ctx.num_inputs = pairs, num_inputs
        ctx.num_linears = (len(tensors) - num_inputs) // 2
        biases = tensors[num_inputs + ctx.num_linears:]
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(*tensors[:num_inputs + ctx.num_linears])
        ctx.set_materialize_grads(False)
        return tuple(F.linear(tensors[i], tensors[num_inputs + m], biases[m]) for i, m in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # once: a checkpointed tensor is there for one reading
        inputs, weights = saved[:ctx.num_inputs], saved[ctx.num_inputs:]
        wanted = ctx.needs_input_grad[2:]
        input_grads: dict[int, Tensor] = {}
        weight_grads: dict[int, Tensor] = {}
        bias_grads: dict[int, Tensor] = {}
        for (i, m), grad in zip(ctx.pairs, grads, strict=True):
            if grad is None:
                continue
            grad_RC, input_RC = grad.flatten(0, -2), inputs[i].flatten(0, -2)
            if wanted[i]:
                _add_matmul(input_grads, i, grad_RC, weights[m])
            if wanted[ctx.num_inputs + m]:
                _add_matmul(weight_grads, m, grad_RC.t(), input_RC)
            if ctx.has_bias[m] and wanted[ctx.num_inputs + ctx.num_linears + m]:
                sums_C = _column_sums(grad_RC)
                bias_grads[m] = bias_grads[m].add_(sums_C) if m in bias_grads else sums_C
        input_grads = {i: found.view(inputs[i].shape) for i, found in input_grads.items()}
        linears = range(ctx.num_linears)
        return (None, None, *map(input_grads.get, range(ctx.num_inputs)),
                *map(weight_grads.get, linears), *map(bias_grads.get, linears))


def _add_matmul(sums: dict[int, Tensor], number: int, left: Tensor, right: Tensor) -> None:
    """Add left @ right to sums[number], by addmm if it is there already."""
    if number in sums:
        sums[number].addmm_(left, right)
    else:
        sums[number] = left @ right


def _column_sums(grad_RC: Tensor) -> Tensor:
    """Return the sums of columns."""
    rows, size = grad_RC.shape
    # Dropout's kernel is of the same file, and in the same check.
    if rows and choose.find("dropout", "auto", grad_RC.device, (grad_RC.dtype,) * 2, size)[1]:
        from deberta_ds.model.kernels.fused_norm import column_sums

        return column_sums(grad_RC.contiguous())
    return grad_RC.sum(0)
