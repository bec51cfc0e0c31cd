"""Rows and their order: no token is lost, mixtures have exact shares, orders are one to one."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deberta_ds.base.errors import UserError
from deberta_ds.base.splitmix import Permutation, mix64
from deberta_ds.data.mixture import build_mixture, temperature_weights
from deberta_ds.data.shards import FRAME_TOKENS, best_fit, plan_rows

GOLDEN = Path(__file__).parents[1] / "golden"


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


def test_orders_are_golden():
    """The order of the sources is part of the checkpoint format."""
    for case in json.loads((GOLDEN / "mixture.json").read_text()):
        mixture = build_mixture(case["weights"])
        assert [list(mixture.locate(row)) for row in case["rows"]] == case["located"]


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


VOCAB = 50
WORD_STARTS = np.arange(VOCAB) % 3 == 0  # ids 0, 3, 6 ... start a word


def lengths_to_ends(lengths):
    return np.cumsum(np.array(lengths, dtype=np.int64))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 200), max_size=60), st.sampled_from([8, 16, 33, 64]),
    st.integers(0, 2**32 - 1))
def test_every_token_is_in_exactly_one_row(lengths, seq_len, seed):
    ends = lengths_to_ends(lengths)
    total = int(ends[-1]) if len(lengths) else 0
    tokens = np.random.default_rng(seed).integers(0, VOCAB, total).astype(np.uint16)
    plan = plan_rows(ends, tokens, WORD_STARTS, seq_len)
    covered = np.zeros(total, dtype=np.int64)
    for start, length in plan.segments.tolist():
        assert length >= 1
        covered[start : start + length] += 1
    assert (covered == 1).all()
    begins = set([0, *ends.tolist()])
    hard = 0
    for row in range(len(plan.starts) - 1):
        pieces = plan.segments[plan.starts[row] : plan.starts[row + 1]]
        assert len(pieces) and int((pieces[:, 1] + FRAME_TOKENS).sum()) <= seq_len
        for start, length in pieces.tolist():
            inside = [end for end in ends.tolist() if start < end < start + length]
            assert not inside, "a piece crosses a document end"
            hard += start not in begins and not WORD_STARTS[tokens[start]]
    assert hard == plan.hard_cuts


def test_pieces_start_at_words_unless_one_is_too_long_or_there_is_none():
    tokens = np.tile(np.array([0, 1, 2, 4, 5], dtype=np.uint16), 400)  # words of five tokens
    plan = plan_rows(np.array([len(tokens)]), tokens, WORD_STARTS, 32)
    assert plan.hard_cuts == 0
    assert WORD_STARTS[tokens[plan.segments[:, 0]]].all()
    one_word = np.ones(100, dtype=np.uint16)  # no id that starts a word
    plan = plan_rows(np.array([100]), one_word, WORD_STARTS, 32)
    assert plan.hard_cuts == 3 and plan.segments[:, 1].max() == 30
    empty = np.zeros(0, dtype=np.int64)
    plan = plan_rows(empty, empty.astype(np.uint16), WORD_STARTS, 32)
    assert len(plan.segments) == 0 and plan.starts.tolist() == [0]


def test_best_fit_agrees_with_a_loop_from_the_definition():
    generator = np.random.default_rng(0)
    sizes = generator.integers(3, 60, 2000)
    rows, num_rows = best_fit(sizes, 64)
    room: dict[int, int] = {}
    for index, size in enumerate(sizes.tolist()):
        fitting = [(left, row) for row, left in room.items() if left >= size]
        if fitting:
            _, row = min(fitting)
        else:
            if len(room) == 64:
                del room[min((left, row) for row, left in room.items())[1]]
            row = max(rows[:index], default=-1) + 1
            room[row] = 64
        assert rows[index] == row
        room[row] -= size
        if room[row] == 0:
            del room[row]
    assert num_rows == rows.max() + 1


def test_rows_are_full_on_natural_lengths():
    generator = np.random.default_rng(0)
    lengths = np.maximum(1, generator.lognormal(6.0, 1.1, 3000)).astype(np.int64)
    tokens = generator.integers(0, VOCAB, int(lengths.sum())).astype(np.uint16)
    plan = plan_rows(np.cumsum(lengths), tokens, WORD_STARTS, 512)
    used = int(plan.segments[:, 1].sum()) + FRAME_TOKENS * len(plan.segments)
    assert used / (512 * (len(plan.starts) - 1)) > 0.985


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.tuples(st.integers(0, 2**63), st.integers(0, 99)))
def test_an_order_is_a_bijection(n, key):
    permutation = Permutation(n, key)
    assert sorted(permutation[i] for i in range(n)) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), min_size=2, max_size=20, unique=True))
def test_an_order_stays_in_range_and_is_injective_for_any_size(n, indices):
    permutation = Permutation(n, (1, 2))
    inside = {index % n for index in indices}
    images = {permutation[index] for index in inside}
    assert len(images) == len(inside) and all(0 <= image < n for image in images)


def test_order_is_the_golden_one():
    for case in json.loads((GOLDEN / "permutation.json").read_text()):
        permutation = Permutation(case["n"], tuple(case["key"]))
        assert [permutation[i] for i in case["indices"]] == case["images"], case["n"]


def test_an_order_looks_uniform():
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
