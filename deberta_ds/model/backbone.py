"""The model that is fine-tuned and exported, token embedding and encoder; and of any model the
parameters: first values, number, and by their names where they lie.

Source of the first values: microsoft/DeBERTa init_weights: N(0, init_std) for matrices and tables,
zero biases, unit norms; a discriminator's delta table starts at zero (GDES: it begins with the
generator's words). The convolution follows the same rule (as transformers does; the official code
leaves it at PyTorch's default).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.encoder import Trunk

_PARTS = {"words": "embeddings", "positions": "embeddings", "trunk": "embeddings",
          "relative": "relative", "relative_norm": "relative", "convolution": "convolution",
          "layers": "layers"}
ZERO_INIT = "starts_at_zero"  # attribute that marks a parameter whose first value is zero


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


@torch.no_grad()
def init_parameters(model: nn.Module, std: float, seed: int,
                    gather: Callable[[nn.Parameter], AbstractContextManager] = nullcontext) -> None:
    """Set every parameter of `model` from `seed`; the same values at any world size or ZeRO stage.

    `gather` makes one partitioned parameter whole while it is written (ZeRO-3), so no rank ever
    holds the whole model.
    """
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with gather(parameter):
            if name.endswith("bias") or getattr(parameter, ZERO_INIT, False):
                parameter.zero_()
            elif id(parameter) in norms:
                parameter.fill_(1.0)
            else:
                values = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(values.normal_(0.0, std, generator=generator))


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


class Place(NamedTuple):
    """Where a parameter lies; `network` is "" for a shared table, `layer` -1 outside of layers."""

    network: str
    part: str
    layer: int = -1


def places(names: Iterable[str]) -> dict[str, Place]:
    """Return where each of a model's parameters lies, by its name."""
    found = {name: _place(name) for name in names}
    networks = {place.network for place in found.values() if place.layer >= 0}
    owners = [network for network in networks if f"{network}.words.weight" not in found]
    return {name: place._replace(network=owners[0]) if not place.network and len(owners) == 1
            else place for name, place in found.items()}


def _place(name: str) -> Place:
    network, _, rest = ("", "", name) if name.startswith("words.") else name.partition(".")
    first, _, inside = rest.removeprefix("trunk.encoder.").partition(".")
    return Place(network, _PARTS.get(first, "head"),
                 int(inside.partition(".")[0]) if first == "layers" else -1)
