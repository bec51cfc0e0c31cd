"""Metrics: golden values of the official files and the leaderboard's mean."""

import json

import numpy as np
import pytest
from superglue_helpers import FEW, REAL, needs_real, sample
from test_metrics_references import labelled

from deberta_ds.tasks import metrics
from deberta_ds.tasks.answer_texts import normalize
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.task import TASKS, task_named


def percent(value: float) -> float:
    return round(100 * value, 2)


GOLDEN_BASELINES = {
    "BoolQ": {"accuracy": 62.17}, "CB": {"macro_f1": 22.22, "accuracy": 50.0},
    "COPA": {"accuracy": 55.0}, "MultiRC": {"f1a": 59.95, "em": 0.84},
    "RTE": {"accuracy": 52.71}, "WiC": {"accuracy": 50.0}, "WSC": {"accuracy": 63.46},
}


@needs_real
@pytest.mark.parametrize("name", GOLDEN_BASELINES)
def test_majority_baselines_of_the_official_validation_files(name):
    task = task_named(name)
    examples = read_split(task, REAL, "val").examples
    guess = metrics.baseline(task, examples)
    found = {key: percent(value) for key, value in metrics.score(task, examples, guess).items()}
    assert found == GOLDEN_BASELINES[name]
    assert metrics.failure(task, examples, guess).startswith("every prediction is")


@needs_real
def test_diagnostics_of_a_constant():
    for label in (0, 1):
        ax_b = read_split(task_named("AX-b"), REAL, "test").examples
        assert metrics.score(task_named("AX-b"), ax_b, [label] * 1104) == {"matthews": 0.0}
        ax_g = read_split(task_named("AX-g"), REAL, "test").examples
        found = metrics.score(task_named("AX-g"), ax_g, [label] * 356)
        assert found == {"gender_parity": 1.0, "accuracy": 0.5}


@needs_real
def test_record_sample_against_the_official_script_written_again():
    task = task_named("ReCoRD")
    examples = read_split(task, FEW, "train", any_size=True).examples
    guesses = [example.names[i % len(example.names)] for i, example in enumerate(examples)]
    lines = [json.loads(line) for line in (FEW / "ReCoRD" / "train.jsonl").open()]
    exact = []
    for line, guess in zip(lines, guesses, strict=True):
        (qa,) = line["qas"]
        exact.append(any(a["text"].lower() == guess.lower() for a in qa["answers"]))
    assert metrics.score(task, examples, guesses)["em"] == pytest.approx(np.mean(exact))


def test_record_normalization_order_and_best_gold():
    assert normalize("The  A.B. \u201cX\u201d, an end") == "ab \u201cx\u201d end"
    assert normalize("an-other") == "another"  # punctuation goes before articles
    task = task_named("ReCoRD")
    example = Example((0, 0), (("t", "q"),), names=("x",), gold=("New York", "the York City"))
    assert metrics.score(task, [example], ["York"]) == {"f1": pytest.approx(2 / 3), "em": 0.0}
    assert metrics.score(task, [example], ["a new york"])["em"] == 1.0
    empty = Example((0, 0), (("t", "q"),), names=("x",), gold=("the",))
    assert metrics.score(task, [empty], ["a"])["f1"] == 0.0


def test_gender_parity_pairs_neighboring_lines():
    read = sample("AX-g", "test").examples
    with pytest.raises(AssertionError, match="not a pair"):
        metrics.score(task_named("AX-g"), (read[0], read[2], read[1], read[3]), [1, 1, 1, 1])


PUBLISHED = {
    "RoBERTa-large": ({"BoolQ": 87.1, "CB": (90.5, 95.2), "COPA": 90.6, "MultiRC": (84.4, 52.5),
                       "ReCoRD": (90.6, 90.0), "RTE": 88.2, "WiC": 69.9, "WSC": 89.0}, 84.55),
    "DeBERTa 1.5B": ({"BoolQ": 90.4, "CB": (94.9, 97.2), "COPA": 96.8, "MultiRC": (88.2, 63.7),
                      "ReCoRD": (94.5, 94.1), "RTE": 93.2, "WiC": 76.4, "WSC": 95.9}, 89.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_leaderboards_mean_gives_the_published_rows(name):
    row, wanted = PUBLISHED[name]
    scores = []
    for task in TASKS:
        if task.predicted_by is None:  # AX-b and AX-g do not count
            values = row[task.name] if isinstance(row[task.name], tuple) else (row[task.name],)
            scores.append(metrics.task_score(task, dict(zip(task.metrics, values, strict=True))))
    assert len(scores) == 8 and np.mean(scores) == pytest.approx(wanted, abs=0.05)


def test_failed_runs():
    task, gold = task_named("RTE"), labelled([0, 0, 0, 1, 1])
    assert metrics.failure(task, gold, [1] * 5) == "every prediction is 'entailment'"
    assert metrics.failure(task, gold, [0, 0, 1, 0, 1]) == (
        "accuracy 60.0 is not above the majority's 60.0")
    assert metrics.failure(task, gold, [0, 0, 0, 0, 1]) == ""
    assert metrics.confusion(task, gold, [0, 0, 1, 0, 1]) == [[2, 1], [1, 1]]
