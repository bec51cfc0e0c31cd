"""Initialization of all parameters.

Source: microsoft/DeBERTa init_weights: N(0, init_std) for matrices and tables, zero biases, unit
norms; a discriminator's delta table starts at zero (GDES: it begins with the generator's words).
The convolution follows the same rule (as transformers does; the official code leaves it at
PyTorch's default).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

ZERO_INIT = "starts_at_zero"  # attribute that marks a parameter whose first value is zero


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
