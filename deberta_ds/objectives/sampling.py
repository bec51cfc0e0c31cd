"""Random numbers that belong to a token of a row, not to a device or a rank.

A generator's replacement must be the same at any world size, so its one uniform number is a hash of
(seed, row number, column): splitmix64 (Steele, Lea and Flood 2014) in wrapping int64 arithmetic.
"""

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, -4658895280553007687), (27, -7723592293110705685))
_MANTISSA_BITS = 24  # of fp32: every value is exact and below 1


def token_uniforms(seed: int, rows_T: Tensor, columns_T: Tensor) -> Tensor:
    """Return fp32 [T] in [0, 1) for int64 row numbers and columns; equal inputs, equal outputs."""
    state = torch.full_like(rows_T, seed)
    for part in (rows_T, columns_T):
        state = _mix(state + part * _GAMMA + _GAMMA)
    return _shift_right(state, 64 - _MANTISSA_BITS).float() * 2.0**-_MANTISSA_BITS


def _mix(state: Tensor) -> Tensor:
    for shift, multiplier in _MULTIPLIERS:
        state = (state ^ _shift_right(state, shift)) * multiplier
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 `>>` keeps the sign, so the copies of it are masked away."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
