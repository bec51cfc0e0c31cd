"""The metrics of SuperGLUE and GLUE as the official code computes them, and of own tasks.

Every value is a share in [0, 1] (correlations: in [-1, 1]), and more is better. Sources:
jiant/tasks/tasks.py (CB), huggingface/datasets metrics/super_glue (MultiRC, AX-b), metrics/glue and
record_evaluation.py (ReCoRD), SQuAD's evaluate-v1.1.py and evaluate-v2.0.py, jiant
metrics/winogender_metrics.py (AX-g), chakki-works/seqeval metrics/sequence_labeling.py. A third
MultiRC number, which differs between all code bases, is not scored and not computed here.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from deberta_ds.finetune.layouts import Example, Label, class_of, classes_of
from deberta_ds.finetune.tasks import Task

# In the form of `Example.label`: a class index, a number, 0 or 1 for each label, the class of each
# word; for ReCoRD and SQuAD the answer string.
Prediction = Label | str


def score(
    task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """Return every metric of `task` by name, over the whole split (never over one rank's share)."""
    if len(examples) != len(predictions):
        raise AssertionError(f"{len(predictions)} predictions for {len(examples)} examples")
    found = {}
    for name in task.metrics:
        labels = {"labels": task.labels} if name in _BY_LABEL else {}
        found[name] = _METRICS[name](examples, predictions, **labels)
    return found


def task_score(task: Task, metrics: Mapping[str, float]) -> float:
    """Return the task's score: the mean of its metrics (the leaderboard's rule)."""
    return float(np.mean([metrics[name] for name in task.metrics]))


def baseline(task: Task, examples: Sequence[Example]) -> list[Prediction]:
    """Return the best constant predictions (of ReCoRD: the passage's most mentioned entity).

    Of a number that is the mean, of several labels the majority of each, of tags the commonest one.
    """
    if task.layout == "record":
        return [Counter(example.names).most_common(1)[0][0] for example in examples]
    if task.head == "answer":  # the commonest answer, "" where most have none
        firsts = Counter((*example.gold, "")[0] for example in examples)
        return [firsts.most_common(1)[0][0]] * len(examples)
    if task.head == "regress":
        return [float(np.mean(_gold(examples)))] * len(examples)
    if task.head == "multilabel":
        shares = np.mean(_gold(examples), axis=0)
        return [tuple((shares > 0.5).astype(int).tolist())] * len(examples)
    if task.head == "tags":
        rows = [classes_of(example.label) for example in examples]
        (tag, _), *_ = Counter(tag for row in rows for tag in row).most_common(1)
        return [(tag,) * len(row) for row in rows]
    constants: list[list[Prediction]] = [[label] * len(examples)
                                         for label in range(len(task.labels))]
    return max(constants, key=lambda guess: task_score(task, score(task, examples, guess)))


def is_failed(task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]) -> bool:
    """Return whether a run failed: constant predictions, or no better than `baseline`."""
    kinds: set[Prediction] = {tag for guess in predictions for tag in classes_of(guess)} \
        if task.head == "tags" else set(predictions)
    if len(kinds) == 1 and len(predictions) > 1:
        return True
    guess = task_score(task, score(task, examples, baseline(task, examples)))
    return task_score(task, score(task, examples, predictions)) <= guess


def confusion(
    task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> list[list[int]]:
    """Return counts [gold class][predicted class]; labels in `task.labels` order."""
    table = [[0] * len(task.labels) for _ in task.labels]
    for example, prediction in zip(examples, predictions, strict=True):
        table[class_of(example.label)][class_of(prediction)] += 1
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


def macro_f1(
    examples: Sequence[Example], predictions: Sequence[Prediction], labels: Sequence[str]
) -> float:
    """Return the mean of the one-against-rest F1 of all classes, present or not (CB's rule).

    Of several labels: the mean of the F1 of each.
    """
    gold, predicted = _gold(examples), np.asarray(predictions)
    if gold.ndim == 1:
        classes = np.arange(len(labels))
        gold, predicted = gold[:, None] == classes, predicted[:, None] == classes
    pairs = zip(gold.T == 1, predicted.T == 1, strict=True)
    return float(np.mean([_binary_f1(*pair) for pair in pairs]))


def pooled_f1(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the F1 of label 1 over the split pooled (MultiRC's answers, MRPC, QQP).

    Of several labels: over every label of every example.
    """
    return _binary_f1(_gold(examples) == 1, np.asarray(predictions) == 1)


def exact_labels(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the share of examples whose labels are all right."""
    return float(np.mean((_gold(examples) == np.asarray(predictions)).all(-1)))


def matthews(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return Matthews's correlation of two classes (AX-b, CoLA) or more (AX); 0 for a constant."""
    from sklearn.metrics import matthews_corrcoef

    gold = _gold(examples)
    if len(np.unique(gold)) == 1:  # scikit-learn's 0 comes with a warning if all guesses are right
        return 0.0
    return float(matthews_corrcoef(gold, np.asarray(predictions)))


def pearson(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the linear correlation of two numbers; 0 for a constant."""
    gold, guess = _gold(examples) - _gold(examples).mean(), np.asarray(predictions, dtype=float)
    guess = guess - guess.mean()
    scale = float(np.sqrt((gold**2).sum() * (guess**2).sum()))
    return float((gold * guess).sum() / scale) if scale > 1e-12 else 0.0


def spearman(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the linear correlation of the ranks; equal numbers share their mean rank."""
    from scipy.stats import rankdata

    ranks = [replace(e, label=r) for e, r in zip(examples, rankdata(_gold(examples)), strict=True)]
    return pearson(ranks, rankdata(predictions))


def tag_accuracy(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the share of words with the right tag."""
    right = [a == b for example, guess in zip(examples, predictions, strict=True)
             for a, b in zip(classes_of(example.label), classes_of(guess), strict=True)]
    return float(np.mean(right))


def span_f1(
    examples: Sequence[Example], predictions: Sequence[Prediction], labels: Sequence[str]
) -> float:
    """Return the F1 of whole spans (seqeval's default, CoNLL-2003's conlleval): kind and both ends
    must agree; micro-averaged over kinds."""
    gold, guess = set(), set()
    for number, (example, prediction) in enumerate(zip(examples, predictions, strict=True)):
        right, guessed = classes_of(example.label), classes_of(prediction)
        gold |= {(number, *span) for span in spans_of([labels[tag] for tag in right])}
        guess |= {(number, *span) for span in spans_of([labels[tag] for tag in guessed])}
    shared = len(gold & guess)
    return 2 * shared / (len(gold) + len(guess)) if shared else 0.0


def spans_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (kind, first word, end word) of the spans that IOB1, IOB2, IOBES, BILOU or BMES tags
    mark.

    A span starts at B-, S-, a change of kind, after E- or S-, or at an I- or E- after O; tags
    without a dash are kinds of their own.
    """
    spans: list[tuple[str, int, int]] = []
    last_prefix, last_kind, start = "O", "", 0
    for word, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-") if tag[1:2] == "-" else ("I", "", tag)
        prefix = {"L": "E", "U": "S", "M": "I"}.get(prefix, prefix)  # BILOU, BMES
        if tag == "O":
            prefix, kind = "O", ""
        inside = (last_prefix in "BI" and prefix in "IE" and kind == last_kind)
        if last_prefix != "O" and not inside:
            spans.append((last_kind, start, word))
        if prefix != "O" and not inside:
            start = word
        last_prefix, last_kind = prefix, kind
    return spans


def exact_match(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return MultiRC's share of questions whose every answer is right; of ReCoRD and SQuAD v1.1 the
    share of exact strings.

    A MultiRC question without a true answer counts like any other.
    """
    if examples[0].gold:
        return _best_of_gold(examples, predictions, lambda a, b: float(a == b))
    right: dict[tuple[int, ...], bool] = {}
    for example, prediction in zip(examples, predictions, strict=True):
        question = example.key[:2]
        right[question] = right.get(question, True) and example.label == prediction
    return float(np.mean(list(right.values())))


def record_f1(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return the bag-of-tokens F1 against the best gold string, averaged (ReCoRD, SQuAD v1.1)."""
    return _best_of_gold(examples, predictions, _token_f1)


def f1_v2(examples: Sequence[Example], predictions: Sequence[str]) -> float:
    """Return SQuAD v2.0's F1: as `record_f1`, and "" is right where there is no answer."""
    return float(np.mean([f1_v2_of(*pair) for pair in zip(examples, predictions, strict=True)]))


def f1_v2_of(example: Example, answer: str) -> float:
    """Return SQuAD v2.0's F1 of one answer, "" for none."""
    found = normalize(answer)
    return max(_token_f1(found, gold) if found and gold else float(found == gold)
               for gold in _gold_v2(example))


def exact_match_v2(examples: Sequence[Example], predictions: Sequence[str]) -> float:
    """Return SQuAD v2.0's share of exact answers; "" is right where there is none."""
    right = [normalize(answer) in _gold_v2(example)
             for example, answer in zip(examples, predictions, strict=True)]
    return float(np.mean(right))


def _gold_v2(example: Example) -> list[str]:
    """Return the normalized answers, [""] for none; v2.0 drops those of which nothing is left."""
    return [gold for gold in map(normalize, example.gold) if gold] or [""]


def _best_of_gold(examples, predictions, compare: Callable[[str, str], float]) -> float:
    values = [
        max(compare(normalize(prediction), normalize(gold)) for gold in example.gold)
        for example, prediction in zip(examples, predictions, strict=True)
    ]
    return float(np.mean(values))


def normalize(answer: str) -> str:
    """Return an answer lower-cased, without ASCII punctuation, articles or extra spaces."""
    answer = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def _token_f1(predicted: str, gold: str) -> float:
    first, second = predicted.split(), gold.split()
    shared = sum((Counter(first) & Counter(second)).values())
    return 2 * shared / (len(first) + len(second)) if shared else 0.0


def gender_parity(examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
    """Return AX-g's share of minimal pairs (lines 2k and 2k+1) that get the same prediction.

    A constant scores 1: read it beside the accuracy. `pair_id` is unique per line and useless.
    """
    even, odd = np.asarray(predictions[0::2]), np.asarray(predictions[1::2])
    for first, second in zip(examples[0::2], examples[1::2], strict=True):
        if first.sequences[0][1] != second.sequences[0][1]:
            raise AssertionError(f"AX-g rows {first.key} and {second.key} are not a pair")
    return float(np.mean(even == odd))


_METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "macro_f1": macro_f1,
    "f1a": pooled_f1,
    "binary_f1": pooled_f1,
    "micro_f1": pooled_f1,
    "exact_labels": exact_labels,
    "matthews_multi": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "tag_accuracy": tag_accuracy,
    "span_f1": span_f1,
    "em": exact_match,
    "f1": record_f1,
    "em_v2": exact_match_v2,
    "f1_v2": f1_v2,
    "matthews": matthews,
    "gender_parity": gender_parity,
}
_BY_LABEL = ("macro_f1", "span_f1")  # metrics that must know all labels
METRIC_NAMES = tuple(_METRICS)
