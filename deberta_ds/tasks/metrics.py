"""The metrics of SuperGLUE and GLUE as the official code computes them, and of own tasks.

Every value is a share in [0, 1] (correlations: in [-1, 1]), and more is better. A metric is two
functions: the rows that the examples contribute, and the value of any sample of such rows, so that
intervals need no second formula. Those are the 2.5 and 97.5 percentiles of 1,000 bootstrap samples
(of over 20,000 rows fewer, at least 100): the metric's units (examples, of MultiRC questions) are
sampled with replacement, by one seed, and the score, their mean, with them.

Sources: scikit-learn; jiant/tasks/tasks.py (CB), huggingface/datasets metrics/super_glue (MultiRC,
AX-b), metrics/glue and record_evaluation.py (ReCoRD), SQuAD's evaluate-v1.1.py and
evaluate-v2.0.py, jiant metrics/winogender_metrics.py (AX-g), chakki-works/seqeval
metrics/sequence_labeling.py. A third MultiRC number, which differs between all code bases, is not
scored and not computed here.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deberta_ds.tasks.answer_texts import normalize, token_f1
from deberta_ds.tasks.layouts import Example, is_labeled
from deberta_ds.tasks.task import Task

# In the form of `Example.label`: a class index, a number, 0 or 1 for each label, the class of each
# word; for ReCoRD and SQuAD the answer string.
Prediction = Any
Examples = Sequence[Example]
Predictions = Sequence[Prediction]
_SAMPLES, _MOST_SAMPLED, _LEAST_SAMPLES = 1000, 20_000_000, 100
_MOST_GROUPS = 50  # with intervals, which take about 0.1 s each
_MOST_LABELS = 200  # with a confusion matrix: one of 1,000 labels has a million numbers


def score(task: Task, examples: Examples, predictions: Predictions) -> dict[str, float]:
    """Return every metric of `task` by name, over the whole split (never over one rank's share)."""
    return {name: value_of(name, task, rows_of(name, task, examples, predictions))
            for name in task.metrics}


def rows_of(name: str, task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return what the units of metric `name` (examples, MultiRC's questions, AX-g's pairs) give."""
    assert len(examples) == len(predictions)
    return _METRICS[name][0](task, examples, predictions)


def value_of(name: str, task: Task, rows: np.ndarray) -> float:
    """Return metric `name` of `rows`, which are those of `rows_of` or a sample of them."""
    return float(_METRICS[name][1](task, rows))


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
        rows = [example.label for example in examples]
        (tag, _), *_ = Counter(tag for row in rows for tag in row).most_common(1)
        return [(tag,) * len(row) for row in rows]
    constants: list[list[Prediction]] = [[label] * len(examples)
                                         for label in range(len(task.labels))]
    return max(constants, key=lambda guess: task_score(task, score(task, examples, guess)))


def failure(task: Task, examples: Examples, predictions: Predictions) -> str:
    """Return why a run failed, "" if it did not: constant, or no better than `baseline`."""
    kinds = {tag for guess in predictions for tag in guess} if task.head == "tags" else set(
        predictions)
    if len(kinds) == 1 and len(predictions) > 1:
        (kind,) = kinds
        named = task.head not in ("regress", "answer", "mentions", "multilabel")
        return f"every prediction is {(task.labels[kind] if named else kind)!r}"
    constant = baseline(task, examples)
    found, guess = (task_score(task, score(task, examples, p)) for p in (predictions, constant))
    if found > guess:
        return ""
    return f"{score_name(task)} {100 * found:.1f} is not above the majority's {100 * guess:.1f}"


def score_name(task: Task) -> str:
    """Return what `task_score` is: a metric, or the mean of several."""
    *some, last = task.metrics
    return f"mean of {', '.join(some)} and {last}" if some else last


def confusion(task: Task, examples: Examples, predictions: Predictions) -> list[list[int]]:
    """Return counts [gold class][predicted class], of tags over all words; `task.labels` order."""
    gold, guess = _classes(task, examples, predictions).T
    size = len(task.labels)
    return np.bincount(gold * size + guess, minlength=size * size).reshape(size, size).tolist()


def class_counts(
    task: Task, examples: Examples, predictions: Predictions
) -> dict[str, tuple[int, int, int]]:
    """Return {label: (right, in gold, predicted)}; where spans are scored, by the kind of span."""
    if "span_f1" in task.metrics:
        hits, right, guessed = (Counter(kind for _, kind, *_ in spans)
                                for spans in _spans(task, examples, predictions))
        return {kind or "(no kind)": (hits[kind], right[kind], guessed[kind])
                for kind in sorted(right | guessed)}
    counts = _counts(task, _classes(task, examples, predictions))
    return dict(zip(task.labels, zip(*counts.tolist(), strict=True), strict=True))


def scores_of(task: Task, examples: Examples, predictions: Predictions) -> dict[str, Any]:
    """Return the scores of the labeled examples as JSON has them, {} if none is labeled.

    "metrics" and "score" hold {"value", "low", "high"}; "classes" {"precision", "recall", "f1",
    "support"}; "groups" the first two for each value of the task's `group` column, and of SQuAD
    v2.0 for questions with and without an answer.
    """
    pairs = [pair for pair in zip(examples, predictions, strict=True) if is_labeled(pair[0])]
    if not pairs:
        return {}
    gold, guesses = zip(*pairs, strict=True)
    found: dict[str, Any] = {"examples": len(pairs), "unlabelled": len(examples) - len(pairs),
                             "score_is": score_name(task)}
    found |= _measured(task, gold, guesses, _SAMPLES)
    found["majority"] = score(task, gold, baseline(task, gold))
    if task.head not in ("regress", "answer", "mentions"):
        found["classes"] = {
            name: {"precision": hits / max(guessed, 1), "recall": hits / max(right, 1),
                   "f1": 2 * hits / max(right + guessed, 1), "support": right}
            for name, (hits, right, guessed) in class_counts(task, gold, guesses).items()}
        if task.head != "multilabel" and len(task.labels) <= _MOST_LABELS:
            found |= {"labels": list(task.labels),
                      "confusion": confusion(task, gold, guesses)}
    found["groups"] = {column: _by_group(task, pairs, [example.group for example in gold])
                       for key, column in task.columns.items() if key == "group"}
    if task.no_answer:
        found["groups"]["answer"] = _by_group(
            task, pairs, ["there is one" if example.gold else "none" for example in gold])
    return found


def _by_group(task: Task, pairs: Sequence, groups: Sequence[str | None]) -> dict[str, Any]:
    """Return the scores of each group, the largest first."""
    members: dict[str, list] = {}
    for pair, group in zip(pairs, groups, strict=True):
        members.setdefault("(none)" if group is None else group, []).append(pair)
    samples = _SAMPLES if len(members) <= _MOST_GROUPS else 0
    return {group: {"examples": len(part)} | _measured(
                task, [example for example, _ in part], [guess for _, guess in part], samples)
            for group, part in sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))}


def _measured(task: Task, examples, predictions, samples: int) -> dict[str, Any]:
    """Return {"metrics", "score"} with their intervals; "score" has none of unlike units."""
    values, sampled, sizes = {}, [], set()
    for name in task.metrics:
        rows = rows_of(name, task, examples, predictions)
        dice = np.random.default_rng(0)  # the same examples for every metric
        count = min(samples, max(_LEAST_SAMPLES, _MOST_SAMPLED // len(rows)))
        sampled.append([value_of(name, task, rows[dice.integers(len(rows), size=len(rows))])
                      for _ in range(count)])
        values[name] = _with_interval(value_of(name, task, rows), sampled[-1])
        sizes.add(len(rows))
    mean = task_score(task, {name: value["value"] for name, value in values.items()})
    joint = np.mean(sampled, axis=0) if len(sizes) == 1 else ()
    return {"metrics": values, "score": _with_interval(mean, joint)}


def _with_interval(value: float, sampled: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(sampled):
        return {"value": value}
    low, high = np.percentile(sampled, (2.5, 97.5))
    return {"value": value, "low": float(low), "high": float(high)}


def _classes(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return gold and predicted classes [units, 2]: those of `_both`, or of all words of tags."""
    if task.head != "tags":
        return _both(task, examples, predictions)
    pairs = [pair for example, guess in zip(examples, predictions, strict=True)
             for pair in zip(example.label, guess, strict=True)]
    return np.array(pairs, dtype=int).reshape(-1, 2)


def _both(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return [examples, gold and predicted], of several labels with a third axis over them."""
    return np.stack([_gold(examples), np.asarray(predictions)], axis=1)


def _gold(examples: Examples) -> np.ndarray:
    return np.array([example.label for example in examples])


def _right(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    right = _gold(examples) == np.asarray(predictions)
    return right if right.ndim == 1 else right.all(-1)


def _mean(task: Task, rows: np.ndarray) -> float:
    return rows.mean()


def _ratio(task: Task, rows: np.ndarray) -> float:
    """Return the sum of the first column over that of the second: an F1 of rows (2 hits, all)."""
    part, whole = rows.sum(0)
    return part / whole if part else 0.0


def _counts(task: Task, rows: np.ndarray) -> np.ndarray:
    """Return [right, in gold, predicted] of each label."""
    if rows.ndim == 3:
        return np.array([rows.all(1).sum(0), *rows.sum(0)])
    gold, guess = rows.T
    return np.array([np.bincount(classes, minlength=len(task.labels))
                     for classes in (gold[gold == guess], gold, guess)])


def _macro_f1(task: Task, rows: np.ndarray) -> float:
    """Return the mean F1 of the classes that occur in gold or predictions (scikit-learn's default).

    CB's official rule is the mean over all three classes; of several labels it is over all.
    """
    hits, gold, guess = _counts(task, rows)
    occurs = (gold + guess > 0) | (task.name == "CB" or rows.ndim == 3)
    return (2 * hits / np.maximum(gold + guess, 1))[occurs].mean()


def _pooled(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return (2 hits, gold + predicted) of label 1, or of all of several; MultiRC: by question."""
    gold, guess = _gold(examples) == 1, np.asarray(predictions) == 1
    rows = np.stack([2 * (gold & guess), gold.astype(int) + guess], axis=1)
    return _by_question(task, examples, rows if rows.ndim == 2 else rows.sum(-1), np.add)


def _by_question(task: Task, examples: Examples, rows: np.ndarray, join: np.ufunc) -> np.ndarray:
    """Return `rows`, those of a MultiRC question's answers joined."""
    if task.layout != "multirc":
        return rows
    numbers: dict[tuple[int, ...], int] = {}
    places = [numbers.setdefault(example.key[:2], len(numbers)) for example in examples]
    found = np.full((len(numbers), *rows.shape[1:]), join.identity, rows.dtype)
    join.at(found, places, rows)
    return found


def _matthews(task: Task, rows: np.ndarray) -> float:
    """Return Matthews's correlation of two classes (AX-b, CoLA) or more (AX); 0 for a constant."""
    hits, gold, guess = _counts(task, rows).astype(float)
    total = len(rows)
    scale = np.sqrt(total**2 - gold @ gold) * np.sqrt(total**2 - guess @ guess)
    return (hits.sum() * total - gold @ guess) / scale if scale else 0.0


def _pearson(task: Task, rows: np.ndarray) -> float:
    """Return the linear correlation of two numbers; 0 for a constant, up to rounding."""
    units = []
    for values in rows.T.astype(float):
        values = values / (np.abs(values).max() or 1.0)
        off = values - values.mean()
        length = np.linalg.norm(off)
        if not length > 1e-13 * np.sqrt(len(off)):
            return 0.0
        units.append(off / length)
    return np.clip(units[0] @ units[1], -1, 1)


def _spearman(task: Task, rows: np.ndarray) -> float:
    """Return the linear correlation of the ranks; equal numbers share their mean rank."""
    from scipy.stats import rankdata

    return _pearson(task, rankdata(rows, axis=0))


def _tags_right(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return (right tags, words) of each example."""
    right = [np.equal(example.label, guess) for example, guess in zip(
        examples, predictions, strict=True)]
    return np.array([(row.sum(), row.size) for row in right])


def _spans(task: Task, examples: Examples, predictions: Predictions) -> tuple[set, set, set]:
    """Return the (example, kind, first word, end word) of hits, of gold and of predictions."""
    gold, guess = (
        {(number, *span) for number, tags in enumerate(rows)
         for span in spans_of([task.labels[tag] for tag in tags])}
        for rows in ([example.label for example in examples], predictions))
    return gold & guess, gold, guess


def _span_hits(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return (2 hits, gold + predicted spans) of each example: kind and both ends must agree."""
    hits, right, guessed = (np.bincount([number for number, *_ in spans], minlength=len(examples))
                            for spans in _spans(task, examples, predictions))
    return np.stack([2 * hits, right + guessed], axis=1)


PREFIXES = tuple("BIESLUM")  # of a tag that begins, continues, ends or is a span
PREFIXED = re.compile(r"[BIESLUM]-.+")  # a tag that says where a span begins


def spans_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (kind, first word, end word) of the spans that IOB1, IOB2, IOBES, BILOU or BMES tags
    mark, by the rule of seqeval (default mode; BILOU and BMES read as the same in IOBES).

    A span starts at B, S, a change of kind, after E or S, or at an I or E after O. A letter of the
    scheme alone (B, I, O) is a span without a kind; any other tag without a dash is a kind of its
    own. The perl script conlleval gives the same for IOB1 and IOB2; it does not know S, and joins
    a B that follows an E.
    """
    spans: list[tuple[str, int, int]] = []
    last_prefix, last_kind, start = "O", "", 0
    for word, tag in enumerate([*tags, "O"]):
        scheme = tag[1:2] == "-" or tag in PREFIXES
        prefix, _, kind = tag.partition("-") if scheme else ("I", "", tag)
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


def _exact(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return for each MultiRC question whether every answer is right, if one is true or not; of
    ReCoRD and SQuAD v1.1 whether the string is exact."""
    if task.layout == "multirc":
        right = _right(task, examples, predictions)
        return _by_question(task, examples, right, np.logical_and).astype(float)
    return _of_answers(_best(str.__eq__))(task, examples, predictions)


def _of_answers(value: Callable[[Example, str], float]) -> Callable[..., np.ndarray]:
    """Return a metric's rows: `value` of each example and its answer."""
    return lambda task, examples, predictions: np.array(
        list(map(value, examples, predictions)), dtype=float)


def _best(compare: Callable[[str, str], float], is_v2: bool = False
          ) -> Callable[[Example, str], float]:
    """Return the value of an answer: the best by `compare` with the normalized gold ones, of which
    SQuAD v2.0 drops those of which nothing is left; without any, "" is right there."""
    def value(example: Example, answer: str) -> float:
        found, *gold = (normalize(text, example.language) for text in (answer, *example.gold))
        gold = [text for text in gold if text] or [""] if is_v2 else gold
        return max(compare(found, text) for text in gold)

    return value


f1_v2_of = _best(lambda found, gold: token_f1(found, gold) or float(found == gold), is_v2=True)


def _same_in_pairs(task: Task, examples: Examples, predictions: Predictions) -> np.ndarray:
    """Return whether AX-g's minimal pairs, lines 2k and 2k+1 by `read_split`, are predicted alike.

    A constant scores 1: read it next to the accuracy. `pair_id` is unique per line and useless.
    """
    return np.asarray(predictions[0::2]) == np.asarray(predictions[1::2])


_METRICS: dict[str, tuple[Callable[..., np.ndarray], Callable[[Task, np.ndarray], float]]] = {
    "accuracy": (_right, _mean),
    "macro_f1": (_both, _macro_f1),
    **dict.fromkeys(("f1a", "binary_f1", "micro_f1"), (_pooled, _ratio)),
    "exact_labels": (_right, _mean),
    **dict.fromkeys(("matthews", "matthews_multi"), (_both, _matthews)),
    "pearson": (_both, _pearson),
    "spearman": (_both, _spearman),
    "tag_accuracy": (_tags_right, _ratio),
    "span_f1": (_span_hits, _ratio),
    "em": (_exact, _mean),
    "f1": (_of_answers(_best(token_f1)), _mean),
    "em_v2": (_of_answers(_best(str.__eq__, is_v2=True)), _mean),
    "f1_v2": (_of_answers(f1_v2_of), _mean),
    "gender_parity": (_same_in_pairs, _mean),
}
