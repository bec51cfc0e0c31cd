"""Metrics, and scores of every labeled table: intervals, classes, groups, texts, own tasks."""

import dataclasses
import json
import random
import shutil
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
from superglue_helpers import (
    REAL,
    needs_real,
    predict,
    saved_model,
    write_lines,
)
from test_finetune_own import rows_of, train, write_task
from test_metrics_references import labeled, task_of

from deberta_ds.finetuning import sweep
from deberta_ds.finetuning.models import load_finetuned
from deberta_ds.finetuning.predict import as_text
from deberta_ds.finetuning.run import write_result
from deberta_ds.tasks import metrics
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.metrics import scores_of
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task

DICE = np.random.default_rng(5)
TAGS = [tuple(row) for row in DICE.integers(0, 3, (30, 6)).tolist()]
MANY = [tuple(row) for row in DICE.integers(0, 2, (30, 3)).tolist()]
CASES = {
    "classify": (("accuracy", "macro_f1", "matthews_multi"), "abc",
                 DICE.integers(0, 3, 30).tolist(), DICE.integers(0, 3, 30).tolist()),
    "multilabel": (("micro_f1", "macro_f1", "exact_labels"), "abc", MANY, MANY[1:] + MANY[:1]),
    "regress": (("pearson", "spearman"), ("score",), DICE.normal(size=30).round(1).tolist(),
                DICE.normal(size=30).round(1).tolist()),
    "tags": (("span_f1", "tag_accuracy"), ("O", "B-X", "I-X"), TAGS, TAGS[1:] + TAGS[:1]),
}


@pytest.mark.parametrize("head", CASES)
def test_intervals_are_percentiles_of_the_metric_over_drawn_examples(head, monkeypatch):
    monkeypatch.setattr(metrics, "_SAMPLES", 200)
    names, labels, gold, guess = CASES[head]
    task, examples = task_of(*names, head=head, labels=labels), labeled(gold)
    found = scores_of(task, examples, guess)
    dice, drawn = np.random.default_rng(0), []
    for _ in range(200):
        chosen = dice.integers(30, size=30)
        drawn.append(metrics.score(task, [examples[k] for k in chosen], [guess[k] for k in chosen]))
    for name in names:
        low, high = np.percentile([values[name] for values in drawn], (2.5, 97.5))
        assert found["metrics"][name] == pytest.approx(
            {"value": metrics.score(task, examples, guess)[name], "low": low, "high": high})
    means = [metrics.task_score(task, values) for values in drawn]
    assert [found["score"]["low"], found["score"]["high"]] == pytest.approx(
        np.percentile(means, (2.5, 97.5)))
    assert found == scores_of(task, examples, guess)  # the same draws at every call


@pytest.mark.parametrize("head", ["classify", "multilabel"])
def test_classes_are_scored_as_by_scikit_learn(head):
    names, labels, gold, guess = CASES[head]
    found = scores_of(task_of(*names, head=head, labels=labels), labeled(gold), guess)["classes"]
    wanted = sklearn.metrics.precision_recall_fscore_support(gold, guess, zero_division=0)
    assert list(found) == list(labels)
    for values, *theirs in zip(found.values(), *wanted, strict=True):
        assert list(values.values()) == pytest.approx(theirs)


def test_units_are_multircs_questions_and_ax_gs_pairs():
    examples = [Example((0, k // 3, k), (("t", "q"),), k % 2) for k in range(12)]
    task = task_named("MultiRC")
    rows = [metrics.rows_of(name, task, examples, [1] * 12) for name in task.metrics]
    assert [len(part) for part in rows] == [4, 4]
    assert metrics.value_of("f1a", task, rows[0]) == pytest.approx(2 / 3)
    assert "low" in scores_of(task, examples, [1] * 12)["score"]
    pairs = [Example((k,), (("a", f"b{k // 2}"),), k % 2) for k in range(6)]
    found = scores_of(task_named("AX-g"), pairs, [1, 1, 0, 1, 0, 0])
    assert found["metrics"]["gender_parity"]["value"] == pytest.approx(2 / 3)
    assert list(found["score"]) == ["value"]  # of unlike units


def test_groups_and_questions_without_an_answer_are_scored_apart():
    task = dataclasses.replace(task_of("accuracy", labels="ab"), columns={"group": "language"})
    examples = [dataclasses.replace(example, group=group)
                for example, group in zip(labeled([0, 1, 1, 0]), ("en", "de", "en", None),
                                          strict=True)]
    found = scores_of(task, [*examples, Example((9,), (("a",),))], [0, 0, 1, 0, 1])
    assert found["examples"] == 4 and found["unlabelled"] == 1
    groups = found["groups"]["language"]
    assert {name: (part["examples"], part["metrics"]["accuracy"]["value"])
            for name, part in groups.items()} == {"en": (2, 1), "(none)": (1, 1), "de": (1, 0)}
    many = [dataclasses.replace(examples[0], group=str(k)) for k in range(60)]
    found = scores_of(task, many, [0] * 60)["groups"]["language"]
    assert found["7"]["metrics"] == {"accuracy": {"value": 1.0}}  # too many for intervals
    questions = [Example((k,), (("q", "x y"),), (), gold=gold)
                 for k, gold in enumerate((("x",), (), ("y",)))]
    answer = scores_of(task_named("SQuAD-v2.0"), questions, ["x", "", ""])["groups"]["answer"]
    assert answer["there is one"]["score"]["value"] == 0.5 and answer["none"]["examples"] == 1
    assert scores_of(task, [Example((0,), (("a",),))], [0]) == {}
    many = task_of("accuracy", labels=map(str, range(201)))
    assert "confusion" not in scores_of(many, examples, [0, 0, 1, 0])


@pytest.mark.parametrize("labels", [
    ["thing", "animal"], ["x" * 90, "y"], ["日本語のとても長いラベルです" * 4, "b"],
    [f"label{k}" for k in range(60)], [f"l{k}" for k in range(14)]])
def test_tables_fit_80_columns(labels, monkeypatch):
    monkeypatch.setattr(metrics, "_SAMPLES", 50)
    dice = random.Random(1)
    gold, guess = ([dice.randrange(len(labels)) for _ in range(99)] for _ in range(2))
    names = ("accuracy", "macro_f1", "matthews_multi")
    task = dataclasses.replace(task_of(*names, labels=labels), columns={"group": "language"})
    examples = [dataclasses.replace(example, group=labels[k % 2])
                for k, example in enumerate(labeled(gold))]
    text = as_text("val", scores_of(task, examples, guess))
    for line in text.splitlines():
        assert sum(1 + (unicodedata.east_asian_width(x) in "WF") for x in line) <= 80, line
    assert "95 % interval" in text and "precision" in text and "language" in text
    assert ("... and 20 more in the JSON" in text) == (len(labels) == 60)
    assert ("60 columns do not fit here" in text) == (len(labels) == 60)


def test_own_test_tables_are_scored_by_name_and_a_saved_model_scores_a_file(
        process_group, tmp_path, capsys):
    rows = [row | {"from": ("mail", "phone")[n % 2]}
            for n, row in enumerate(rows_of("classification", 24))]
    path = write_task(tmp_path, "classification", rows, "epochs = 1\nlearning_rate = 1e-9",
                      group="from", test="test.jsonl",
                      tests={"old": "old.jsonl", "bare": "bare.jsonl"})
    write_lines(tmp_path / "test.jsonl", rows[:12])
    write_lines(tmp_path / "old.jsonl", rows[6:])
    write_lines(tmp_path / "bare.jsonl",
                ({"words": row["words"], "extra": row["extra"]} for row in rows))
    result = train(path, tmp_path / "out")
    run = tmp_path / "out" / "mine" / "seed-1"
    assert {name: found["examples"] for name, found in result["scores"].items()} == {
        "val": 24, "test": 12, "old": 18}  # the bare one has no labels
    assert json.loads((run / "scores.json").read_text()) == result["scores"]
    assert {file.stem for file in (run / "submission").iterdir()} == {"mine", "old", "bare"}
    assert set(result["scores"]["old"]["groups"]["from"]) == {"mail", "phone"}
    assert result["diagnostics"]["old"]["accuracy"] == (
        result["scores"]["old"]["metrics"]["accuracy"]["value"])
    summary = sweep.summarize([load_own_task(path)[0]], [result])
    text = sweep.table(summary)
    assert "are its mean of accuracy and macro_f1" in text and "old" in text
    assert result["failed"] and f"mine: 1 of 1 failed: {result['failure']}" in text
    assert "another learning_rate" in text

    shutil.move(run / "model", tmp_path / "alone")
    saved = load_finetuned(tmp_path / "alone")
    assert saved.failure == result["failure"]  # predict.py warns by it
    table, out = tmp_path / "new.jsonl", tmp_path / "new.predicted.jsonl"
    write_lines(table, [rows[0] | {"label": "unheard of"}, *rows[1:]])
    assert len(predict(saved, table, out)) == 24
    found = json.loads((tmp_path / "new.predicted.scores.json").read_text())
    assert found["examples"] == 23 and found["unlabelled"] == 1
    said = capsys.readouterr()
    assert "1 rows are not scored, as their label cannot be read" in said.err
    assert "'unheard of'" in said.err and "23 examples, 1 more without a label" in said.out
    predict(saved, tmp_path / "bare.jsonl", out)
    assert not (tmp_path / "new.predicted.scores.json").exists()  # it was of another table


def test_a_model_that_was_kept_before_its_run_diverged_is_marked(tmp_path):
    saved_model(tmp_path / "model", "CB")
    write_result(SimpleNamespace(out=tmp_path), {"failure": "step 9: the loss is nan"})
    assert load_finetuned(tmp_path / "model").failure == "step 9: the loss is nan"


def test_the_majority_of_several_labels_is_above_half_of_the_examples():
    examples = [Example((n,), (("a",),), label) for n, label in enumerate(
        [(1, 0, 1), (1, 1, 0), (1, 0, 0), (0, 1, 1)])]
    task = task_of("micro_f1", head="multilabel", labels="abc")
    assert metrics.baseline(task, examples) == [(1, 0, 0)] * 4


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
    found = metrics.score(task, examples, guess)
    assert {key: round(100 * value, 2) for key, value in found.items()} == GOLDEN_BASELINES[name]
    assert metrics.failure(task, examples, guess).startswith("every prediction is")


def test_failed_runs():
    task, gold = task_named("RTE"), labeled([0, 0, 0, 1, 1])
    assert metrics.failure(task, gold, [1] * 5) == "every prediction is 'entailment'"
    assert metrics.failure(task, gold, [0, 0, 1, 0, 1]) == (
        "accuracy 60.0 is not above the majority's 60.0")
    assert metrics.failure(task, gold, [0, 0, 0, 0, 1]) == ""
    assert metrics.confusion(task, gold, [0, 0, 1, 0, 1]) == [[2, 1], [1, 1]]
