"""Random numbers of a token for sampling replacements: the same on any device and rank.

A generator's replacement must be the same at any world size, so its one uniform number is a hash of
(seed, row number, column) by splitmix64.
"""

import torch
from torch import Tensor

from deberta_ds.base.splitmix import GAMMA, mix_tensor, shift_right, signed

_MANTISSA_BITS = 24  # of fp32: every value is exact and below 1


def token_uniforms(seed: int, rows_T: Tensor, columns_T: Tensor) -> Tensor:
    """Return fp32 [T] in [0, 1) for int64 row numbers and columns; equal inputs, equal outputs."""
    state = torch.full_like(rows_T, seed)
    for part in (rows_T, columns_T):
        state = mix_tensor(state + part * signed(GAMMA) + signed(GAMMA))
    return shift_right(state, 64 - _MANTISSA_BITS).float() * 2.0**-_MANTISSA_BITS
