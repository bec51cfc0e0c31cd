"""Answers that lie in a text: the best one of all windows, and when to say that there is none.

An answer's score is that of its first token plus that of its last; no answer's is twice that of
[CLS], the least over the windows, as every window without the answer points there (BERT's
run_squad.py). The best answer is found exactly, not among the n best starts and ends. "No answer"
is said where its score is higher by more than a threshold, the one that has the best F1 on the
validation set, as in find_best_thresh of the official evaluate-v2.0.py.

Legend: K start and end of every row, R rows, L length, D answer lengths, E examples.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deberta_ds.base.files import write_atomic
from deberta_ds.finetuning.features import FeatureBatch
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.metrics import f1_v2_of

NEVER = -1e30  # a score that no token has; not an infinity, whose difference to itself is NaN
BEST, START, END, MARGIN = range(4)  # the numbers of an example, see best_answers


def best_answers(scores_KL: Tensor, batch: FeatureBatch, max_answer_tokens: int) -> Tensor:
    """Return [E, 4]: the best answer's score, its characters [start, end) in its text, and by how
    much no answer scores more than it."""
    starts_RL, ends_RL = scores_KL[0::2], scores_KL[1::2]
    none_R = starts_RL[:, 0] + ends_RL[:, 0]
    starts_RL = starts_RL.index_fill(1, torch.zeros_like(batch.example_R[:1]), 2 * NEVER)
    length, device = starts_RL.size(1), starts_RL.device
    found = [(starts_RL[:, : length - more] + ends_RL[:, more:]).max(-1)
             for more in range(min(max_answer_tokens, length))]
    best_R, more_R = torch.stack([best.values for best in found], -1).max(-1)
    firsts_RD = torch.stack([best.indices for best in found], -1)
    first_R = firsts_RD.gather(1, more_R[:, None])[:, 0]

    num_examples, rows_R = batch.weights_E.numel(), torch.arange(len(best_R), device=device)

    def of_examples(start, values_R: Tensor, how: str) -> Tensor:
        whole_E = values_R.new_full((num_examples,), start)
        return whole_E.scatter_reduce(0, batch.example_R, values_R, how)

    best_E = of_examples(-torch.inf, best_R, "amax")
    is_best_R = best_R == best_E[batch.example_R]
    last = len(best_R) - 1  # of NaN, none is the best
    row_E = of_examples(last, rows_R.where(is_best_R, last), "amin")
    first_E, more_E = first_R[row_E], more_R[row_E]
    begin_E = batch.characters_RL2[row_E, first_E, 0]
    end_E = batch.characters_RL2[row_E, first_E + more_E, 1]
    margin_E = of_examples(torch.inf, none_R, "amin") - best_E
    return torch.stack([best_E, begin_E.to(best_E), end_E.to(best_E), margin_E], -1)


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


def write_official(directory: Path, examples: Sequence[Example], texts: Sequence[object],
                   scores: Sequence[np.ndarray]) -> None:
    """Write what the official scripts read: predictions.json, and null_odds.json for v2.0."""
    answers = {example.id: text for example, text in zip(examples, texts, strict=True)}
    odds = {example.id: round(float(numbers[MARGIN]), 6)
            for example, numbers in zip(examples, scores, strict=True)}
    for name, values in (("predictions.json", answers), ("null_odds.json", odds)):
        write_atomic(directory / name, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
