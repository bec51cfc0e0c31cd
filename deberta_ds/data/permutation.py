"""A keyed bijection of range(n) in O(1) memory: the order in which rows are visited.

A six-round Feistel network over the next power of four, cycle-walked into range(n) (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). The order is part of the checkpoint format:
it is pure integer arithmetic, pinned by tests/golden/permutation.json, and must never change.
"""

from deberta_ds.splitmix import MASK64, MULTIPLIERS, mix64

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
