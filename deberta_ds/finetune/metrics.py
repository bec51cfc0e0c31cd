"""SuperGLUE's metrics as the official code computes them; every value is a share in [0, 1].

(AX-b's correlation is in [-1, 1].) Sources: jiant/tasks/tasks.py (CB), huggingface/datasets
metrics/super_glue (MultiRC, AX-b) and record_evaluation.py (ReCoRD), jiant
metrics/winogender_metrics.py (AX-g). A third MultiRC number, which differs between all code bases,
is not scored and not computed here.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deberta_ds.finetune.layouts import Example
from deberta_ds.finetune.tasks import MAIN_TASKS, Task

Prediction = int | str  # a class index; for ReCoRD the answer string


def score(
    task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """Return every metric of `task` by name, over the whole split (never over one rank's share)."""
    if len(examples) != len(predictions):
        raise AssertionError(f"{len(predictions)} predictions for {len(examples)} examples")
    return {name: _METRICS[name](examples, predictions) for name in task.metrics}


def task_score(task: Task, metrics: Mapping[str, float]) -> float:
    """Return the task's score: the mean of its metrics (the leaderboard's rule)."""
    return float(np.mean([metrics[name] for name in task.metrics]))


def leaderboard_mean(scores: Mapping[str, float]) -> float:
    """Return the mean of the eight main tasks' scores; AX-b and AX-g do not count."""
    return float(np.mean([scores[name] for name in MAIN_TASKS]))


def baseline(task: Task, examples: Sequence[Example]) -> list[Prediction]:
    """Return the best constant predictions (of ReCoRD: the passage's most mentioned entity)."""
    if task.layout == "record":
        return [Counter(example.names).most_common(1)[0][0] for example in examples]
    constants = [[label] * len(examples) for label in range(len(task.labels))]
    return max(constants, key=lambda guess: task_score(task, score(task, examples, guess)))


def is_failed(task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]) -> bool:
    """Return whether a run failed: constant predictions, or no better than `baseline`."""
    if len(set(predictions)) == 1 and len(predictions) > 1:
        return True
    guess = task_score(task, score(task, examples, baseline(task, examples)))
    return task_score(task, score(task, examples, predictions)) <= guess


def confusion(
    task: Task, examples: Sequence[Example], predictions: Sequence[int]
) -> list[list[int]]:
    """Return counts [gold class][predicted class]; labels in `task.labels` order."""
    table = [[0] * len(task.labels) for _ in task.labels]
    for example, prediction in zip(examples, predictions, strict=True):
        table[example.label][prediction] += 1
    return table


def _gold(examples: Sequence[Example]) -> np.ndarray:
    return np.array([example.label for example in examples])


def accuracy(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the share of equal labels."""
    return float(np.mean(_gold(examples) == np.asarray(predictions)))


def _binary_f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    hits = int(np.sum(gold & predicted))
    total = int(gold.sum() + predicted.sum())
    return 2 * hits / total if hits else 0.0


def macro_f1(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return CB's F1: the mean of the one-against-rest F1 of all three classes, present or not."""
    gold, predicted = _gold(examples), np.asarray(predictions)
    return float(np.mean([_binary_f1(gold == label, predicted == label) for label in range(3)]))


def f1a(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return MultiRC's F1 of label 1 over all answers of the split pooled."""
    return _binary_f1(_gold(examples) == 1, np.asarray(predictions) == 1)


def exact_match(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return MultiRC's share of questions whose every answer is right; ReCoRD's of exact strings.

    A MultiRC question without a true answer counts like any other.
    """
    if examples[0].names:
        return _best_of_gold(examples, predictions, lambda a, b: float(a == b))
    right: dict[tuple[int, ...], bool] = {}
    for example, prediction in zip(examples, predictions, strict=True):
        question = example.key[:2]
        right[question] = right.get(question, True) and example.label == prediction
    return float(np.mean(list(right.values())))


def record_f1(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return ReCoRD's bag-of-tokens F1 against the best gold string, averaged over queries."""
    return _best_of_gold(examples, predictions, _token_f1)


def _best_of_gold(examples, predictions, compare: Callable[[str, str], float]) -> float:
    values = [
        max(compare(normalize(prediction), normalize(gold)) for gold in example.gold)
        for example, prediction in zip(examples, predictions, strict=True)
    ]
    return float(np.mean(values))


def normalize(answer: str) -> str:
    """Return a ReCoRD answer lower-cased, without ASCII punctuation, articles or extra spaces."""
    answer = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def _token_f1(predicted: str, gold: str) -> float:
    first, second = predicted.split(), gold.split()
    shared = sum((Counter(first) & Counter(second)).values())
    return 2 * shared / (len(first) + len(second)) if shared else 0.0


def matthews(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return AX-b's Matthews correlation; 0 for constant predictions."""
    gold, predicted = _gold(examples) == 1, np.asarray(predictions) == 1
    both, neither = np.sum(gold & predicted), np.sum(~gold & ~predicted)
    only_gold, only_predicted = np.sum(gold & ~predicted), np.sum(~gold & predicted)
    product = float(gold.sum()) * (~gold).sum() * predicted.sum() * (~predicted).sum()
    return float((both * neither - only_gold * only_predicted) / product**0.5) if product else 0.0


def gender_parity(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return AX-g's share of minimal pairs (lines 2k and 2k+1) that get the same prediction.

    A constant scores 1: read it beside the accuracy. `pair_id` is unique per line and useless.
    """
    even, odd = np.asarray(predictions[0::2]), np.asarray(predictions[1::2])
    for first, second in zip(examples[0::2], examples[1::2], strict=True):
        if first.sequences[0][1] != second.sequences[0][1]:
            raise AssertionError(f"AX-g rows {first.key} and {second.key} are not a pair")
    return float(np.mean(even == odd))


_METRICS: dict[str, Callable[[Sequence[Example], Sequence[Prediction]], float]] = {
    "accuracy": accuracy,
    "macro_f1": macro_f1,
    "f1a": f1a,
    "em": exact_match,
    "f1": record_f1,
    "matthews": matthews,
    "gender_parity": gender_parity,
}
