"""Every schedule against its formula, at the places where an index could be off by one."""

import math

import pytest

from deberta_ds.config.run_config import OptimConfig
from deberta_ds.engine.optim import learning_rate

STEPS, WARMUP, LR = 100, 10, 2.0


def rates(**settings) -> list[float]:
    optim = OptimConfig(learning_rate=LR, warmup_steps=WARMUP, **settings)
    return [learning_rate(optim, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_warm_up_rises_from_a_tenth_to_the_peak(schedule):
    found = rates(schedule=schedule)
    assert found[:WARMUP] == pytest.approx([LR * (step + 1) / WARMUP for step in range(WARMUP)])
    assert found[WARMUP] == LR  # the first step after warm-up is not decayed yet
    assert max(found) == LR


def test_constant_stays():
    assert set(rates(schedule="constant")[WARMUP:]) == {LR}


@pytest.mark.parametrize("low", [0.0, 0.25])
@pytest.mark.parametrize("schedule, share", [
    ("linear", lambda step: (STEPS - step) / (STEPS - WARMUP)),
    ("cosine", lambda step: (1 + math.cos(math.pi * (step - WARMUP) / 90)) / 2),
    # Not rescaled: it jumps from LR to 0.9 LR where warm-up ends.
    ("deberta_linear", lambda step: 1 - step / STEPS)], ids=["linear", "cosine", "official"])
def test_a_decay_would_reach_its_end_one_step_after_the_last(schedule, share, low):
    found = rates(schedule=schedule, min_learning_rate_share=low)
    expected = [LR * (low + (1 - low) * share(step)) for step in range(WARMUP, STEPS)]
    assert found[WARMUP:] == pytest.approx(expected)
    assert found[-1] > LR * low


@pytest.mark.parametrize("share, low", [(0.1, 0.0), (0.2, 0.1), (1.0, 0.0)])
def test_wsd_is_stable_and_then_falls_in_its_share_of_all_steps(share, low):
    found = rates(schedule="wsd", decay_share=share, min_learning_rate_share=low)
    decay = round(share * STEPS)
    stable = found[WARMUP:STEPS - decay + 1]
    assert set(stable) <= {LR}
    for step in range(max(WARMUP, STEPS - decay), STEPS):
        assert found[step] == pytest.approx(LR * (low + (1 - low) * (STEPS - step) / decay))


def test_the_official_warm_up_starts_at_zero():
    """microsoft/DeBERTa optims/lr_schedulers.py: x / warm-up, then 1 - x, in shares of all steps.
    """
    found = rates(schedule="deberta_linear")
    assert found[:WARMUP] == pytest.approx([LR * step / WARMUP for step in range(WARMUP)])
    assert found[0] == 0.0


def test_no_warm_up_starts_at_the_peak():
    for schedule in ("linear", "cosine", "wsd", "constant", "deberta_linear"):
        assert learning_rate(OptimConfig(learning_rate=LR, schedule=schedule), 0, STEPS) == LR


def test_wsd_sqrt_falls_by_one_minus_the_square_root():
    """arXiv 2405.18392; at decay_share = 1 it is a branch of a constant trunk."""
    found = rates(schedule="wsd_sqrt", decay_share=1.0)[WARMUP:]
    wanted = [LR * (1 - math.sqrt(step / STEPS)) for step in range(WARMUP, STEPS)]
    assert found == pytest.approx(wanted)
