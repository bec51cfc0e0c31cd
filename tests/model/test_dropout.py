"""Dropout: its hash, rate, seeds and places, and LayerNorm behind it in float64."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import FAMILIES, random_values

from deberta_ds.engine.passes import seed_pass
from deberta_ds.model import dropout, encoder
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.dropout import Dropout, DropoutMask, ResidualNorm, mask_of, pass_keys
from deberta_ds.model.encoder import ACTIVATIONS, Convolution
from deberta_ds.training.step import seed_of

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


HIDDEN, PAIRS = 0.25, 0.125
CONFIG = dataclasses.replace(FAMILIES["v2_conv"], hidden_dropout=HIDDEN, attention_dropout=PAIRS)


def test_every_place_of_dropout_has_its_rate_in_training_and_none_in_evaluation(monkeypatch):
    rates, mask_of = [], dropout.mask_of
    monkeypatch.setattr(dropout, "mask_of", lambda rate, key: (
        rates.append(rate) if rate else None, mask_of(rate, key))[1])
    for name, function in (("attend", encoder.attend), ("attend_cls", encoder.attend_cls)):
        monkeypatch.setattr(encoder, name, lambda *tensors, function=function, **options: (
            rates.append(("pairs", options["dropout"])) or function(*tensors, **options)))
    model, ids = random_values(Backbone(CONFIG)), torch.arange(40).view(2, 20)
    model.train()(ids, torch.ones_like(ids))
    # The input and the convolution; in each layer the relative table and behind both sublayers.
    assert Counter(rates) == {HIDDEN: 2 + 3 * CONFIG.num_layers, ("pairs", PAIRS): 3}
    rates.clear()
    model.trunk.encode(torch.randn(2, 20, 48), torch.ones_like(ids), cls_only=True)
    assert Counter(rates) == {HIDDEN: 2 + 3 * CONFIG.num_layers, ("pairs", PAIRS): 3}
    plain = Backbone(FAMILIES["v2_conv"]).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, torch.ones_like(ids)),
                           plain(ids, torch.ones_like(ids)))


def test_the_convolution_drops_before_its_activation():
    layer, hidden = random_values(Convolution(CONFIG)).train(), torch.randn(2, 9, 48)
    key = torch.tensor([3, 4])
    found = layer(hidden, hidden + 1, torch.ones(2, 9), key)
    convolved = F.conv1d(hidden.mT, layer.weight, layer.bias, padding=1).mT.contiguous()
    dropped = dropout.mask_of(HIDDEN, key).apply(convolved)
    wanted = layer.norm(hidden + 1 + ACTIVATIONS[CONFIG.conv_activation](dropped))
    torch.testing.assert_close(found, wanted)
    padded = layer.eval()(hidden, hidden + 1, torch.tensor([[1] * 7 + [0] * 2] * 2), None)
    assert padded.any(-1).tolist() == [[True] * 7 + [False] * 2] * 2


def test_random_bits_at_the_threshold_are_kept():
    zeros = torch.zeros(2, dtype=torch.int64)
    assert DropoutMask(zeros, 0).mask(torch.empty(1)).tolist() == [1.0]  # whose bits are all 0


def test_no_two_passes_have_the_same_dropout():
    seeds = set()
    for place in ((1, 2, 3, 4), (9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9)):
        seeds.add(seed_of(*place))
        with seed_pass(torch.device("cpu"), seed_of(*place)):
            seeds.add(tuple(torch.stack(pass_keys(1, torch.device("cpu"))).flatten().tolist()))
            assert torch.initial_seed() in seeds  # for heads and code of one's own
    assert len(seeds) == 10
