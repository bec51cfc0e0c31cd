"""The model that is fine-tuned and exported: token embedding and encoder."""

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.encoder import Trunk


class Backbone(nn.Module):
    """DeBERTa without a head; the same parameters as Hugging Face's DebertaV2Model."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.words = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.trunk = Trunk(config)

    def forward(self, input_ids_BL: Tensor, segments_BL: Tensor,
                positions_BL: Tensor | None = None) -> Tensor:
        """Return hidden states [B, L, C]; `segments_BL`: attention mask or documents."""
        return self.trunk(self.words(input_ids_BL), segments_BL, positions_BL)


def count_parameters(module: nn.Module) -> int:
    """Return the number of distinct parameter elements; partitioned by ZeRO-3 or on meta, too."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


class _NoInit(TorchFunctionMode):
    """Skip torch.nn.init: on meta, its normal_ would import torch._dynamo, which takes seconds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def on_meta(build, *args) -> nn.Module:
    """Return `build(*args)` without memory, for counting."""
    with torch.device("meta"), _NoInit():
        return build(*args)
