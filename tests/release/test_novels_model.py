"""The model of examples/models: small, with its sources, and it knows what it learned."""

import json

import pytest
from launching import ROOT

from deberta_ds import load

MODEL = ROOT / "examples/models/novels_7m"


def test_it_is_small_and_says_where_it_comes_from():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16_000_000
    card = (MODEL / "README.md").read_text()
    assert 'license: "apache-2.0"' in card and "100_english_novels" in card


@pytest.mark.parametrize(("text", "word"), [
    ("She opened the [MASK] and went into the garden.", "door"),
    ("The ladies [MASK] not at home.", "were"), ("He shook his [MASK] sadly.", "head")])
def test_it_fills_gaps(text, word):
    [fillings] = load(MODEL).fill_mask(text)
    assert fillings[0].text == word


def test_it_prefers_grammatical_sentences():
    model = load(MODEL)
    pairs = [json.loads(line) for line in (ROOT / "launch/runs/minimal_pairs.jsonl").open()]
    for kind, least in (("determiner_noun_agreement", 0.95), ("irregular_forms", 0.95),
                        ("anaphor_agreement", 0.75), ("island_effects", 0.7)):
        chosen = [pair for pair in pairs if pair["phenomenon"] == kind]
        scores = model.score([(x["sentence_good"], x["sentence_bad"]) for x in chosen])
        assert (scores["pll_word"][:, 0] > scores["pll_word"][:, 1]).mean() >= least, kind
