"""Linear maps of shared inputs: autograd's numbers, without its sums."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deberta_ds.model.fused_projections import fused_projections, obstacle

PAIRS = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 0)]


def make(dtype, bias=True):
    generator = torch.Generator().manual_seed(4)
    maps = [nn.Linear(12, 8, bias=bias or n == 2).to(dtype) for n in range(3)]
    for parameter in nn.ModuleList(maps).parameters():
        nn.init.normal_(parameter, generator=generator)
    inputs = [torch.randn(*shape, 12, generator=generator, dtype=torch.float64)
              for shape in ((3, 7), (5,))]
    return [x.to(dtype).requires_grad_() for x in inputs], maps


def gradients(outputs, leaves, dtype):
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
             for x in outputs]
    return torch.autograd.grad(outputs, leaves, grads)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_autograd(bias):
    inputs, maps = make(torch.float64, bias)
    leaves = [*inputs, *nn.ModuleList(maps).parameters()]
    plain = [maps[m](inputs[i]) for i, m in PAIRS]
    ours = fused_projections(inputs, maps, PAIRS)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    for a, b in zip(gradients(ours, leaves, torch.float64),
                    gradients(plain, leaves, torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bf16_gradients_are_as_near_as_those_of_autograd():
    inputs, maps = make(torch.bfloat16)
    leaves = [*inputs, *nn.ModuleList(maps).parameters()]
    ours = gradients(fused_projections(inputs, maps, PAIRS), leaves, torch.bfloat16)
    inputs, maps = ([x.detach().double().requires_grad_() for x in inputs],
                    [x.double() for x in maps])
    leaves = [*inputs, *nn.ModuleList(maps).parameters()]
    right = gradients([maps[m](inputs[i]) for i, m in PAIRS], leaves, torch.double)
    for a, b in zip(ours, right, strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()


def test_unused_results_and_frozen_weights_need_no_gradient():
    inputs, maps = make(torch.float64)
    maps[0].requires_grad_(False)
    inputs[1] = inputs[1].detach()
    _, keys, _, table, _ = fused_projections(inputs, maps, PAIRS)
    (keys.sum() + table.sum()).backward()
    assert maps[0].weight.grad is None and maps[2].weight.grad is None
    assert maps[1].bias.grad.tolist() == [26.0] * 8 and inputs[0].grad is not None


def test_only_one_dtype_in_training_takes_them():
    inputs, maps = make(torch.float32)
    assert obstacle(inputs, maps) == ""
    assert obstacle([inputs[0].bfloat16(), inputs[1]], maps) == "several dtypes"
    with torch.autocast("cpu"):
        assert obstacle(inputs, maps) == "autocast"
    with torch.no_grad():
        assert obstacle(inputs, maps) == "no training"
    maps[1].weight.ds_id = 3  # ZeRO-3: not there unless its module runs
    assert obstacle(inputs, maps) == "ZeRO-3"


def test_recomputed_layers_give_the_same_gradients():
    def run(recompute):
        inputs, maps = make(torch.float64)

        def forward(first, second):
            return sum(x.square().sum() for x in fused_projections([first, second], maps, PAIRS))

        loss = checkpoint(forward, *inputs, use_reentrant=False) if recompute else forward(*inputs)
        return torch.autograd.grad(loss, [*inputs, *nn.ModuleList(maps).parameters()])

    assert all(map(torch.equal, run(True), run(False)))
