"""Linear maps that share inputs or weights, on a GPU: their gradients meet inside of products.

Queries, keys and values are maps of the same states, and the relative table goes through the
weights of queries and keys again. Autograd makes a gradient for each use and adds them up: a pass
over three tensors and a launch for every sum. Here a product adds to what the products before it
gave, which costs it nothing. It rounds where the sums would, after every product.

Not under ZeRO-3, which gathers a module's weights while that module runs and no longer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def obstacle(inputs: list[Tensor], maps: list[nn.Linear]) -> str:
    """Return why these maps cannot share products, or an empty string."""
    tensors = [*inputs, *(linear.weight for linear in maps)]
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return "no training"
    if torch.is_autocast_enabled(inputs[0].device.type):
        return "autocast"
    if any(hasattr(x, "ds_id") for x in tensors):
        return "ZeRO-3"
    return "several dtypes" if len({x.dtype for x in tensors}) > 1 else ""


def shared_products(inputs: list[Tensor], maps: list[nn.Linear], pairs: list[tuple[int, int]]
                    ) -> tuple[Tensor, ...]:
    """Return maps[m](inputs[i]) for every pair (i, m)."""
    weights, biases = [x.weight for x in maps], [x.bias for x in maps]
    return _Products.apply(len(inputs), pairs, *inputs, *weights, *biases)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, num_inputs, pairs, *tensors):
        ctx.pairs, ctx.num_inputs = pairs, num_inputs
        ctx.num_maps = (len(tensors) - num_inputs) // 2
        biases = tensors[num_inputs + ctx.num_maps:]
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(*tensors[:num_inputs + ctx.num_maps])
        ctx.set_materialize_grads(False)
        return tuple(F.linear(tensors[i], tensors[num_inputs + m], biases[m]) for i, m in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # once: a checkpointed tensor is there for one reading
        inputs, weights = saved[:ctx.num_inputs], saved[ctx.num_inputs:]
        wanted = ctx.needs_input_grad[2:]
        of_inputs: dict[int, Tensor] = {}
        of_weights: dict[int, Tensor] = {}
        of_biases: dict[int, Tensor] = {}
        for (i, m), grad in zip(ctx.pairs, grads, strict=True):
            if grad is None:
                continue
            grad_RC, input_RC = grad.flatten(0, -2), inputs[i].flatten(0, -2)
            if wanted[i]:
                _add_product(of_inputs, i, grad_RC, weights[m])
            if wanted[ctx.num_inputs + m]:
                _add_product(of_weights, m, grad_RC.t(), input_RC)
            if ctx.has_bias[m] and wanted[ctx.num_inputs + ctx.num_maps + m]:
                sums_C = grad_RC.sum(0)
                of_biases[m] = of_biases[m].add_(sums_C) if m in of_biases else sums_C
        of_inputs = {i: found.view(inputs[i].shape) for i, found in of_inputs.items()}
        maps = range(ctx.num_maps)
        return (None, None, *map(of_inputs.get, range(ctx.num_inputs)),
                *map(of_weights.get, maps), *map(of_biases.get, maps))


def _add_product(sums: dict[int, Tensor], number: int, left: Tensor, right: Tensor) -> None:
    """Add a product to sums[number], inside of the product if there is one already."""
    if number in sums:
        sums[number].addmm_(left, right)
    else:
        sums[number] = left @ right
