"""Scores of an evaluation, each under its function's name: higher is better, but of errors.

    [evaluate]
    metrics = ["examples/more_scores.py:recall"]

Called on rank 0 with the sums over the held-out sequences ("targets", "tokens" and what the
objective's forward returns) and with what the objective returns per token (replaced-token
detection: "logits" and "replaced", [N]; masked LM: nothing). With several held-out corpora, it is
called for all of them together and for each.
"""

import math

from deberta_ds.objectives.rtd import areas


def recall(total: dict, per_token: dict) -> float:
    """Share of the replaced tokens that the discriminator finds."""
    return float(
        ((per_token["logits"] > 0) & per_token["replaced"]).sum() / per_token["replaced"].sum()
    )


def saved_bits(total: dict, per_token: dict) -> float:
    """Minus the bits per masked token: 0 is a model that is certain and right."""
    return -total["masked_loss"] / total["targets"] / math.log(2)


def accuracy_error(total: dict, per_token: dict) -> float:
    """Standard error of the generator's accuracy, as if its targets were independent."""
    share = total["generator_correct"] / total["targets"]
    return math.sqrt(share * (1 - share) / total["targets"])


def roc_auc_error(total: dict, per_token: dict) -> float:
    """Standard error of ROC-AUC (Hanley and McNeil 1982), as if tokens were independent."""
    replaced = per_token["replaced"].numpy()
    area = areas(replaced, per_token["logits"].numpy())[0]
    positive, negative = replaced.sum(), (~replaced).sum()
    variance = (area * (1 - area) + (positive - 1) * (area / (2 - area) - area**2)
                + (negative - 1) * (2 * area**2 / (1 + area) - area**2)) / (positive * negative)
    return math.sqrt(variance)
