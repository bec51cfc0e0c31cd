"""RunConfig -> its objective, and the model that is trained."""

from torch import nn

from deberta_ds.base.errors import UserError
from deberta_ds.base.own_code import is_own, load
from deberta_ds.config.run_config import RunConfig
from deberta_ds.model.encoder import Encoder
from deberta_ds.objectives import mlm, rtd, rtd_cached
from deberta_ds.objectives.base import Objective

# The kinds of config.ObjectiveConfig.
OBJECTIVES: dict[str, Objective] = {"mlm": mlm, "rtd": rtd, "rtd_cached": rtd_cached}


def objective_of(run: RunConfig) -> Objective:
    """Return the module that owns what a run learns."""
    return objective_named(run.objective.kind)


def objective_named(kind: str) -> Objective:
    """Return an objective by its kind; UserError for one of one's own that lacks something."""
    if not is_own(kind):
        return OBJECTIVES[kind]
    found = load("objective.kind", kind)
    needed = [*Objective.__annotations__, *(name for name in vars(Objective) if name[0] != "_")]
    if missing := [name for name in needed if not hasattr(found, name)]:
        raise UserError(f"objective.kind: {kind} lacks {', '.join(missing)}; write them as "
                        "deberta_ds/objectives/base.py says, or take another objective's")
    return found


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
