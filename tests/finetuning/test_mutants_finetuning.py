"""What changed numbers of fine-tuning without a test noticing (docs/evidence/reliability.md)."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
from test_metrics_references import task_of

from deberta_ds.checkpoint.find import Found
from deberta_ds.finetuning import loop, metrics, predict_file, resume
from deberta_ds.finetuning.inputs import digest
from deberta_ds.finetuning.layouts import Example, TextSpan
from deberta_ds.finetuning.settings import Settings
from deberta_ds.finetuning.submission import render


def test_a_constant_up_to_rounding_correlates_with_nothing():
    rows = np.array([[1.0, 1.0], [1 + 2**-52, 2.0], [1.0, 3.0], [1 + 2**-52, 4.0]])
    assert metrics.value_of("pearson", task_of("pearson", head="regress"), rows) == 0.0


def test_a_gold_answer_of_articles_alone_is_dropped_next_to_another():
    """As evaluate-v2.0.py: `[a for a in golds if normalize_answer(a)]`, [""] if none is left."""
    for gold, right in ((("the", "cat"), 0.0), (("the",), 1.0)):
        example = Example((0,), (("q", "the cat"),), (), gold=gold)
        assert metrics.score(task_of("em_v2", head="answer"), [example], [""]) == {"em_v2": right}


def test_the_majority_of_several_labels_is_above_half_of_the_examples():
    examples = [Example((n,), (("a",),), label) for n, label in enumerate(
        [(1, 0, 1), (1, 1, 0), (1, 0, 0), (0, 1, 1)])]
    task = task_of("micro_f1", head="multilabel", labels="abc")
    assert metrics.baseline(task, examples) == [(1, 0, 0)] * 4


def test_the_best_evaluation_is_that_of_the_metric_that_was_asked_for(monkeypatch):
    scores, values = [], {"accuracy": 0.9, "f1": 0.2}
    progress = SimpleNamespace(step=4, losses=[(0.5, 0.25)], history=[], accept=scores.append)
    settings = SimpleNamespace(best_metric="f1", global_batch_size=8, sift_weight=0.0)
    task = task_of("accuracy")
    job = SimpleNamespace(task=task, settings=settings, seed=0, say=print)
    monkeypatch.setattr(loop, "_evaluate", lambda job, engine: (values, 0.0))
    loop._evaluate_and_keep(job, None, progress, 8, 16, lambda: 1.0)
    assert scores == [0.2] and progress.losses == []
    assert progress.history == [{"step": 4, "epoch": 2.0, "loss": 0.5} | values]


def test_an_evaluation_is_without_dropout_and_training_goes_on_with_it(monkeypatch):
    done = []
    engine = SimpleNamespace(eval=lambda: done.append("eval"), train=lambda: done.append("train"))
    job = SimpleNamespace(task=SimpleNamespace(no_answer=False),
                          tables=SimpleNamespace(val=SimpleNamespace(examples=[])),
                          scores=lambda *_: done.append("scores"))
    monkeypatch.setattr(loop, "predictions_of", lambda *_: [])
    monkeypatch.setattr(loop.metrics, "score", lambda *_: {})
    assert loop._evaluate(job, engine) == ({}, 0.0) and done == ["eval", "scores", "train"]


def test_a_class_of_one_example_weighs_as_many_times_as_it_is_rarer():
    rows = [SimpleNamespace(label=label) for label in (0, 0, 0, 1)]
    found = loop.weights_of_classes(task_of("accuracy", labels="abc"),
                                    SimpleNamespace(class_weights="balanced"), rows)
    assert found == [4 / 9, 4 / 3, 4 / 3]  # scikit-learn's; a class without examples counts as one


def test_updates_of_a_group_are_dealt_by_length_and_made_in_the_groups_own_order():
    """A run that goes on must find the same batches: the formula of the docstring, as a loop."""
    lengths = np.random.default_rng(1).integers(5, 90, 24)
    order = np.random.default_rng([3, 0]).permutation(24)
    for step in range(12):
        low = step // 4 * 4
        rows = sorted(order[2 * low:2 * low + 8].tolist(), key=lambda row: lengths[row])
        turn = np.random.default_rng([3, 0, low]).permutation(4)[step - low]
        assert loop.stream(lengths, 3, step, 2, 4) == rows[2 * turn:2 * turn + 2]


def test_a_save_at_an_evaluation_holds_what_was_evaluated(monkeypatch):
    saved, evaluated = [], []
    monkeypatch.setattr(loop, "Checkpoints", lambda *_: SimpleNamespace(
        restore=lambda: resume.Progress({}, 1), is_due=lambda at_evaluation: at_evaluation,
        save=lambda progress: saved.append(progress.step), seconds=lambda: 0.0))
    monkeypatch.setattr(loop, "train_step", lambda *_, request, **__: SimpleNamespace(
        sums={"loss": 1.0, "adversarial": 0.0}, request=request))
    monkeypatch.setattr(loop, "_evaluate_and_keep",
                        lambda job, engine, progress, *_: evaluated.append(progress.step))
    monkeypatch.setattr(loop, "set_learning_rate", lambda *_: None)
    monkeypatch.setattr(loop, "micro_batches", lambda *_: [])
    settings = Settings(epochs=2, global_batch_size=4, learning_rate=1e-3)
    job = SimpleNamespace(task=task_of("accuracy"), seed=1, settings=settings)
    loop._updates(job, None, settings.optim(7), [SimpleNamespace(num_tokens=3)] * 13, 7)
    assert saved == evaluated == [4, 7]


def test_probabilities_are_those_of_classes_or_of_each_label_alone():
    values = np.array([1.0, -2.0])
    for head, guess, wanted in (("classify", 0, np.exp(values) / np.exp(values).sum()),
                                ("multilabel", (1, 0), 1 / (1 + np.exp(-values)))):
        task = task_of("accuracy", head=head, labels="ab")
        line = predict_file._predicted(task, None, guess, values, {})
        np.testing.assert_allclose(list(line["probabilities"].values()), wanted, atol=5e-6)


def test_a_run_stands_only_for_one_of_the_same_texts_labels_and_answers():
    example = Example((0,), (("a",),), 1)
    changes = ({"sequences": (("b",),)}, {"label": 0}, {"spans": (TextSpan(0, 0, 1),)},
               {"names": ("a",)}, {"gold": ("a",)})
    examples = [example, *(dataclasses.replace(example, **change) for change in changes)]
    task = task_of("accuracy", labels="ab")
    found = {digest(task, SimpleNamespace(examples=[one])) for one in examples}
    assert len(found) == len(examples)


def test_seconds_are_those_of_all_starts(tmp_path, monkeypatch):
    now, progress = [100.0], resume.Progress({}, 1, step=4, seconds=50.0)
    monkeypatch.setattr(resume.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(resume, "read_progress", lambda path: progress)
    monkeypatch.setattr(resume, "keep_best", lambda *_: None)
    monkeypatch.setattr(resume, "find", SimpleNamespace(
        find=lambda *_: Found(tmp_path), load=lambda *_: None))
    job = SimpleNamespace(task=task_of("accuracy"), seed=1, say=print, out=tmp_path)
    checkpoints = resume.Checkpoints(job, None)
    checkpoints.restore()
    now[0] += 7
    assert checkpoints.seconds() == 57.0


def test_entities_of_characters_are_submitted_as_the_training_table_has_them():
    example = Example((7,), (("a bc d",),), None, tuple(TextSpan(0, n, n + 1) for n in range(6)))
    task = task_of("span_f1", head="tags", labels=("O", "B-X", "I-X"))
    task = dataclasses.replace(task, words="raw")
    line = json.loads(render(task, [example], [(1, 0, 1, 2, 0, 0)]))
    assert line == {"idx": 7, "label": [[0, 1, "X"], [2, 4, "X"]]}
