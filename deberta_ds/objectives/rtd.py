"""Replaced-token detection with gradient-disentangled embedding sharing (DeBERTaV3).

In the order of the paper: mask -> generator -> sample -> discriminator, in one forward that returns
one loss, L_G + lambda L_D: the form that is exact under every ZeRO stage. The discriminator's loss
reaches the generator's table only under "es"; under "gdes" it trains a delta of its own.

Legend: B batch, L length, C hidden, T targets.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.config import ModelConfig, ObjectiveConfig
from deberta_ds.model.embeddings import WordEmbedding
from deberta_ds.model.encoder import Trunk
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.model.init import ZERO_INIT
from deberta_ds.objectives.sampling import token_uniforms


class Discriminator(nn.Module):
    """The network that is kept: trunk and detection head, and its own part of the word table."""

    def __init__(self, config: ModelConfig, sharing: str, checkpoint_layers: int):
        super().__init__()
        self.sharing = sharing
        self.trunk = Trunk(config, checkpoint_layers)
        self.head = ReplacedTokenHead(config)
        if sharing != "es":
            self.words = WordEmbedding(config.vocab_size, config.hidden_size)
        if sharing == "gdes":
            setattr(self.words.weight, ZERO_INIT, True)

    def forward(self, generator_words: WordEmbedding, input_ids_BL: Tensor, batch) -> Tensor:
        """Return logits [B, L] in fp32."""
        if self.sharing == "es":
            vectors_BLC = generator_words(input_ids_BL)
        else:
            vectors_BLC = self.words(input_ids_BL)
        if self.sharing == "gdes":
            vectors_BLC = vectors_BLC + generator_words(input_ids_BL).detach()
        hidden_BLC = self.trunk(vectors_BLC, batch.segments, batch.positions)
        return self.head(hidden_BLC, batch.positions)


class RtdModel(nn.Module):
    """Generator and discriminator under one engine."""

    def __init__(self, config: ModelConfig, generator_config: ModelConfig,
                 objective: ObjectiveConfig, *, sampling_seed: int, valid_vocab: int | None = None,
                 checkpoint_layers: int = 0):
        super().__init__()
        self.objective = objective
        self.sampling_seed = sampling_seed
        self.valid_vocab = valid_vocab
        self.words = WordEmbedding(config.vocab_size, config.hidden_size)
        self.generator = MaskedLm(generator_config, checkpoint_layers)
        self.discriminator = Discriminator(config, objective.embedding_sharing, checkpoint_layers)

    def forward(self, batch, norm: dict[str, Tensor]
                ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return (L_G + lambda L_D, sums over this batch, the discriminator's view [B, L]).

        The view holds the logits (fp32), which tokens are replaced (a sample equal to the original
        counts as original), and which are real, not padding. See `objectives.mlm` for the rest.
        """
        generator_sum, num_correct, input_ids_BL = self._replace_targets(batch)
        original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
        replaced_BL, real_BL = input_ids_BL != original_BL, batch.segments > 0
        logits_BL = self.discriminator(self.words, input_ids_BL, batch)
        losses_BL = F.binary_cross_entropy_with_logits(
            logits_BL, replaced_BL.float(), reduction="none")
        discriminator_sum = (losses_BL * real_BL).sum()
        sums = {
            "generator_loss": generator_sum.detach(),
            "generator_correct": num_correct,
            "discriminator_loss": discriminator_sum.detach(),
            "discriminator_correct": (((logits_BL > 0) == replaced_BL) & real_BL).sum(),
            "replaced": replaced_BL.sum(),
        }
        loss = generator_sum / norm["targets"]
        loss = loss + self.objective.rtd_weight * discriminator_sum / norm["tokens"]
        view = {"logits": logits_BL.detach(), "replaced": replaced_BL, "real": real_BL}
        return loss, sums, view

    def _replace_targets(self, batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return (generator loss sum, number correct, ids [B, L] with samples at the targets)."""
        flat_T = self._target_columns(batch)
        length = batch.input_ids.size(1)
        uniforms_T = token_uniforms(self.sampling_seed, batch.rows[flat_T // length],
                                    flat_T % length)
        generator_sum, num_correct, sampled_T = self.generator(
            self.words, batch, uniforms_T=uniforms_T, temperature=self.objective.temperature,
            valid_vocab=self.valid_vocab)
        input_ids_BL = batch.input_ids.flatten().index_copy(0, flat_T, sampled_T)
        return generator_sum, num_correct, input_ids_BL.view_as(batch.input_ids)

    @staticmethod
    def _target_columns(batch) -> Tensor:
        """Return flat indices [T] into [B * L] of the real targets."""
        length = batch.input_ids.size(1)
        starts_B1 = torch.arange(batch.rows.numel(), device=batch.rows.device)[:, None] * length
        return (starts_B1 + batch.target_positions).flatten()[batch.target_index]
