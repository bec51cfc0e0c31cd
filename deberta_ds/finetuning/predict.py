"""Scores of a whole split over all ranks, exactly: every example once, in any world size.

Batches are cut from the whole split before they are dealt to ranks, so which examples share a batch
does not depend on how many ranks there are. Ranks that run out repeat a batch and drop its scores,
because under ZeRO-3 every rank must make the same number of forward passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import softmax

from deberta_ds.cluster import dist
from deberta_ds.finetuning.answers import NEVER, answer_text
from deberta_ds.finetuning.features import Feature, FeatureBatch, collate
from deberta_ds.finetuning.heads import TaskOutput
from deberta_ds.tasks.annotations import PREFIXED
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.metrics import Prediction, spans_of
from deberta_ds.tasks.task import Task

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
        return 4  # as answers.best_answers returns them
    return len(task.labels)


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
