"""The mixing function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), for ints and for tensors,
and the permutation that it keys.

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


# A keyed bijection of range(n) in O(1) memory: the order in which rows are visited.
#
# A six-round Feistel network over the next power of four, cycle-walked into range(n) (Black and
# Rogaway, "Ciphers with arbitrary finite domains", 2002). The order is part of the checkpoint
# format: it is pure integer arithmetic, pinned by tests/golden/permutation.json, and must never
# change.
_ROUNDS = 6


class Permutation:
    """`Permutation(n, key)[i]` is the image of i; each i in range(n) appears exactly once."""

    def __init__(self, n: int, key: tuple[int, ...]):
        """`n` in 1..2**62; `key` is any tuple of integers, such as (seed, source, epoch)."""
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation of {n} items: n must be in 1..2**62")
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        state = 0
        for part in key:
            state = mix64(state ^ mix64(part & MASK64))
        self._round_keys = []
        for _ in range(_ROUNDS):
            state = mix64(state)
            self._round_keys.append(state)

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is outside range({self.n})")
        half_bits, half_mask, n = self._half_bits, self._half_mask, self.n
        first, second = MULTIPLIERS
        while True:
            left, right = index >> half_bits, index & half_mask
            for key in self._round_keys:
                value = ((right ^ key) * first) & MASK64
                value = ((value ^ (value >> 29)) * second) & MASK64
                left, right = right, left ^ ((value >> 32) & half_mask)
            index = (left << half_bits) | right
            if index < n:
                return index
