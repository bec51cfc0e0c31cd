"""Optimizers against references from their formulas, in float64; and every schedule.

AdamW: Loshchilov and Hutter (arXiv 1711.05101), Algorithm 2. Official Adam: microsoft/DeBERTa
optims/xadam.py: no bias correction, decoupled decay scaled by the learning rate.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deberta_ds.config.run_config import OptimConfig
from deberta_ds.engine.engine import set_learning_rate
from deberta_ds.engine.optim import build_optimizer, learning_rate

STEPS, DECAY = 10, 0.1


class Small(nn.Module):
    """One parameter of each kind: decayed matrix and table, undecayed bias and norm."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.table = nn.Parameter(torch.randn(6, 5))


def reference(values, gradients, name, optim, decay):
    """Return the parameter after all steps, from the formula."""
    w = values.double()
    b1, b2 = optim.betas
    m = v = torch.zeros_like(w)
    for step, g in enumerate(gradients):
        lr = learning_rate(optim, step, 100)
        g = g.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        if name == "adamw":
            m_hat, v_hat = m / (1 - b1 ** (step + 1)), v / (1 - b2 ** (step + 1))
            w = w - lr * decay * w - lr * m_hat / (v_hat.sqrt() + optim.eps)
        else:
            w = w - lr * (m / (v.sqrt() + optim.eps) + decay * w)
    return w


@pytest.mark.parametrize("name, schedule", [("adamw", "linear"),
                                            ("adam_uncorrected", "deberta_linear")])
def test_ten_steps_agree_with_the_formula(name, schedule):
    torch.manual_seed(0)
    optim = OptimConfig(learning_rate=1e-2, name=name, schedule=schedule, weight_decay=DECAY,
                        warmup_steps=3, betas=(0.9, 0.98))
    model = Small()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    gradients = {key: [torch.randn(p.shape) * 10.0 ** -(step % 4) for step in range(STEPS)]
                 for key, p in model.named_parameters()}
    optimizer = build_optimizer(model, optim)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, 100)
        for key, p in model.named_parameters():
            p.grad = gradients[key][step].clone()
        optimizer.step()
    errors = []
    for key, p in model.named_parameters():
        decay = DECAY if key in ("dense.weight", "table") else 0.0
        wanted = reference(before[key], gradients[key], name, optim, decay)
        errors.append(((p - wanted).abs().max() / wanted.abs().max()).item())
    print(f"{name}: largest relative difference after {STEPS} steps {max(errors):.1e}")
    assert all(error <= 1e-6 for error in errors)  # max() would pass over NaN


def test_parameters_without_gradients_are_in_no_group_and_waiting_ones_apart():
    model = Small()
    model.table.requires_grad_(False)
    optimizer = build_optimizer(
        model, OptimConfig(learning_rate=1e-2, weight_decay=DECAY), {"dense.bias"})
    groups = [(group["waits"], [tuple(p.shape) for p in group["params"]])
              for group in optimizer.param_groups]
    assert groups == [(False, [(5, 7)]), (False, [(5,), (5,)]), (True, [(5,)])]


def test_rates_follow_shares_and_wait_until_the_thaw():
    removed, groups = [], [{"rate_share": 0.5}, {"waits": True}, {"waits": False}]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups), holds=[
        SimpleNamespace(remove=lambda: removed.append(1)) for _ in range(2)])
    set_learning_rate(engine, 2.0, is_thawed=False)
    assert [group["lr"] for group in groups] == [1.0, 0.0, 2.0] and not removed
    set_learning_rate(engine, 2.0)
    assert [group["lr"] for group in groups] == [1.0, 2.0, 2.0]
    assert len(removed) == 2 and not engine.holds


TOTAL, WARMUP, LR = 100, 10, 2.0


def rates_of(**settings) -> list[float]:
    optim = OptimConfig(learning_rate=LR, warmup_steps=WARMUP, **settings)
    return [learning_rate(optim, step, TOTAL) for step in range(TOTAL)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_warm_up_rises_from_a_tenth_to_the_peak(schedule):
    found = rates_of(schedule=schedule)
    assert found[:WARMUP] == pytest.approx([LR * (step + 1) / WARMUP for step in range(WARMUP)])
    assert found[WARMUP] == LR  # the first step after warm-up is not decayed yet
    assert max(found) == LR


def test_constant_stays():
    assert set(rates_of(schedule="constant")[WARMUP:]) == {LR}


@pytest.mark.parametrize("low", [0.0, 0.25])
@pytest.mark.parametrize("schedule, share", [
    ("linear", lambda step: (TOTAL - step) / (TOTAL - WARMUP)),
    ("cosine", lambda step: (1 + math.cos(math.pi * (step - WARMUP) / 90)) / 2),
    # Not rescaled: it jumps from LR to 0.9 LR where warm-up ends.
    ("deberta_linear", lambda step: 1 - step / TOTAL)], ids=["linear", "cosine", "official"])
def test_a_decay_would_reach_its_end_one_step_after_the_last(schedule, share, low):
    found = rates_of(schedule=schedule, min_learning_rate_share=low)
    expected = [LR * (low + (1 - low) * share(step)) for step in range(WARMUP, TOTAL)]
    assert found[WARMUP:] == pytest.approx(expected)
    assert found[-1] > LR * low


@pytest.mark.parametrize("share, low", [(0.1, 0.0), (0.2, 0.1), (1.0, 0.0)])
def test_wsd_is_stable_and_then_falls_in_its_share_of_all_steps(share, low):
    found = rates_of(schedule="wsd", decay_share=share, min_learning_rate_share=low)
    decay = round(share * TOTAL)
    stable = found[WARMUP:TOTAL - decay + 1]
    assert set(stable) <= {LR}
    for step in range(max(WARMUP, TOTAL - decay), TOTAL):
        assert found[step] == pytest.approx(LR * (low + (1 - low) * (TOTAL - step) / decay))


def test_the_official_warm_up_starts_at_zero():
    """microsoft/DeBERTa optims/lr_schedulers.py: x / warm-up, then 1 - x, in shares of all steps.
    """
    found = rates_of(schedule="deberta_linear")
    assert found[:WARMUP] == pytest.approx([LR * step / WARMUP for step in range(WARMUP)])
    assert found[0] == 0.0


def test_no_warm_up_starts_at_the_peak():
    for schedule in ("linear", "cosine", "wsd", "constant", "deberta_linear"):
        assert learning_rate(OptimConfig(learning_rate=LR, schedule=schedule), 0, TOTAL) == LR


def test_wsd_sqrt_falls_by_one_minus_the_square_root():
    """arXiv 2405.18392; at decay_share = 1 it is a branch of a constant trunk."""
    found = rates_of(schedule="wsd_sqrt", decay_share=1.0)[WARMUP:]
    wanted = [LR * (1 - math.sqrt(step / TOTAL)) for step in range(WARMUP, TOTAL)]
    assert found == pytest.approx(wanted)
