"""Row number of the run -> (source, index in that source), in closed form.

A binary tree splits the rows in two again and again: of the first i rows of a node, the left half
of its sources gets i * weight of the left / weight of the node, rounded. Weights are integers, so
every source keeps within a few rows of its exact share for ever, any row is found in
log2(sources) steps, and the number of rows a source has given before row g needs no history.

The order is part of the checkpoint format, pinned by tests/golden/mixture.json.
"""

import math
from dataclasses import dataclass

import numpy as np

from deberta_ds.errors import UserError

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


def build_mixture(weights: list[float]) -> Mixture:
    """Return the mixture of `weights` (shares of rows; they need not sum to one).

    UserError if a weight is not positive, or below 1e-12 of their sum.
    """
    if not weights:
        raise UserError("data.sources is empty; name at least one corpus")
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise UserError(f"data.sources: weight {weight} is not a positive number")
    if not math.isfinite(sum(weights)):
        raise UserError("data.sources: the weights add up to more than a float holds; scale them")
    total = math.fsum(weights)
    cumulative = [0]
    for source, weight in enumerate(weights):
        if weight / total < 1e-12:
            raise UserError(f"data.sources: source {source} has weight {weight} of {total}, less "
                            "than one row in 1e12; leave it out or raise its weight")
        cumulative.append(cumulative[-1] + round(weight / total * (1 << _WEIGHT_BITS)))
    return Mixture(tuple(cumulative))


def temperature_weights(sizes: list[float], temperature: float) -> list[float]:
    """Return weights proportional to size ** (1 / temperature), summing to one.

    Temperature 1 keeps the natural shares, larger values raise small languages (mT5, XLM-R: 1/0.3).
    """
    if not temperature > 0 or not sizes or min(sizes) <= 0:
        raise UserError("temperature and every size must be positive")
    raised = np.asarray(sizes, dtype=np.float64) / max(sizes)
    raised = raised ** (1.0 / temperature)
    return [float(share) for share in raised / raised.sum()]
