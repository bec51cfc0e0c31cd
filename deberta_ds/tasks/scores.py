"""What a paper needs of a labelled table: metrics with intervals, by class and by group.

Intervals are the 2.5 and 97.5 percentiles of 1,000 bootstrap samples (of over 20,000 rows fewer, at
least 100): the metric's units (examples, of MultiRC questions) are sampled with replacement, by one
seed. The score, the mean of the metrics, is sampled jointly with them.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deberta_ds.tasks import metrics
from deberta_ds.tasks.layouts import Example, is_labelled
from deberta_ds.tasks.task import Task

FILE = "scores.json"
_SAMPLES, _MOST_SAMPLED, _LEAST_SAMPLES = 1000, 20_000_000, 100
_MOST_GROUPS = 50  # with intervals, which take about 0.1 s each
_MOST_LABELS = 200  # with a confusion matrix: one of 1,000 labels has a million numbers
_WIDTH, _MOST_ROWS, _HEAD_WIDTH, _LEAST_NAME = 80, 40, 12, 8  # of a printed table


def scores_of(
    task: Task, examples: Sequence[Example], predictions: Sequence[metrics.Prediction]
) -> dict[str, Any]:
    """Return the scores of the labelled examples as JSON has them, {} if none is labelled.

    "metrics" and "score" hold {"value", "low", "high"}; "classes" {"precision", "recall", "f1",
    "support"}; "groups" the first two for each value of the task's `group` column, and of SQuAD
    v2.0 for questions with and without an answer.
    """
    pairs = [pair for pair in zip(examples, predictions, strict=True) if is_labelled(pair[0])]
    if not pairs:
        return {}
    gold, guesses = zip(*pairs, strict=True)
    found: dict[str, Any] = {"examples": len(pairs), "unlabelled": len(examples) - len(pairs),
                             "score_is": metrics.score_name(task)}
    found |= _measured(task, gold, guesses, _SAMPLES)
    found["majority"] = metrics.score(task, gold, metrics.baseline(task, gold))
    if task.head not in ("regress", "answer", "mentions"):
        found["classes"] = {
            name: {"precision": hits / max(guessed, 1), "recall": hits / max(right, 1),
                   "f1": 2 * hits / max(right + guessed, 1), "support": right}
            for name, (hits, right, guessed) in metrics.class_counts(task, gold, guesses).items()}
        if task.head != "multilabel" and len(task.labels) <= _MOST_LABELS:
            found |= {"labels": list(task.labels),
                      "confusion": metrics.confusion(task, gold, guesses)}
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
        rows = metrics.rows_of(name, task, examples, predictions)
        dice = np.random.default_rng(0)  # the same examples for every metric
        count = min(samples, max(_LEAST_SAMPLES, _MOST_SAMPLED // len(rows)))
        sampled.append([metrics.value_of(name, task, rows[dice.integers(len(rows), size=len(rows))])
                      for _ in range(count)])
        values[name] = _with_interval(metrics.value_of(name, task, rows), sampled[-1])
        sizes.add(len(rows))
    score = metrics.task_score(task, {name: value["value"] for name, value in values.items()})
    joint = np.mean(sampled, axis=0) if len(sizes) == 1 else ()
    return {"metrics": values, "score": _with_interval(score, joint)}


def _with_interval(value: float, sampled: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(sampled):
        return {"value": value}
    low, high = np.percentile(sampled, (2.5, 97.5))
    return {"value": value, "low": float(low), "high": float(high)}


def as_text(title: str, scores: Mapping[str, Any]) -> str:
    """Return tables of at most 80 columns; what does not fit is left to the JSON file."""
    left_out = f", {scores['unlabelled']:,} more without a label" if scores["unlabelled"] else ""
    lines = [f"{title}: {scores['examples']:,} examples{left_out}"]
    majority = scores["majority"]
    rows = [(name, value, majority[name]) for name, value in scores["metrics"].items()]
    if len(rows) > 1:
        rows.append(("mean of these", scores["score"], float(np.mean(list(majority.values())))))
    lines += _table(["metric", "value", "95 % interval", "majority"], [
        [name, percent(value["value"]),
         f"{percent(value.get('low'))} to {percent(value.get('high'))}", percent(constant)]
        for name, value, constant in rows])
    if classes := scores.get("classes"):
        keys = ("precision", "recall", "f1")
        lines += _table(["class", *keys, "support"], [
            [name, *(percent(values[key]) for key in keys), f"{values['support']:,}"]
            for name, values in sorted(classes.items(), key=lambda item: -item[1]["support"])])
    if labels := scores.get("labels"):
        lines += _table(["gold \\ pred.", *(_cut(label, _HEAD_WIDTH) for label in labels)], [
            [label, *map(str, row)] for label, row in
            zip(labels, scores["confusion"], strict=True)])
    for column, groups in scores["groups"].items():
        lines += _table([column, "examples", *scores["metrics"]], [
            [name, f"{group['examples']:,}",
             *(percent(value["value"]) for value in group["metrics"].values())]
            for name, group in groups.items()])
    return "\n".join(lines)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table: names to the left, numbers to the right."""
    shown = [head, *rows[:_MOST_ROWS]]
    widths = [max(_columns(row[k]) for row in shown) for k in range(len(head))]
    room = _WIDTH - sum(widths[1:]) - 2 * len(widths)
    if room < min(widths[0], _LEAST_NAME):
        return ["", f"  {head[0]}: {len(head) - 1} columns do not fit here; they are in the JSON"]
    widths[0] = min(widths[0], room)
    lines = [""]
    for row in shown:
        name = _cut(row[0], room)
        cells = (" " * (width - _columns(cell)) + cell
                 for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"  {name}{' ' * (widths[0] - _columns(name))}  {'  '.join(cells)}")
    if len(rows) > _MOST_ROWS:
        lines.append(f"  ... and {len(rows) - _MOST_ROWS:,} more in the JSON")
    return lines


def _cut(text: str, width: int) -> str:
    while _columns(text) > width:
        text = text[:-2] + "…"
    return text


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
