"""Masked language modeling with the enhanced mask decoder (DeBERTa v1/v2).

See `objectives.base` for what the functions of this module are for.
"""

from torch import Tensor, nn

from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.model import flops
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm
from deberta_ds.objectives import base
from deberta_ds.objectives.base import Forward, Numbers, Tensors
from deberta_ds.objectives.sentences import masked_copies
from deberta_ds.tokenizer import Tokenizer

METRICS = base.masked_metrics("masked", "Masked-token", on_console="loss")
HEADS = {"main": "mlm_head."}


def encoders(run: RunConfig) -> dict[str, ModelConfig]:
    return {"main": run.model}


def problems(run: RunConfig) -> list[str]:
    return base.decoder_problem(run.model.num_layers, run.model.absolute_input, "model.num_layers")


class MlmModel(nn.Module):
    """A token embedding and the masked LM above it."""

    def __init__(self, config: ModelConfig, valid_vocab: int | None = None):
        super().__init__()
        self.valid_vocab = valid_vocab
        self.words = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.masked_lm = MaskedLm(config)

    def forward(self, batch, normalizers: Tensors) -> tuple[Tensor, Tensors, Tensors]:
        """Return (sum of losses / normalizers["targets"], sums over this batch, {})."""
        loss_sum, num_correct, _ = self.masked_lm(self.words, batch, valid_vocab=self.valid_vocab)
        sums = {"masked_loss": loss_sum, "masked_correct": num_correct}
        detached = {name: value.detach() for name, value in sums.items()}
        return _loss(sums, normalizers), detached, {}


def _loss(sums: dict, normalizers: dict):
    return sums["masked_loss"] / normalizers["targets"]


def build(run: RunConfig, valid_vocab: int | None) -> MlmModel:
    return MlmModel(run.model, valid_vocab)


def clip_groups(run: RunConfig) -> tuple[str, ...]:
    return ()


def flops_per_token(run: RunConfig) -> float:
    return 3 * flops.masked_lm(run.model, run.data.seq_len, run.objective.mask.rate_at(0.5))


def means(run: RunConfig, total: Numbers) -> Numbers:
    loss = _loss(total, total)
    return {"loss": loss, "masked_loss": loss}


def scores(total: Numbers, per_token: Tensors) -> Numbers:
    return base.masked_scores(total, "masked")


def sentence_scores(forward: Forward, sentences: list[list[int]], tokenizer: Tokenizer
                    ) -> list[float]:
    """Pseudo-log-likelihood by word: the loss of a batch that holds a sentence's masked copies."""
    return [-float(forward(masked_copies(ids, tokenizer))[0]["masked_loss"]) for ids in sentences]


def headline(scores: Numbers) -> str:
    return base.masked_headline(scores, "masked", "model")


def networks(run: RunConfig, state: Tensors) -> tuple[dict[str, Tensors], list[str]]:
    return {"main": base.masked_lm_tensors(state, "masked_lm.")}, []


def parameters(run: RunConfig, networks: dict[str, Tensors]) -> tuple[Tensors, list[str]]:
    return base.masked_lm_parameters(networks["main"], "masked_lm."), []
