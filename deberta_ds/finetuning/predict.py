"""Scores of a whole split over all ranks, exactly, every example once in any world size; and what
is predicted by them.

Batches are cut from the whole split before they are dealt to ranks, so which examples share a batch
does not depend on how many ranks there are. Ranks that run out repeat a batch and drop its scores,
because under ZeRO-3 every rank must make the same number of forward passes.

"No answer" is said where its score is higher by more than a threshold, the one that has the best F1
on the validation set, as in find_best_thresh of the official evaluate-v2.0.py.
"""

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import softmax

from deberta_ds.cluster import dist
from deberta_ds.finetuning.features import Feature, FeatureBatch, collate
from deberta_ds.finetuning.heads import END, MARGIN, NEVER, START, TaskOutput
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.metrics import PREFIXED, Prediction, f1_v2_of, spans_of
from deberta_ds.tasks.task import Task

_WIDTH, _MOST_ROWS, _HEAD_WIDTH, _LEAST_NAME = 80, 40, 12, 8  # of a printed table
INNER, LOST = NEVER, 2 * NEVER  # scores of words without a token of their own: Feature.inner, .lost


def score_split(forward: Callable[[FeatureBatch], TaskOutput], task: Task,
                examples: Sequence[Example], features: Sequence[Feature], *,
                global_batch_size: int, device: torch.device) -> list[np.ndarray]:
    """Return the fp64 scores of every example, in order and on every rank.

    `features` are those of `examples`. `forward` runs in evaluation mode.
    """
    sizes = [num_scores(task, example) for example in examples]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    totals = torch.zeros(int(starts[-1]), dtype=torch.float64)
    order = sorted(range(len(features)), key=lambda i: (-features[i].num_tokens, i))
    batches = [order[i : i + global_batch_size] for i in range(0, len(order), global_batch_size)]
    rank, world = dist.rank(), dist.world_size()
    for first in range(0, len(batches), world):
        mine = first + rank
        chosen = batches[min(mine, len(batches) - 1)]
        batch = collate([features[i] for i in chosen]).to(device)
        with torch.no_grad():
            scores = forward(batch).scores.double().flatten().cpu()
        if mine < len(batches):
            for i, part in zip(chosen, scores.split([sizes[i] for i in chosen]), strict=True):
                totals[starts[i] : starts[i + 1]] = part
    totals = dist.sum_over_ranks(totals.to(device)).cpu().numpy()
    parts = [totals[starts[i] : starts[i + 1]] for i in range(len(features))]
    for feature, part in zip(features, parts, strict=True):
        for slots, value in ((feature.inner, INNER), (feature.lost, LOST)):
            if slots:
                part.reshape(feature.num_slots, -1)[list(slots)] = value
    return parts


def _tags(task: Task, scores: np.ndarray) -> tuple[int, ...]:
    """Return the tag of each word; one inside a token goes on with the tag of the token, one
    without a token (a space) is part of an entity that goes on behind it."""
    labels = {label: number for number, label in enumerate(task.labels)}
    goes_on = [labels.get(f"I{name[1:]}", number) if name[:2] == "B-" else number
               for name, number in labels.items()]
    tags, tops, last = scores.argmax(-1).tolist(), scores.max(-1, initial=LOST), 0
    for word in range(len(tags)):
        if tops[word] == INNER:
            tags[word] = goes_on[last]
        last = tags[word] if tops[word] != LOST else last
    for word in reversed(np.flatnonzero(tops == LOST)):
        before, behind = (tags[at] if 0 <= at < len(tags) else 0 for at in (word - 1, word + 1))
        goes_through = goes_on[before] == behind or "O" not in labels
        tags[word] = behind if goes_through else labels["O"]
    return tuple(tags)


def entities_in(
    task: Task, example: Example, tags: Sequence[str], scores: np.ndarray
) -> list[dict[str, Any]]:
    """Return the entities that tags mark in a text, with the mean probability of the tags of their
    tokens; of tags that mark no spans, every word.
    """
    text, words = example.sequences[0][0], example.spans
    rows = scores.reshape(len(words), -1)
    best = np.where(rows.max(-1) > INNER, softmax(rows, -1).max(-1), np.nan)
    spans = spans_of(tags) if any(map(PREFIXED.fullmatch, task.labels)) else [
        (tag, number, number + 1) for number, tag in enumerate(tags)]
    return [{"start": words[first].start, "end": words[end - 1].end, "label": name,
             "text": text[words[first].start : words[end - 1].end],
             "probability": round(float(np.nan_to_num(np.nanmean(best[first:end]))), 5)}
            for name, first, end in spans]


def num_scores(task: Task, example: Example) -> int:
    """Return how many scores the head of `task` gives `example`."""
    if task.head == "mentions":
        return len(example.spans)
    if task.head == "tags":
        return len(example.spans) * len(task.labels)
    if task.head == "answer":
        return 4  # as heads.best_answers returns them
    return len(task.labels)


def answer_place(example: Example, numbers: np.ndarray) -> tuple[int, int]:
    """Return the characters [start, end) of the best answer, without spaces around it."""
    start, end = int(numbers[START]), int(numbers[END])
    found = example.sequences[0][1][start:end]
    start += len(found) - len(found.lstrip())
    return start, start + len(found.strip())


def answer_text(example: Example, numbers: np.ndarray, threshold: float | None) -> str:
    """Return the answer, "" for none; a `threshold` of None: there always is one."""
    if threshold is not None and numbers[MARGIN] > threshold:
        return ""
    start, end = answer_place(example, numbers)
    return example.sequences[0][1][start:end]


def best_threshold(examples: Sequence[Example], scores: Sequence[np.ndarray]) -> float:
    """Return the margin above which "no answer" is said so that F1 over `examples` is best.

    It lies in the middle between two margins, so that rounding moves no example across it.
    """
    margins = np.array([numbers[MARGIN] for numbers in scores])
    gains = []  # of the answer over saying nothing
    for example, numbers in zip(examples, scores, strict=True):
        text = answer_text(example, numbers, None)
        gains.append(f1_v2_of(example, text) - f1_v2_of(example, ""))
    order = np.argsort(margins, kind="stable")
    levels, counts = np.unique(margins, return_counts=True)
    totals = np.concatenate([[0.0], np.cumsum(np.array(gains)[order])])
    totals = totals[np.concatenate([[0], np.cumsum(counts)])]  # equal margins fall together
    edges = np.concatenate([[levels[0] - 1], (levels[1:] + levels[:-1]) / 2, [levels[-1] + 1]])
    return float(edges[int(totals.argmax())])


def predictions_of(
    task: Task, examples: Sequence[Example], scores: Sequence[np.ndarray], threshold: float = 0.0
) -> Sequence[Prediction]:
    """Return what is predicted of each example, in the form of `Example.label`.

    A class, a number, 0 or 1 for each of several labels (score above 0), the class of each word;
    of ReCoRD, the string of the best mention; of answers, the best one, or "" where no answer
    scores more than it by `threshold`.
    """
    if task.head == "answer":
        limit = threshold if task.no_answer else None
        return [answer_text(*pair, limit) for pair in zip(examples, scores, strict=True)]
    if task.head == "regress":
        return [float(values[0]) for values in scores]
    if task.head == "multilabel":
        return [tuple((values > 0).astype(int).tolist()) for values in scores]
    if task.head == "tags":
        return [_tags(task, values.reshape(-1, len(task.labels))) for values in scores]
    best = [int(np.argmax(values)) for values in scores]
    if task.head != "mentions":
        return best
    return [example.names[mention] for example, mention in zip(examples, best, strict=True)]


def files_of(task: Task, examples: Sequence[Example], guesses: Sequence[Prediction],
             scores: Sequence[np.ndarray]) -> dict[str, str]:
    """Return {name: text} of the files that show what is predicted of the validation set; of
    answers also what the official scripts read: predictions.json, and null_odds.json for v2.0.
    """
    lines = [{"key": example.key,
              "label": example.gold if example.names or example.id else example.label,
              "prediction": guess, "scores": [round(float(value), 5) for value in values]}
             for example, guess, values in zip(examples, guesses, scores, strict=True)]
    files = {"val_predictions.jsonl": "".join(json.dumps(line) + "\n" for line in lines)}
    if task.head == "answer":
        names = [example.id for example in examples]
        odds = [round(float(numbers[MARGIN]), 6) for numbers in scores]
        for name, values in (("predictions.json", guesses), ("null_odds.json", odds)):
            found = dict(zip(names, values, strict=True))
            files[name] = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    return files


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
    """Return a share as percent with one decimal, "-" if there is none."""
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
