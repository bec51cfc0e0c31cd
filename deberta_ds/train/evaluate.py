"""Scores of both networks on fixed held-out rows with fixed masks and fixed samples.

The same rows, masks and samples for every checkpoint and world size, dropout off. Accuracy of a
discriminator means little (most tokens are original), so it is shown beside the class prior, with
the gain over it in nats, ROC-AUC and average precision (scikit-learn's definitions).

Legend: B batch, L length.
"""

import math

import torch

from deberta_ds import dist
from deberta_ds.data.batch import Row, collate

_ONE = {"targets": torch.ones(()), "tokens": torch.ones(())}


@torch.no_grad()
def evaluate(model, device: torch.device, rows: list[Row], micro_batch_rows: int
             ) -> dict[str, float]:
    """Return the scores over `rows`; call on every rank with the same rows, all get the result.

    `model` is a pretraining model on `device`, or the DeepSpeed engine around one.

    Rank r takes micro-batches r, r + W, ...; a rank that has run out repeats one without counting
    it, because under ZeRO-3 every rank must take part in every forward.
    """
    batches = [collate(rows[start:start + micro_batch_rows])
               for start in range(0, len(rows), micro_batch_rows)]
    turns = math.ceil(len(batches) / dist.world_size())
    norm = {name: one.to(device) for name, one in _ONE.items()}
    totals: dict[str, float] = {"targets": 0.0, "tokens": 0.0}
    logits, replaced = [], []
    model.eval()
    for turn in range(turns):
        number = turn * dist.world_size() + dist.rank()
        batch = batches[min(number, len(batches) - 1)].to(device)
        _, sums, view = model(batch, norm)
        if number >= len(batches):
            continue
        totals["targets"] += batch.num_targets
        totals["tokens"] += batch.num_tokens
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
        if view:
            logits.append(view["logits"][view["real"]].cpu())
            replaced.append(view["replaced"][view["real"]].cpu())
    model.train()
    parts = dist.gather_objects((totals, torch.cat(logits).numpy() if logits else None,
                                 torch.cat(replaced).numpy() if replaced else None))
    return _scores(parts) | {"unigram_accuracy": unigram_accuracy(rows)}


def _scores(parts: list[tuple]) -> dict[str, float]:
    names = set().union(*(totals for totals, _, _ in parts))
    total = {name: sum(totals.get(name, 0.0) for totals, _, _ in parts) for name in names}
    loss = total["generator_loss"] / total["targets"]
    scores = {"generator_loss": loss,
              "generator_accuracy": total["generator_correct"] / total["targets"],
              "generator_perplexity": math.exp(min(loss, 700.0))}
    logits = [part for _, part, _ in parts if part is not None]
    if not logits:
        return scores
    logits = torch.cat([torch.from_numpy(part) for part in logits]).numpy()
    labels = torch.cat([torch.from_numpy(part) for _, _, part in parts if part is not None]).numpy()
    prior = total["replaced"] / total["tokens"]
    loss = total["discriminator_loss"] / total["tokens"]
    scores |= {"discriminator_loss": loss,
               "discriminator_accuracy": total["discriminator_correct"] / total["tokens"],
               "prior_accuracy": max(prior, 1 - prior),
               "discriminator_gain": binary_entropy(prior) - loss}
    if 0 < prior < 1:  # the two areas need both classes
        # Imported here: it would take a quarter of the time from launch to the first step.
        from sklearn.metrics import average_precision_score, roc_auc_score

        scores["roc_auc"] = float(roc_auc_score(labels, logits))
        scores["average_precision"] = float(average_precision_score(labels, logits))
    return scores


def binary_entropy(share: float) -> float:
    """Return the loss in nats of always answering with the class prior `share`."""
    if share <= 0 or share >= 1:
        return 0.0
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


def unigram_accuracy(rows: list[Row]) -> float:
    """Return the accuracy of always predicting these rows' most frequent target: the baseline."""
    labels = torch.cat([torch.from_numpy(row.labels[row.labels >= 0]) for row in rows])
    return float(labels.bincount().max() / labels.numel())
