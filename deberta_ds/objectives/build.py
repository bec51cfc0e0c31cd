"""RunConfig -> its objective, and the model that is trained."""

from torch import nn

from deberta_ds.config.run_config import RunConfig
from deberta_ds.model.encoder import Encoder
from deberta_ds.objectives import mlm, rtd, rtd_cached
from deberta_ds.objectives.base import Objective

# The kinds of config.ObjectiveConfig.
OBJECTIVES: dict[str, Objective] = {"mlm": mlm, "rtd": rtd, "rtd_cached": rtd_cached}


def objective_of(run: RunConfig) -> Objective:
    """Return the module that owns what a run learns."""
    return OBJECTIVES[run.objective.kind]


def build_model(run: RunConfig, valid_vocab: int | None = None) -> nn.Module:
    """Return the uninitialized model of a run.

    `valid_vocab` is the tokenizer's size: rows of the table above it are outside every softmax.
    """
    model = objective_of(run).build(run, valid_vocab)
    for module in model.modules():
        if isinstance(module, Encoder):
            module.checkpointing = run.train.activation_checkpointing
            module.checkpointing_interval = run.train.activation_checkpointing_interval
    return model


def fixed_parameters(run: RunConfig) -> set[str]:
    """Return the names of a run's parameters that do not move."""
    return {"words.weight"} if run.init.embeddings_only else set()
