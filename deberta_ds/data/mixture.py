"""Row number of the run -> (source, index in that source), in closed form.

A binary tree splits the rows in two again and again: of the first i rows of a node, the left half
of its sources gets i * weight of the left / weight of the node, rounded. Weights are integers, so
every source keeps within a few rows of its exact share for ever, any row is found in
log2(sources) steps, and the number of rows a source has given before row g needs no history.

Runs begun with version 0.1.0 keep their order, a repeating table of 1024 slots (`SlotMixture`).
The order is part of the checkpoint format, pinned by tests/golden/mixture.json.
"""

import math
from dataclasses import dataclass

import numpy as np

from deberta_ds.errors import UserError

SLOTS = 1024
_WEIGHT_BITS = 50  # of the sum of the integer weights


@dataclass(frozen=True)
class Mixture:
    """`cumulative[s]` is the integer weight of all sources before source s; the last is the sum."""

    cumulative: tuple[int, ...]

    def shares(self) -> list[float]:
        """Return each source's share of the rows."""
        total = self.cumulative[-1]
        return [(b - a) / total
                for a, b in zip(self.cumulative, self.cumulative[1:], strict=False)]

    def locate(self, row: int) -> tuple[int, int]:
        """Return (source, number of earlier rows of that source) for row number `row`."""
        first, last, edges = 0, len(self.cumulative) - 1, self.cumulative
        while last - first > 1:
            middle = (first + last) // 2
            left, node = edges[middle] - edges[first], edges[last] - edges[first]
            before = _share(row, left, node)
            if _share(row + 1, left, node) > before:
                row, last = before, middle
            else:
                row, first = row - before, middle
        return first, row

    def consumed(self, row: int) -> list[int]:
        """Return how many rows each source gives to rows 0 .. row-1."""
        counts, edges = [0] * (len(self.cumulative) - 1), self.cumulative
        nodes = [(0, len(counts), row)]
        while nodes:
            first, last, rows = nodes.pop()
            if last - first == 1:
                counts[first] = rows
                continue
            middle = (first + last) // 2
            left = _share(rows, edges[middle] - edges[first], edges[last] - edges[first])
            nodes += [(first, middle, left), (middle, last, rows - left)]
        return counts


def _share(rows: int, part: int, whole: int) -> int:
    """Return rows * part / whole to the nearest integer; an int at any size."""
    return (2 * rows * part + whole) // (2 * whole)


@dataclass(frozen=True)
class SlotMixture:
    """The order of runs begun with version 0.1.0: a table of 1024 slots that repeats for ever.

    `counts[s]` slots of the table belong to source s; `source[slot]` and `rank[slot]` say whose
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
    """Return the mixture of `weights` (shares of rows; they need not sum to one).

    UserError if a weight is not positive, or below 1e-12 of their sum.
    """
    _check(weights)
    total = math.fsum(weights)
    cumulative = [0]
    for source, weight in enumerate(weights):
        if weight / total < 1e-12:
            raise UserError(f"data.sources: source {source} has weight {weight} of {total}, less "
                            "than one row in 1e12; leave it out or raise its weight")
        cumulative.append(cumulative[-1] + round(weight / total * (1 << _WEIGHT_BITS)))
    return Mixture(tuple(cumulative))


def build_slot_mixture(weights: list[float]) -> SlotMixture:
    """Return the slot table for `weights` (shares of rows; they need not sum to one).

    Counts are rounded by largest remainder; slots of each source are spread evenly. UserError if a
    weight is not positive or too small to get one slot of 1024.
    """
    _check(weights)
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
                f"one row in {SLOTS}, in a run of version 0.1.0; start a run anew for such weights"
            )
    order = sorted(
        ((k + 0.5) / counts[s], s) for s in range(len(counts)) for k in range(counts[s])
    )
    source = tuple(s for _, s in order)
    seen, rank = [0] * len(counts), []
    for s in source:
        rank.append(seen[s])
        seen[s] += 1
    return SlotMixture(tuple(counts), source, tuple(rank))


def _check(weights: list[float]) -> None:
    if not weights:
        raise UserError("data.sources is empty; name at least one corpus")
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise UserError(f"data.sources: weight {weight} is not a positive number")
    if not math.isfinite(sum(weights)):
        raise UserError("data.sources: the weights add up to more than a float holds; scale them")


def temperature_weights(sizes: list[float], temperature: float) -> list[float]:
    """Return weights proportional to size ** (1 / temperature), summing to one.

    Temperature 1 keeps the natural shares, larger values raise small languages (mT5, XLM-R: 1/0.3).
    """
    if not temperature > 0 or not sizes or min(sizes) <= 0:
        raise UserError("temperature and every size must be positive")
    raised = np.asarray(sizes, dtype=np.float64) / max(sizes)
    raised = raised ** (1.0 / temperature)
    return [float(share) for share in raised / raised.sum()]
