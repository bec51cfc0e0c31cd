"""Clipping each network by its own norm, also where DeepSpeed's calls come in another order."""

import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage1And2

from deberta_ds.engine import clipping
from deberta_ds.engine.clipping import _clip, check_all_at_once, clip_networks_apart

LARGEST = 2.0


def test_each_network_is_clipped_by_its_own_norm():
    generator = torch.Generator().manual_seed(0)
    true = [torch.randn(count, generator=generator) for count in (50, 70, 3, 30)]
    networks = ["", "d", "small", ""]
    clipped = [gradient.clone() for gradient in true]
    norm = _clip([[gradient, None] for gradient in clipped], networks, LARGEST)
    assert norm.item() == pytest.approx(torch.cat(true).double().norm().item(), rel=1e-6)
    for gradient, found, network in zip(true, clipped, networks, strict=True):
        own = torch.cat([x for x, name in zip(true, networks, strict=True) if name == network])
        wanted = gradient * min(1.0, LARGEST / own.norm().item())
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert torch.cat([true[2]]).norm() < LARGEST < true[1].norm()  # both sides of the limit


def test_a_norm_that_is_not_finite_leaves_no_finite_gradient_of_its_network():
    bad, good = torch.tensor([float("inf"), 1.0]), torch.ones(2)
    _clip([[bad], [good]], ["", "d"], 8.0)
    assert not bad.isfinite().any() and good.tolist() == [1.0, 1.0]
    gradients = [torch.tensor([3e38]), torch.tensor([3e38])]  # whose norm only fp64 holds
    _clip([gradients], [""], 1.0)
    assert torch.cat(gradients).tolist() == pytest.approx([0.5**0.5] * 2)


class DeepSpeedZeroOptimizer_Stage3:  # noqa: N801  DeepSpeed's name
    """Its calls of a step: groups are measured, then scaled by the norm that is passed."""

    def __init__(self):
        self.fp16_groups = [["a"], ["b"], ["c"]]
        self.sub_group_to_group_id = {0: 0, 1: 1, 2: 2}
        self.optimizer = SimpleNamespace(param_groups=[{}, {"network": "d"}, {}])
        self.used = {}

    def get_grad_norm_direct(self, gradients, parameters):
        return torch.tensor(gradients)

    def complete_grad_norm_calculation_for_cpu_offload(self, parameters):
        raise NotImplementedError

    def unscale_and_clip_grads(self, group, norm):
        self.used[group] = norm.item()

    def measure(self, *groups):
        for group in groups:
            self.get_grad_norm_direct([3.0, 7.0, 4.0][group], self.fp16_groups[group])

    def scale(self, *groups):
        self.used.clear()
        for group in groups:
            self.unscale_and_clip_grads(group, torch.tensor(99.0))
        return self.used


def clip_apart(optimizer):
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    clip_networks_apart(SimpleNamespace(optimizer=optimizer, gradient_clipping=lambda: LARGEST),
                        [group.get("network", "") for group in groups])


@pytest.fixture
def optimizer():
    found = DeepSpeedZeroOptimizer_Stage3()
    clip_apart(found)
    return found


def test_norms_follow_their_groups_in_any_order_and_after_a_step_without_update(optimizer):
    right = {0: 5.0, 1: 7.0, 2: 5.0}
    for measured, scaled in (((0, 1, 2), (0, 1, 2)), ((2, 0, 1), (1, 2, 0))):
        optimizer.measure(*measured)
        assert optimizer.scale(*scaled) == right
    optimizer.measure(0, 1, 2)  # not finite: no update
    optimizer.measure(0, 1, 2)
    assert optimizer.scale(0, 1, 2) == right


@pytest.mark.parametrize("calls", [
    lambda x: (x.measure(0, 1), x.scale(0)),
    lambda x: x.scale(0),
    lambda x: (x.measure(0, 1, 2), x.scale(0, 0)),
    lambda x: (x.measure(0, 1, 2), x.scale(0, 1, 2), x.scale(0)),
    lambda x: (x.measure(0, 1, 2, 0), x.scale(0, 1, 2))])
def test_a_call_too_many_or_too_few_is_an_error(optimizer, calls):
    with pytest.raises(AssertionError):
        calls(optimizer)


@pytest.mark.parametrize("kind", [Stage1And2, Stage3])
def test_the_loss_scale_of_fp16_is_taken_out_of_a_gradient_once(kind):
    """By DeepSpeed's own arithmetic, which is given norms of gradients with their scale."""
    true = [torch.full((4,), value) for value in (3.0, 7.0, 0.25)]
    scale, networks = 1024.0, ["", "d", "small"]
    flats = [torch.zeros(4, requires_grad=True) for _ in true]
    for flat, gradient in zip(flats, true, strict=True):
        flat.grad = gradient * scale
    optimizer = object.__new__(kind)
    vars(optimizer).update(
        custom_loss_scaler=True, external_loss_scale=scale, clip_grad=LARGEST,
        optimizer=SimpleNamespace(param_groups=[{"network": name} for name in networks]),
        get_grad_norm_direct=lambda gradients, parameters: torch.cat(gradients).norm(),
        fp16_groups=(names := [[name] for name in networks]), params_in_partition=names,
        sub_group_to_group_id={0: 0, 1: 1, 2: 2},
        fp32_partitioned_groups_flat=flats, single_partition_of_fp32_groups=flats)
    clip_apart(optimizer)
    for flat, name in zip(flats, names, strict=True):
        optimizer.get_grad_norm_direct([flat.grad], name)
    for number, flat in enumerate(flats):
        optimizer.unscale_and_clip_grads(number if kind is Stage3 else [flat.grad],
                                         torch.tensor(99.0 * scale))
    for flat, gradient in zip(flats, true, strict=True):
        torch.testing.assert_close(flat.grad, gradient * min(1.0, LARGEST / gradient.norm().item()))


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_at_once_finds_what_deepspeed_finds_one_by_one(bad, dtype):
    gradients = [torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype),  # has no finite sum
                 torch.zeros(0, dtype=dtype), torch.full((7,), -2.0, dtype=dtype)]
    if bad is not None:
        gradients[2][4] = bad
    optimizer = SimpleNamespace(averaged_gradients={0: [None, *gradients[:2]], 1: gradients[2:]},
                                bit16_groups=[[], []],
                                _has_inf_or_nan=Stage1And2._has_inf_or_nan)
    theirs = Stage1And2.has_overflow_partitioned_grads_serial(optimizer)
    check_all_at_once(optimizer)
    ours = optimizer.has_overflow_partitioned_grads_serial()
    assert ours.tolist() == theirs.tolist() == [bad is not None]
    optimizer.averaged_gradients = {0: [None, gradients[1]], 1: None}  # nothing
    assert optimizer.has_overflow_partitioned_grads_serial().tolist() == [False]


@pytest.mark.parametrize("values", [[2e-6, 1e-6], [0.3, 0.4], [3.0, 4.0]])
def test_small_norms_are_clipped_as_by_torch(values):
    """torch and DeepSpeed divide by the norm plus 1e-6."""
    ours, theirs = torch.tensor(values), torch.nn.Parameter(torch.zeros(2))
    theirs.grad = ours.clone()
    torch.nn.utils.clip_grad_norm_([theirs], 1e-6)
    _clip([[ours]], [""], 1e-6)
    torch.testing.assert_close(ours, theirs.grad, rtol=1e-6, atol=0)


def test_one_group_that_is_not_finite_spoils_its_network(optimizer):
    """A group whose norm is not finite measures -1: the common norm stands for its network's."""
    for value, group in zip((-1.0, 7.0, 4.0), optimizer.fp16_groups, strict=True):
        optimizer.get_grad_norm_direct(value, group)
    assert optimizer.scale(0, 1, 2) == {0: 99.0, 1: 7.0, 2: 99.0}


class BF16_Optimizer:  # noqa: N801  DeepSpeed's name
    def __init__(self):
        self.fp32_groups_gradients = [[torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 12.0])]]
        self.optimizer = SimpleNamespace(param_groups=[{}, {"network": "d"}])
        self.clip_grad, self.overflow, self._global_grad_norm = LARGEST, False, None

    def step(self, closure):
        self.clip_seen, self._global_grad_norm = self.clip_grad, 2 * LARGEST


def test_bf16_is_clipped_once_and_reports_the_norm_of_all():
    optimizer = BF16_Optimizer()
    clip_apart(optimizer)
    optimizer.step()
    clipped = [gradients[0].norm().item() for gradients in optimizer.fp32_groups_gradients]
    assert clipped == pytest.approx([LARGEST, LARGEST], rel=1e-5)
    assert (optimizer.clip_seen, optimizer.clip_grad) == (0.0, LARGEST)
    assert optimizer._global_grad_norm.item() == pytest.approx(13.0)


def test_pieces_of_a_gradient_keep_their_parameter_and_padding_is_left_out(monkeypatch):
    monkeypatch.setattr(clipping, "_PIECE", 4)
    padding, first, second = torch.ones(3), torch.arange(10.0), torch.arange(4.0)
    padding._zero_padding = True
    optimizer = SimpleNamespace(get_grad_norm_direct=lambda gradients, parameters: [
        (gradient.tolist(), owner) for gradient, owner in zip(gradients, parameters, strict=True)])
    clipping.measure_in_pieces(optimizer)
    assert optimizer.get_grad_norm_direct([padding, first, second], ["a", "b"]) == [
        ([0, 1, 2, 3], "a"), ([4, 5, 6, 7], "a"), ([8, 9], "a"), ([0, 1, 2, 3], "b")]
