"""Row number of the run -> (source, index in that source), in closed form.

A table of 1024 slots says which source each row comes from; it repeats for ever. So the counts are
exact in every window of 1024 rows, any row is found in O(1), and the number of rows a source has
given before row g needs no history.
"""

from dataclasses import dataclass

import numpy as np

from deberta_ds.errors import UserError

SLOTS = 1024


@dataclass(frozen=True)
class Mixture:
    """`counts[s]` slots of the table belong to source s; `source[slot]` and `rank[slot]` say whose
    slot it is and how many slots of that source come before it.
    """

    counts: tuple[int, ...]
    source: tuple[int, ...]
    rank: tuple[int, ...]

    def locate(self, row: int) -> tuple[int, int]:
        """Return (source, number of earlier rows of that source) for row number `row`."""
        block, slot = divmod(row, SLOTS)
        source = self.source[slot]
        return source, block * self.counts[source] + self.rank[slot]

    def consumed(self, row: int) -> list[int]:
        """Return how many rows each source gives to rows 0 .. row-1."""
        block, slot = divmod(row, SLOTS)
        consumed = [block * count for count in self.counts]
        for source in self.source[:slot]:
            consumed[source] += 1
        return consumed


def build_mixture(weights: list[float]) -> Mixture:
    """Return the slot table for `weights` (shares of rows; they need not sum to one).

    Counts are rounded by largest remainder; slots of each source are spread evenly. UserError if a
    weight is not positive or too small to get one slot of 1024.
    """
    if not weights:
        raise UserError("data.sources is empty; name at least one corpus")
    for weight in weights:
        if not (weight > 0 and np.isfinite(weight)):
            raise UserError(f"data.sources: weight {weight} is not a positive number")
    total = sum(weights)
    exact = [weight / total * SLOTS for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (counts[s] - exact[s], s))
    for source in by_remainder[: SLOTS - sum(counts)]:
        counts[source] += 1
    for source, count in enumerate(counts):
        if count == 0:
            raise UserError(
                f"data.sources: source {source} has weight {weights[source]} of {total}, less than "
                f"one row in {SLOTS}; raise its weight or merge it with another corpus"
            )
    order = sorted(
        ((k + 0.5) / counts[s], s) for s in range(len(counts)) for k in range(counts[s])
    )
    source = tuple(s for _, s in order)
    seen, rank = [0] * len(counts), []
    for s in source:
        rank.append(seen[s])
        seen[s] += 1
    return Mixture(tuple(counts), source, tuple(rank))


def temperature_weights(sizes: list[float], temperature: float) -> list[float]:
    """Return weights proportional to size ** (1 / temperature), summing to one.

    Temperature 1 keeps the natural shares, larger values raise small languages (mT5, XLM-R: 1/0.3).
    """
    if temperature <= 0 or not sizes or min(sizes) <= 0:
        raise UserError("temperature and every size must be positive")
    raised = np.asarray(sizes, dtype=np.float64) / max(sizes)
    raised = raised ** (1.0 / temperature)
    return [float(share) for share in raised / raised.sum()]
