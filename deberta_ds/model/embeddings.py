"""Token embedding (with the tied prediction of tokens) and the input block.

What is unusual: gradient-disentangled sharing (DeBERTaV3 section 3.2; microsoft rtd_task.py) is two
look-ups added row by row, `E_G[ids].detach() + delta[ids]`, in two modules of their own: nothing is
re-registered, no V x C sum is built, and ZeRO-3 gathers a table exactly where its module is called.

Legend: B batch, L length, C hidden, V vocabulary, T targets.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model import choose
from deberta_ds.model.dropout import Dropout
from deberta_ds.model.precision import matmul_dtype


class TokenEmbedding(nn.Module):
    """The token embedding matrix: look-up of ids, and prediction of tokens with tied weights.

    Both go through `forward`, because ZeRO-3 gathers a module's parameters only when it is called.
    """

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, inputs: Tensor, *, labels_T: Tensor | None = None,
                bias_V: Tensor | None = None, loss: str = "chunked", **prediction):
        """Return rows [..., C] for ids; with `labels_T`, `inputs` is hidden [T, C] and the result
        is `linear_cross_entropy`'s (loss sum, number correct, sampled ids). `loss` is
        `model.cross_entropy`.
        """
        if labels_T is None:
            return F.embedding(inputs, self.weight)
        return loss_function(loss, inputs, self.weight)(
            inputs, self.weight, bias_V, labels_T, **prediction)


def loss_function(mode: str, hidden_TC: Tensor, weight_VC: Tensor) -> Callable:
    """Return `linear_cross_entropy` or its Triton kernels; `mode` is `model.cross_entropy`."""
    large = max(hidden_TC.numel(), weight_VC.numel()) >= choose.MOST_ELEMENTS
    obstacle = "2^31 hidden states or weights and more" if large else ""
    return choose.find("cross-entropy", mode, hidden_TC.device, (matmul_dtype(hidden_TC),),
                       hidden_TC.shape[1], (), obstacle)[1]


class InputBlock(nn.Module):
    """Token vectors (+ absolute positions) -> LayerNorm -> zero at padding -> dropout."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.absolute_input:
            self.positions = nn.Embedding(config.max_position, config.hidden_size)
        self.has_positions = config.absolute_input
        self.norm = _InputNorm(config.hidden_size, eps=config.norm_eps)
        self.dropout = Dropout(config.hidden_dropout)

    def add_positions(self, token_vectors_BLC: Tensor, positions_BL: Tensor) -> Tensor:
        """Return token vectors, plus absolute positions if the model has them."""
        if not self.has_positions:
            return token_vectors_BLC
        return token_vectors_BLC + self.positions(positions_BL)

    def forward(self, sums_BLC: Tensor, segments_BL: Tensor, key: Tensor | None) -> Tensor:
        """Return the encoder's input from the result of `add_positions`, in the dtype of the
        parameters; `key` is of dropout.
        """
        hidden_BLC = self.norm(sums_BLC) * (segments_BL > 0).unsqueeze(-1)
        return self.dropout(hidden_BLC, key)


class _InputNorm(nn.LayerNorm):
    """LayerNorm that takes fp32 sums and 16-bit parameters: computed in fp32, then rounded.

    Adversarial fine-tuning moves sums by less than 16 bits resolve.
    """

    def forward(self, sums_BLC: Tensor) -> Tensor:
        dtype = self.weight.dtype
        if sums_BLC.dtype == dtype or torch.is_autocast_enabled(sums_BLC.device.type):
            return super().forward(sums_BLC)
        weight_C, bias_C = self.weight.to(sums_BLC.dtype), self.bias.to(sums_BLC.dtype)
        return F.layer_norm(sums_BLC, self.normalized_shape, weight_C, bias_C, self.eps).to(dtype)
