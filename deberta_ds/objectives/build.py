"""RunConfig -> the model that is trained."""

from torch import nn

from deberta_ds.config import RunConfig
from deberta_ds.model.encoder import Encoder
from deberta_ds.objectives.mlm import MlmModel
from deberta_ds.objectives.rtd import RtdModel


def build_model(run: RunConfig, valid_vocab: int | None = None) -> nn.Module:
    """Return the uninitialized MlmModel or RtdModel of a run.

    `valid_vocab` is the tokenizer's size: rows of the table above it are outside every softmax.
    """
    layers = run.train.checkpoint_layers
    if run.objective.kind == "mlm":
        model = MlmModel(run.model, valid_vocab, layers)
    else:
        model = RtdModel(run.model, run.generator_model, run.objective,
                         sampling_seed=run.data.seed, valid_vocab=valid_vocab,
                         checkpoint_layers=layers)
    for module in model.modules():
        if isinstance(module, Encoder):
            module.recompute = run.train.recompute
    return model
