"""Scores of an evaluation, each under its function's name: higher is better.

    [evaluate]
    metrics = ["examples/more_scores.py:recall"]

Called on rank 0 with the sums over the held-out sequences ("targets", "tokens" and what the
objective's forward returns) and with what the objective returns per token (replaced-token
detection: "logits" and "replaced", [N]; masked LM: nothing). With several held-out corpora, it is
called for all of them together and for each.
"""

import math


def recall(total: dict, per_token: dict) -> float:
    """Share of the replaced tokens that the discriminator finds."""
    return float(
        ((per_token["logits"] > 0) & per_token["replaced"]).sum() / per_token["replaced"].sum()
    )


def saved_bits(total: dict, per_token: dict) -> float:
    """Minus the bits per masked token: 0 is a model that is certain and right."""
    return -total["masked_loss"] / total["targets"] / math.log(2)
