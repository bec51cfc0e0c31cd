"""Masked language modeling with the enhanced mask decoder (DeBERTa v1/v2).

`forward` returns (loss to backpropagate, {name: detached sum}, {name: detached output}). The sum of
losses is divided by a count of the whole step, not of the micro-batch, so the loss is the exact
mean over all targets at any world size and micro-batch.
"""

from torch import Tensor, nn

from deberta_ds.config import ModelConfig
from deberta_ds.model.embeddings import WordEmbedding
from deberta_ds.model.heads import MaskedLm


class MlmModel(nn.Module):
    """A word table and the masked LM above it."""

    def __init__(self, config: ModelConfig, valid_vocab: int | None = None,
                 checkpoint_layers: int = 0):
        super().__init__()
        self.valid_vocab = valid_vocab
        self.words = WordEmbedding(config.vocab_size, config.hidden_size)
        self.generator = MaskedLm(config, checkpoint_layers)

    def forward(self, batch, norm: dict[str, Tensor]
                ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return (sum of losses / norm["targets"], sums over this batch, no outputs)."""
        loss_sum, num_correct, _ = self.generator(self.words, batch, valid_vocab=self.valid_vocab)
        sums = {"generator_loss": loss_sum.detach(), "generator_correct": num_correct}
        return loss_sum / norm["targets"], sums, {}
