"""Whole words, exact budgets, flat rates; and the official sampler, draw for draw."""

import math
import random
from bisect import bisect_left
from collections import Counter

import numpy as np
import pytest

from deberta_ds.config.objective import MaskConfig
from deberta_ds.data import masking
from deberta_ds.data.masking import LONGEST_WORD, cut_long_words, mask_row, word_spans
from deberta_ds.tokenizer.words import starts_official_word

VOCAB, MASK = 200, 199
SPECIAL = np.zeros(VOCAB, dtype=bool)
SPECIAL[[0, 1, 2, 3, MASK]] = True
WORD_START = np.arange(VOCAB) % 3 != 1  # a third of the ids continue a word
WORD_START[SPECIAL] = True
ONE_A_TOKEN = np.ones(VOCAB, dtype=bool)  # each begins a character


def make_row(seed=0, length=128, real=120):
    generator = np.random.default_rng(seed)
    ids = generator.integers(4, MASK, length)
    ids[0], ids[real // 2], ids[real // 2 + 1], ids[real - 1] = 1, 2, 1, 2
    ids[real:] = 0
    return ids.astype(np.int64)


def mask(ids, seed=0, **changes):
    rng = np.random.Generator(np.random.Philox(key=[1, seed]))
    return mask_row(ids, WORD_START, ONE_A_TOKEN, SPECIAL, MaskConfig(**changes), MASK, rng)


def words_by_loop(ids):
    words, previous_special = [], True
    for position, token in enumerate(ids.tolist()):
        if SPECIAL[token]:
            previous_special = True
            continue
        if WORD_START[token] or previous_special:
            words.append([])
        words[-1].append(position)
        previous_special = False
    return words


@pytest.mark.parametrize("seed", range(20))
def test_word_spans_agree_with_a_loop(seed):
    ids = make_row(seed)
    ids[5] = 3  # [UNK] in the middle breaks a word
    starts, lengths = word_spans(WORD_START[ids], SPECIAL[ids])
    spans = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
    assert spans == words_by_loop(ids)


@pytest.mark.parametrize("max_ngram", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_budget_is_exact_and_words_are_whole(seed, max_ngram):
    ids = make_row(seed)
    inputs, labels = mask(ids, seed, max_ngram=max_ngram)
    target = labels != -100
    assert target.sum() == round(0.15 * (ids != 0).sum())
    assert (labels[target] == ids[target]).all() and (inputs[~target] == ids[~target]).all()
    assert (inputs[target] == MASK).all() and not SPECIAL[labels[target]].any()
    for word in words_by_loop(ids):
        assert target[word].all() or not target[word].any()


def test_every_position_has_the_same_rate():
    ids = make_row(real=128)
    ids[4:] = np.where(SPECIAL[ids[4:]], ids[4:], 5)  # single-token words
    counts = sum((mask(ids, seed)[1] != -100).astype(int) for seed in range(3000))
    ordinary = ~SPECIAL[ids]
    rates = counts[ordinary] / 3000
    expected = round(0.15 * 128) / ordinary.sum()
    tenths = [part.mean() for part in np.array_split(rates, 10)]
    assert max(abs(rate - expected) for rate in tenths) < 0.01
    assert abs(rates - expected).max() < 5 * math.sqrt(expected * (1 - expected) / 3000)


def test_ngram_lengths_follow_one_over_n():
    ids = np.full(600, 5, dtype=np.int64)  # single-token words only
    ids[0], ids[-1] = 1, 2
    runs = Counter()
    for seed in range(1500):
        target = mask(ids, seed, max_ngram=3, rate=0.02)[1] != -100
        edges = np.flatnonzero(np.diff(np.concatenate([[0], target, [0]])))
        runs.update((edges[1::2] - edges[::2]).tolist())
    total = sum(runs.values())
    for length, share in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        # n-grams that meet or lack room for their last words blur the shares a little
        assert abs(runs[length] / total - share) < 0.06


def test_ngrams_do_not_cross_pieces():
    """Pieces of one word: neighbors are chosen together no more often than strangers are."""
    ids = np.array([1, 5, 2, 1, 6, 2, 1, 8, 2, 1, 9, 2], dtype=np.int64)
    pairs = Counter()
    for seed in range(2000):
        _, labels = mask(ids, seed, max_ngram=3, rate=2 / 12)
        chosen = np.flatnonzero(labels != -100).tolist()
        assert len(chosen) == 2 and not SPECIAL[labels[chosen]].any()
        pairs[tuple(chosen)] += 1
    assert len(pairs) == 6  # without the guard (1, 4), (4, 7) and (7, 10) take over half
    assert max(abs(count / 2000 - 1 / 6) for count in pairs.values()) < 0.04


def test_replacement_shares_and_random_ids():
    ids, shown = make_row(), Counter()
    for seed in range(400):
        inputs, labels = mask(ids, seed, mask_share=0.8, random_share=0.1)
        target = labels != -100
        shown["mask"] += int((inputs[target] == MASK).sum())
        shown["kept"] += int((inputs[target] == labels[target]).sum())
        shown["all"] += int(target.sum())
        other = inputs[target & (inputs != labels) & (inputs != MASK)]
        assert not SPECIAL[other].any()
    assert abs(shown["mask"] / shown["all"] - 0.8) < 0.02
    assert abs(shown["kept"] / shown["all"] - 0.1) < 0.02


def test_random_tokens_are_no_bytes_that_the_sequence_lacks():
    ids, part = make_row(), np.arange(VOCAB) % 3 == 1
    ids[1:5] = ids[part[ids] & ~SPECIAL[ids]][0]
    drawn = np.concatenate([mask_row(
        ids, WORD_START, ONE_A_TOKEN, SPECIAL, MaskConfig(mask_share=0.0, random_share=1.0), MASK,
        np.random.default_rng(seed), rare=part | SPECIAL)[0] for seed in range(300)])
    assert set(drawn[part[drawn]]) == set(ids[part[ids]])
    assert set(np.flatnonzero(~part & ~SPECIAL)) <= set(drawn)


@pytest.mark.parametrize("max_ngram", [1, 3])
@pytest.mark.parametrize(("length", "prose"), [(512, 0), (512, 60), (128, 0), (128, 10), (64, 2),
                                               (40, 0), (24, 3)])
def test_a_run_without_word_starts_is_masked_at_the_rate(length, prose, max_ngram):
    """Hexadecimal, DNA, scripts spelled in bytes: one "word" of a whole row, beside some prose."""
    ids = np.full(length, 4, dtype=np.int64)  # id 4 continues a word
    ids[0], ids[1], ids[-1] = 1, 5, 2
    ids[2 : 2 + prose] = 5  # words of one token
    counts, trials = np.zeros(length), 300
    budget = round(0.15 * length)
    for seed in range(trials):
        target = mask(ids, seed, max_ngram=max_ngram)[1] != -100
        assert target.sum() == budget
        counts += target
    rates = counts / trials
    assert abs(rates[1:-1] - budget / (length - 2)).max() < 0.12


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_never_more_than_the_rate_and_one_word(max_ngram):
    rng = np.random.default_rng(0)
    for seed in range(200):
        length = int(rng.integers(8, 130))
        ids = np.where(rng.random(length) < rng.choice([0.0, 0.02, 0.1, 0.6]), 5, 4)
        ids[0], ids[-1] = 1, 2
        target = mask(ids.astype(np.int64), seed, max_ngram=max_ngram)[1] != -100
        assert 0 < target.sum() <= max(1, round(0.15 * length)) + LONGEST_WORD


def test_only_rows_with_a_long_word_are_cut():
    starts, lengths = np.array([1, 4, 9]), np.array([3, 5, 16])
    begins = np.ones(32, dtype=bool)
    assert cut_long_words(starts, lengths, 16, begins)[1] is lengths
    assert cut_long_words(starts, lengths, 5, begins)[1].tolist() == [3, 5] + [1] * 16
    starts, lengths = np.array([1, 20]), np.array([18, 2])
    found = cut_long_words(starts, lengths, 77, begins)
    assert found[0].tolist() == [*range(1, 19), 20] and found[1].tolist() == [1] * 18 + [2]


def test_official_words_are_those_of_part_of_whole_word():
    """microsoft/DeBERTa spm_tokenizer.py: only the space mark and single marks start a word."""
    starts = ("\u2581the", "\u2581", "!", "$", "_", "\u3002", "\u00a0", "\u200d")
    continues = ("...", "!!", "<0xE4>", "\u4e2d", "ing", "7", "\u20ac", "\u0301")
    assert [starts_official_word(piece) for piece in starts] == [True] * len(starts)
    assert [starts_official_word(piece) for piece in continues] == [False] * len(continues)


def test_masks_are_golden():
    """The masks belong to the order of a run: they must not change with a dependency."""
    _, labels = mask(make_row(), seed=3)
    assert np.flatnonzero(labels != -100).tolist() == GOLDEN_UNIFORM
    _, labels = mask(make_row(), seed=3, max_ngram=3)
    assert np.flatnonzero(labels != -100).tolist() == GOLDEN_NGRAM


GOLDEN_UNIFORM = [5, 6, 7, 39, 40, 52, 57, 62, 63, 74, 77, 82, 84, 86, 112, 113, 114, 118]
GOLDEN_NGRAM = [5, 6, 7, 8, 9, 10, 11, 57, 62, 63, 77, 78, 79, 82, 86, 112, 113, 114]


def official_sampler(ids, p, max_gram, mask_p, keep_p, rng):
    """The official NGramMaskGenerator, written down from its description step by step."""
    units = []
    for position in range(len(ids)):
        if SPECIAL[ids[position]]:
            continue
        if max_gram > 1 and units and not WORD_START[ids[position]]:
            units[-1].append(position)
        else:
            units.append([position])
    length = int((ids != 0).sum())
    budget = min(math.ceil(len(ids) * p / 10) * 10, max(1, round(length * p)))
    weights = [1 / n for n in range(1, max_gram + 1)]
    cdf = np.cumsum(np.array(weights) / sum(weights))
    cdf[-1] = 1.0
    marks, offset, window = set(), 0, int(1 / p)
    while offset < len(units):
        n = bisect_left(cdf.tolist(), rng.random()) + 1
        c = min(n * window, len(units) - offset)
        m = rng.randint(0, c - 1)
        end = min(offset + m + n, len(units))
        marks.update(range(offset + m, end))
        offset = max(offset + c, end)
    out, labels, count = ids.copy(), np.full(len(ids), -100), 0
    for index, unit in enumerate(units):
        if index in marks:
            for position in unit:
                labels[position] = ids[position]
                u = rng.random()
                if u < mask_p:
                    out[position] = MASK
                elif u >= mask_p + keep_p:
                    out[position] = rng.choice(range(VOCAB))
                count += 1
            if count >= budget:
                break
    return out, labels


@pytest.mark.parametrize(("max_ngram", "mask_p", "random_p"), [(1, 1.0, 0.0), (3, 0.8, 0.1)])
def test_deberta_window_is_the_official_sampler(max_ngram, mask_p, random_p):
    for seed in range(30):
        ids = make_row(seed, 512, 500)
        rng = np.random.Generator(np.random.Philox(key=[1, seed]))
        official = random.Random(int(rng.integers(1 << 63)))
        expected = official_sampler(ids, 0.15, max_ngram, mask_p, 1 - mask_p - random_p, official)
        found = mask(ids, seed, selection="deberta_window", max_ngram=max_ngram,
                     mask_share=mask_p, random_share=random_p)
        assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])


def test_deberta_window_never_masks_the_end_of_a_row():
    ids = np.full(512, 5, dtype=np.int64)
    ids[0], ids[-1] = 1, 2
    hits = sum(mask(ids, s, selection="deberta_window")[1] != -100 for s in range(200))
    assert hits[470:].sum() == 0 and abs(hits[1:400].mean() / 200 - 1 / 6) < 0.01
    uniform = sum(mask(ids, s)[1] != -100 for s in range(200))
    assert uniform[470:511].mean() / 200 > 0.12


def test_where_no_word_fits_the_shortest_is_chosen():
    """Characters of several bytes are words of their own in a long word, of unlike lengths."""
    ids = np.array([1, 5] + [4] * 10 + [2], dtype=np.int64)  # id 4 continues a word
    for max_ngram in (1, 3):
        assert (mask(ids, max_ngram=max_ngram)[1] != -100).sum() == 11
    starts, lengths, dice = np.array([1, 4, 6]), np.array([3, 2, 4]), np.random.default_rng(0)
    assert masking.choose_words(lengths, 1, dice).tolist() == [1]
    assert masking.choose_ngrams(starts, lengths, 1, 3, dice).tolist() == [1]
