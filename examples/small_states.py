"""An objective: masked LM that also keeps the last layer's states small (activation
regularization; Merity et al., 2017, arXiv 1708.02182).

    [objective]
    kind = "examples/small_states.py"

The module has the names that deberta_ds/objectives/base.py lists under `Objective`. Names that are
not defined here are those of masked LM.
"""

from deberta_ds.objectives import mlm
from deberta_ds.objectives.base import Metric

WEIGHT = 0.01
METRICS = (*mlm.METRICS, Metric("state_size", "State size", "Mean square of the states at the "
                                "masked tokens.", lower_is_better=True, on_console="size"))


def __getattr__(name: str):
    return getattr(mlm, name)


class Model(mlm.MlmModel):
    """Masked LM with one more term in its loss, and one more sum."""

    def forward(self, batch, normalizers):
        states_TC = self.masked_lm.target_states(self.words, batch)
        labels_T = batch.labels.gather(1, batch.target_positions).flatten()
        loss_sum, correct, _ = self.masked_lm.head(states_TC, self.words, labels_T,
                                                   valid_vocab=self.valid_vocab)
        sums = {"masked_loss": loss_sum, "masked_correct": correct,
                "state_size": (states_TC.float().square().mean(-1) * (labels_T >= 0)).sum()}
        loss = (loss_sum + WEIGHT * sums["state_size"]) / normalizers["targets"]
        return loss, {name: value.detach() for name, value in sums.items()}, {}


def build(run, valid_vocab):
    return Model(run.model, valid_vocab)


def means(run, total):
    size = total["state_size"] / total["targets"]
    masked = mlm.means(run, total)
    return masked | {"loss": masked["loss"] + WEIGHT * size, "state_size": size}


def scores(total, per_token):
    return mlm.scores(total, per_token) | {"state_size": total["state_size"] / total["targets"]}
