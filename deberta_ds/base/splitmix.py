"""The mixing function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), for ints and for tensors.

Row orders, the generator's samples and attention dropout are all hashes of counters by this one
function, so its numbers must never change (tests/golden/permutation.json holds them).
"""

GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK64 = (1 << 64) - 1
_SHIFTS = (30, 27, 31)


def mix64(value: int) -> int:
    """Return the SplitMix64 output for state `value`: a bijection of 64-bit integers."""
    value = (value + GAMMA) & MASK64
    value = ((value ^ (value >> _SHIFTS[0])) * MULTIPLIERS[0]) & MASK64
    value = ((value ^ (value >> _SHIFTS[1])) * MULTIPLIERS[1]) & MASK64
    return value ^ (value >> _SHIFTS[2])


def mix_tensor(state):
    """Return the same function of the int64 tensor `state`, less the addition of GAMMA."""
    state = (state ^ shift_right(state, _SHIFTS[0])) * signed(MULTIPLIERS[0])
    state = (state ^ shift_right(state, _SHIFTS[1])) * signed(MULTIPLIERS[1])
    return state ^ shift_right(state, _SHIFTS[2])


def shift_right(state, bits: int):
    """Logical shift of an int64 tensor: `>>` keeps the sign, so its copies are masked away."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """Return the 64-bit integer `value` as int64 has it: torch multiplies modulo 2**64."""
    return value - ((value >> 63) << 64)


def dropout_threshold(p: float) -> int:
    """Return how many of the 32-bit words are that p of them; below 1, not all."""
    return min(round(p * (1 << 32)), (1 << 32) - 1)
