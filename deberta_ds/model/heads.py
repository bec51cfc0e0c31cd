"""The two pretraining heads: masked LM behind the enhanced mask decoder; replaced-token detection.

Sources: microsoft/DeBERTa, DeBERTa/apps/models/masked_language_model.py and
replaced_token_detection_model.py there.

Legend: B batch, L length, C hidden, M masked slots, T targets, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.encoder import DecoderQueries, Trunk, gather_columns


class MaskedLmHead(nn.Module):
    """dense -> GELU -> LayerNorm -> token embedding (tied) + bias."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.loss = config.cross_entropy

    def forward(self, hidden_TC: Tensor, words: TokenEmbedding, labels_T: Tensor, **prediction):
        """Return `linear_cross_entropy`'s (loss sum, number correct, sampled ids or None)."""
        return words(self.transformed(hidden_TC), labels_T=labels_T, bias_V=self.bias,
                     loss=self.loss, **prediction)

    def transformed(self, hidden: Tensor) -> Tensor:
        """Return the states [..., C] whose products with the token embedding are the logits."""
        return self.norm(F.gelu(self.dense(hidden)))

    def logits(self, hidden: Tensor, words: TokenEmbedding) -> Tensor:
        """Return logits [..., V]."""
        return self.transformed(hidden) @ words.weight.T + self.bias


class MaskedLm(nn.Module):
    """An encoder that predicts masked tokens: DeBERTa v1/v2, and the generator of v3.

    The caller passes the token embedding, because v3 shares it. With absolute positions in
    the input (BERT) there is no decoder: the last layer's states at the targets are read.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.trunk = Trunk(config)
        self.positions = None
        if not config.absolute_input:
            self.positions = nn.Embedding(config.max_position, config.hidden_size)
        self.head = MaskedLmHead(config)

    def forward(self, words: TokenEmbedding, batch, **prediction):
        """Return the head's (loss sum, number correct, sampled ids [T] or None) of a `Batch`.

        T: its slots, B x M, of which those without a target count for nothing.
        """
        hidden_TC = self.target_states(words, batch)
        labels_T = batch.labels.gather(1, batch.target_positions).flatten()
        return self.head(hidden_TC, words, labels_T, **prediction)

    def target_states(self, words: TokenEmbedding, batch) -> Tensor:
        """Return the head's input [T, C]: decoded states of the batch's slots."""
        columns_BM = batch.target_positions
        decoder = None
        if self.positions is not None:
            vectors = self.positions(batch.positions.gather(1, columns_BM))
            decoder = DecoderQueries(vectors, columns_BM)
        hidden = self.trunk(words(batch.input_ids), batch.segments, batch.positions, decoder)
        if decoder is None:
            hidden = gather_columns(hidden, columns_BM)
        return hidden.flatten(0, 1)


class ReplacedTokenHead(nn.Module):
    """One logit per token: was it replaced? Conditioned on the [CLS] state of the document.

    u = LayerNorm(h_cls + h_i), then dense -> GELU -> linear: the norm comes before the dense layer.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_BLC: Tensor, positions_BL: Tensor) -> Tensor:
        """Return logits [B, L] in fp32; `positions_BL` counts from each document's [CLS]."""
        columns_BL = torch.arange(hidden_BLC.size(1), device=hidden_BLC.device) - positions_BL
        cls_BLC = gather_columns(hidden_BLC, columns_BL)
        hidden_BLC = F.gelu(self.dense(self.norm(cls_BLC + hidden_BLC)))
        return self.classifier(hidden_BLC).squeeze(-1).float()
