"""What changed numbers of fine-tuning without a test noticing (docs/evidence/reliability.md)."""

import numpy as np

from deberta_ds.finetuning import metrics
from deberta_ds.finetuning.layouts import Example
from deberta_ds.finetuning.tasks import Task


def task_of(name: str, head: str, labels=()) -> Task:
    return Task(name="mine", head=head, texts=("a",), labels=tuple(labels), metrics=(name,))


def test_a_constant_up_to_rounding_correlates_with_nothing():
    rows = np.array([[1.0, 1.0], [1 + 2**-52, 2.0], [1.0, 3.0], [1 + 2**-52, 4.0]])
    assert metrics.value_of("pearson", task_of("pearson", "regress"), rows) == 0.0


def test_a_gold_answer_of_articles_alone_is_dropped_next_to_another():
    """As evaluate-v2.0.py: `[a for a in golds if normalize_answer(a)]`, [""] if none is left."""
    for gold, right in ((("the", "cat"), 0.0), (("the",), 1.0)):
        example = Example((0,), (("q", "the cat"),), (), gold=gold)
        assert metrics.score(task_of("em_v2", "answer"), [example], [""]) == {"em_v2": right}


def test_the_majority_of_several_labels_is_above_half_of_the_examples():
    examples = [Example((n,), (("a",),), label) for n, label in enumerate(
        [(1, 0, 1), (1, 1, 0), (1, 0, 0), (0, 1, 1)])]
    task = task_of("micro_f1", "multilabel", "abc")
    assert metrics.baseline(task, examples) == [(1, 0, 0)] * 4
