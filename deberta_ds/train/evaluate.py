"""Scores of a run's networks on fixed held-out rows with fixed masks and fixed samples.

The same rows, masks and samples for every checkpoint and world size, dropout off.
"""

import math

import torch
from torch import Tensor

from deberta_ds import dist
from deberta_ds.data.batch import Row, collate
from deberta_ds.errors import UserError
from deberta_ds.objectives.base import Objective

_ONE = {"targets": torch.ones(()), "tokens": torch.ones(())}


@torch.no_grad()
def evaluate(model, objective: Objective, device: torch.device, rows: list[Row],
             micro_batch_rows: int) -> dict[str, float]:
    """Return the scores over `rows`; call on every rank with the same rows, all get the result.

    `model` is the objective's model on `device`, or the DeepSpeed engine around one. Rank r takes
    micro-batches r, r + W, ...; a rank that has run out repeats one without counting it, because
    under ZeRO-3 every rank must take part in every forward. Raises UserError, on every rank, where
    no token is masked.
    """
    batches = [collate(rows[start:start + micro_batch_rows])
               for start in range(0, len(rows), micro_batch_rows)]
    turns = math.ceil(len(batches) / dist.world_size())
    divisors = {name: one.to(device) for name, one in _ONE.items()}
    totals: dict[str, float] = {"targets": 0.0, "tokens": 0.0}
    views: dict[str, list[Tensor]] = {}
    model.eval()
    for turn in range(turns):
        number = turn * dist.world_size() + dist.rank()
        batch = batches[min(number, len(batches) - 1)].to(device)
        _, sums, view = model(batch, divisors)
        if number >= len(batches):
            continue
        totals["targets"] += batch.num_targets
        totals["tokens"] += batch.num_tokens
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
        for name, value in view.items():
            views.setdefault(name, []).append(value.cpu())
    model.train()
    mine = totals, {name: torch.cat(parts).numpy() for name, parts in views.items()}
    parts = dist.gather_to_main(mine)
    return dist.broadcast_object(
        dist.together(lambda: _scores(objective, parts, rows) if dist.is_main() else None))


def _scores(objective: Objective, parts: list[tuple], rows: list[Row]) -> dict[str, float]:
    names = dict.fromkeys(name for totals, _ in parts for name in totals)
    total = {name: sum(totals.get(name, 0.0) for totals, _ in parts) for name in names}
    if not total["targets"]:
        raise UserError(f"the {len(rows)} held-out rows of data.eval hold no masked token; raise "
                        "objective.mask.rate or train.eval_rows, or name another corpus")
    names = dict.fromkeys(name for _, view in parts for name in view)
    view = {name: torch.cat([torch.from_numpy(view[name]) for _, view in parts if name in view])
            for name in names}
    return objective.scores(total, view) | {"unigram_accuracy": unigram_accuracy(rows)}


def unigram_accuracy(rows: list[Row]) -> float:
    """Return the accuracy of always predicting these rows' most frequent target: the baseline."""
    labels = torch.cat([torch.from_numpy(row.labels[row.labels >= 0]) for row in rows])
    return float(labels.bincount().max() / labels.numel())
