"""The order of rows: a bijection, pinned for ever by a golden file."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deberta_ds.base.splitmix import Permutation, mix64

GOLDEN = Path(__file__).parents[1] / "golden" / "permutation.json"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.tuples(st.integers(0, 2**63), st.integers(0, 99)))
def test_is_a_bijection(n, key):
    permutation = Permutation(n, key)
    assert sorted(permutation[i] for i in range(n)) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), min_size=2, max_size=20, unique=True))
def test_stays_in_range_and_injective_for_any_size(n, indices):
    permutation = Permutation(n, (1, 2))
    inside = {index % n for index in indices}
    images = {permutation[index] for index in inside}
    assert len(images) == len(inside) and all(0 <= image < n for image in images)


def test_order_is_the_golden_one():
    for case in json.loads(GOLDEN.read_text()):
        permutation = Permutation(case["n"], tuple(case["key"]))
        assert [permutation[i] for i in case["indices"]] == case["images"], case["n"]


def test_looks_uniform():
    n, bins = 40_000, 20
    image = np.array([Permutation(n, (5,))[i] for i in range(n // 4)])
    observed = np.bincount(image * bins // n, minlength=bins)
    expected = len(image) / bins
    # Sampling without replacement: chi-squared per degree of freedom is about 1 - 1/4.
    assert ((observed - expected) ** 2 / expected).sum() / (bins - 1) < 2.0
    assert np.mean(np.abs(np.diff(image)) == 1) < 0.001


def test_keys_give_unrelated_orders():
    n = 1000
    keys = ((1, 0), (1, 1), (2, 0), (0, 1))
    orders = [[Permutation(n, key)[i] for i in range(n)] for key in keys]
    for a in range(4):
        for b in range(a):
            agree = sum(x == y for x, y in zip(orders[a], orders[b], strict=True))
            assert agree < 10


def test_refuses_indices_outside():
    with pytest.raises(IndexError):
        Permutation(10, (0,))[10]
    with pytest.raises(ValueError):
        Permutation(0, (0,))


def test_mix64_is_splitmix64():
    # First outputs of the reference SplitMix64 generator seeded with 0.
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    outputs = [mix64((gamma * i) & mask) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
