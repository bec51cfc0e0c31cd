"""Optimizers against references from their formulas, in float64; and every schedule.

AdamW: Loshchilov and Hutter (arXiv 1711.05101), Algorithm 2. Official Adam: microsoft/DeBERTa
optims/xadam.py: no bias correction, decoupled decay scaled by the learning rate. Muon: the formula
of engine/optim.py, with the polynomial on singular values.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deberta_ds.config.optim import OptimConfig, learning_rate
from deberta_ds.engine.engine import set_learning_rate
from deberta_ds.engine.optim import build_optimizer

STEPS, DECAY = 10, 0.1
MATRICES = ("dense.weight", "square.weight")


class Small(nn.Module):
    """Parameters of each kind: decayed matrices, a row and a table, undecayed biases and norm."""

    def __init__(self):
        super().__init__()
        self.dense, self.square = nn.Linear(7, 5), nn.Linear(5, 5, bias=False)
        self.score = nn.Linear(5, 1)  # a single row is no matrix to Muon
        self.norm = nn.LayerNorm(5)
        self.table = nn.Parameter(torch.randn(6, 5))


def reference(values, gradients, name, optim, decay):
    """Return the parameter after all steps, from the formula."""
    w = values.double()
    if name == "muon":
        return muon_reference(w, gradients, optim)
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


def muon_reference(w, gradients, optim):
    m = torch.zeros_like(w)
    for step, g in enumerate(gradients):
        lr = learning_rate(optim, step, 100)
        m = 0.95 * m + 0.05 * g.double()
        left, sizes, right = torch.linalg.svd(0.05 * g.double() + 0.95 * m, full_matrices=False)
        sizes = sizes / sizes.norm()
        for _ in range(5):
            sizes = 3.4445 * sizes - 4.7750 * sizes ** 3 + 2.0315 * sizes ** 5
        w = w - lr * DECAY * w - lr * 0.2 * max(w.shape) ** 0.5 * (left * sizes) @ right
    return w


@pytest.mark.parametrize("name, schedule", [
    ("adamw", "linear"), ("muon", "linear"), ("adam_uncorrected", "deberta_linear")])
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
        kind = "adamw" if name == "muon" and key not in MATRICES else name
        wanted = reference(before[key], gradients[key], kind, optim, DECAY * (p.dim() == 2))
        error = ((p - wanted).abs().max() / wanted.abs().max()).item()
        if kind == "muon":
            assert list(optimizer.state[p]) == ["exp_avg"]
            error /= 10  # Newton-Schulz in fp32: 1e-5
        errors.append(error)
    print(f"{name}: largest relative difference after {STEPS} steps {max(errors):.1e}")
    assert all(error <= 1e-6 for error in errors)  # max() would pass over NaN


def test_parameters_without_gradients_are_in_no_group_and_waiting_ones_apart():
    model = Small()
    model.table.requires_grad_(False)
    optimizer = build_optimizer(
        model, OptimConfig(learning_rate=1e-2, weight_decay=DECAY), {"dense.bias"})
    groups = [(group["waits"], [tuple(p.shape) for p in group["params"]])
              for group in optimizer.param_groups]
    assert groups == [(False, [(5, 7), (5, 5), (1, 5)]), (False, [(1,), (5,), (5,)]),
                      (True, [(5,)])]


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


@pytest.mark.parametrize("low", [0.0, 0.25])
@pytest.mark.parametrize("schedule, decay_share, share", [
    ("constant", 0.1, lambda step: 1.0),
    ("linear", 0.1, lambda step: (TOTAL - step) / (TOTAL - WARMUP)),
    ("cosine", 0.1, lambda step: (1 + math.cos(math.pi * (step - WARMUP) / 90)) / 2),
    ("wsd", 0.1, lambda step: min(1.0, (TOTAL - step) / 10)),
    ("wsd", 0.2, lambda step: min(1.0, (TOTAL - step) / 20)),
    ("wsd", 1.0, lambda step: (TOTAL - step) / TOTAL),
    # arXiv 2405.18392; at decay_share = 1 it is a branch of a constant trunk.
    ("wsd_sqrt", 1.0, lambda step: 1 - math.sqrt(step / TOTAL)),
    # microsoft/DeBERTa optims/lr_schedulers.py: x / warm-up, then 1 - x, in shares of all steps.
    # Not rescaled: it jumps from LR to 0.9 LR where warm-up ends.
    ("deberta_linear", 0.1, lambda step: 1 - step / TOTAL)])
def test_a_schedule_rises_to_the_peak_and_would_reach_its_end_one_step_after_the_last(
        schedule, decay_share, share, low):
    optim = OptimConfig(learning_rate=LR, warmup_steps=WARMUP, schedule=schedule,
                        decay_share=decay_share, min_learning_rate_share=low)
    found = [learning_rate(optim, step, TOTAL) for step in range(TOTAL)]
    first = 0 if schedule == "deberta_linear" else 1
    assert found[:WARMUP] == pytest.approx([LR * (step + first) / WARMUP for step in range(WARMUP)])
    assert found[WARMUP:] == pytest.approx(
        [LR * (low + (1 - low) * share(step)) for step in range(WARMUP, TOTAL)])
    assert learning_rate(replace(optim, warmup_steps=0), 0, TOTAL) == LR
