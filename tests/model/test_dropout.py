"""Dropout of hidden states on a CPU: its hash, its rate, and LayerNorm behind it in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deberta_ds.model.dropout import Dropout, DropoutMask, ResidualNorm, mask_of, pass_keys

HALF, SINGLE = torch.bfloat16, torch.float32


def distance(found, expected) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_an_element_is_kept_by_the_hash_of_its_number():
    """The hash written out in numpy; checkpoints of a run are replayed with these elements."""
    keys = (4_123_456_789, 4_000_000_000)
    keep = DropoutMask(torch.tensor(keys), round(0.3 * 2**32))
    words = np.arange(5000, dtype=np.uint32) + np.uint32(keys[0])
    words ^= words >> np.uint32(16)
    words = words * np.uint32(0x21F0AAAD) ^ np.uint32(keys[1])
    words ^= words >> np.uint32(15)
    words *= np.uint32(0xD35A2D97)
    words ^= words >> np.uint32(15)
    mask = keep.mask(torch.empty(50, 100))
    assert np.array_equal(mask.numpy().ravel(), words >= keep.threshold)
    hidden = torch.randn(50, 100)
    assert torch.equal(keep.apply(hidden), hidden * mask * keep.scale)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_keeps_its_share_and_the_mean(share):
    torch.manual_seed(0)
    layer, ones = Dropout(share).train(), torch.ones(1000, 1000)
    keys = pass_keys(2, ones.device)
    dropped = layer(ones, keys[0])
    assert ((dropped == 0).float().mean() - share).abs() < 2e-3
    assert (dropped.mean() - 1).abs() < 3e-3
    # columns and rows are dropped independently of each other, and of the next draw
    kept, again = (dropped > 0).float(), (layer(ones, keys[1]) > 0).float()
    for other in (kept.roll(1, 1), kept.roll(1, 0), kept.roll(4, 1), again):
        both = (kept * other).mean()
        assert (both - (1 - share) ** 2).abs() < 2e-3
    assert layer.eval()(ones, None) is ones


@pytest.mark.parametrize("dropout", [1 - 1e-10, 1 - 1e-12, 1 - 2**-53])
def test_a_rate_just_below_one_drops_nearly_all(dropout):
    keep = mask_of(dropout, torch.tensor([1, 2]))
    assert 2.0**31 < keep.scale <= 2.0**32
    assert not keep.apply(torch.ones(1000)).isnan().any()


@pytest.mark.parametrize("kinds, within", [((SINGLE, SINGLE), 5e-7), ((HALF, SINGLE), 6e-3)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_residual_norm_is_the_formula(kinds, within, dropout):
    """Result and all gradients, of an update and a state of these types."""
    rows, size = 129, 1000
    torch.manual_seed(rows)
    update, hidden = (torch.randn(rows, size).to(kind) for kind in kinds)
    out_grad = torch.randn(rows, size).to(kinds[1])
    norm = ResidualNorm(size, 1e-7, dropout).train()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    leaves = [update.requires_grad_(), hidden.requires_grad_(), norm.weight, norm.bias]
    key = torch.tensor([5, 6])
    found, again = norm(update, hidden, key)
    assert again is None
    gradients = torch.autograd.grad(found, leaves, out_grad)
    grown = torch.ones(rows, size).double()
    if dropout:
        keep = mask_of(dropout, key)
        grown = keep.mask(grown.float()).double() * keep.scale
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    total = exact_leaves[0] * grown + exact_leaves[1]
    exact = F.layer_norm(total, (size,), *exact_leaves[2:], 1e-7)
    assert distance(found, exact) < within
    expected = torch.autograd.grad(exact, exact_leaves, out_grad.double())
    for mine, right in zip(gradients, expected, strict=True):
        assert distance(mine, right) < within
