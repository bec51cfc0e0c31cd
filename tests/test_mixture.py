"""Mixtures: exact shares, closed-form counts, stages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deberta_ds.data.mixture import SLOTS, build_mixture, temperature_weights
from deberta_ds.errors import UserError


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=8), st.integers(0, 5000))
def test_counts_and_indices_agree_with_counting(weights, last):
    mixture = build_mixture(weights)
    assert sum(mixture.counts) == SLOTS
    seen = [0] * len(weights)
    for row in range(last % 2500):
        source, index = mixture.locate(row)
        assert index == seen[source]
        seen[source] += 1
    assert mixture.consumed(last % 2500) == seen


def test_shares_are_exact_and_spread():
    mixture = build_mixture([3, 1])
    assert mixture.counts == (768, 256)
    sources = [mixture.locate(row)[0] for row in range(64)]
    assert all(sources[i : i + 4].count(1) == 1 for i in range(0, 64, 4))


def test_far_rows_are_found_at_once():
    source, index = build_mixture([1, 1]).locate(10**15)
    assert (source, index) == (0, 10**15 // 2)


def test_refuses_useless_weights():
    for weights in ([], [0.0], [-1.0, 1.0], [float("nan")], [1.0, 1e-6]):
        with pytest.raises(UserError):
            build_mixture(weights)


def test_temperature_flattens():
    natural = temperature_weights([90, 10], 1.0)
    assert natural == pytest.approx([0.9, 0.1])
    flat = temperature_weights([90, 10], 1 / 0.3)
    assert flat[0] / flat[1] == pytest.approx(9**0.3) and sum(flat) == pytest.approx(1.0)
