"""Mixtures: exact shares, closed-form counts, orders that never change."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deberta_ds.base.errors import UserError
from deberta_ds.data.mixture import build_mixture, temperature_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "mixture.json"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=8), st.integers(0, 5000))
def test_counts_and_indices_agree_with_counting(weights, last):
    mixture = build_mixture(weights)
    seen = [0] * len(weights)
    for row in range(last % 2500):
        source, index = mixture.locate(row)
        assert index == seen[source]
        seen[source] += 1
    assert mixture.consumed(last % 2500) == seen


@pytest.mark.parametrize("weights", [
    [1 / rank for rank in range(1, 201)],  # Zipf
    [10.0 ** (-4 * source / 99) for source in range(100)],  # from 1 to 1e-4
    [1.0] + [1e-6] * 999,
    [1.0, 1e-11],
])
def test_shares_are_exact_over_a_long_run(weights):
    mixture, rows, total = build_mixture(weights), 10**13, sum(weights)
    for count, weight in zip(mixture.consumed(rows), weights, strict=True):
        assert abs(count / rows - weight / total) < 1e-6 * weight / total
    for count, weight in zip(mixture.consumed(100_000), weights, strict=True):
        assert abs(count - 100_000 * weight / total) < 5  # and at any moment within a few rows


def test_a_thousand_sources_are_spread_evenly():
    weights = np.random.default_rng(0).uniform(0.1, 1, 1000)
    mixture = build_mixture(weights.tolist())
    expected = 20_000 * weights / weights.sum()
    found = np.bincount([mixture.locate(row)[0] for row in range(20_000)], minlength=1000)
    assert abs(found - expected).max() < 5


def test_orders_are_golden():
    """The order of the sources is part of the checkpoint format."""
    for case in json.loads(GOLDEN.read_text()):
        mixture = build_mixture(case["weights"])
        assert [list(mixture.locate(row)) for row in case["rows"]] == case["located"]


def test_far_rows_are_found_at_once():
    assert build_mixture([1, 1]).consumed(10**15) == [10**15 // 2] * 2
    assert build_mixture([1, 1]).locate(10**15)[1] == 10**15 // 2


def test_refuses_useless_weights():
    for weights in ([], [0.0], [-1.0, 1.0], [float("nan")], [1.0, 1e-13], [1e308, 1e308]):
        with pytest.raises(UserError):
            build_mixture(weights)


def test_temperature_flattens():
    natural = temperature_weights([90, 10], 1.0)
    assert natural == pytest.approx([0.9, 0.1])
    flat = temperature_weights([90, 10], 1 / 0.3)
    assert flat[0] / flat[1] == pytest.approx(9**0.3) and sum(flat) == pytest.approx(1.0)
    with pytest.raises(UserError):
        temperature_weights([90, 10], float("nan"))
