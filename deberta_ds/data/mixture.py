"""Row number of the run -> (source, index in that source), in closed form.

A binary tree splits the rows in two again and again: of the first i rows of a node, the left half
of its sources gets i * weight of the left / weight of the node, rounded. Weights are integers, so
every source keeps within a few rows of its exact share for ever, any row is found in
log2(sources) steps, and the number of rows a source has given before row g needs no history.

The order is part of the checkpoint format, pinned by tests/golden/mixture.json.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import SourceConfig, from_dict
from deberta_ds.data.corpus import Corpus
from deberta_ds.files.remote import DEFAULT_CACHE, Cache

_WEIGHT_BITS = 50  # of the sum of the integer weights

# Muennighoff et al. 2023 (arXiv 2305.16264, decoders): for up to 4 epochs repeated text lowers the
# loss nearly as much as new text, then less and less, and from about 40 on not at all. Encoders
# take more: each epoch has other masks, and BERT (arXiv 1810.04805, A.2) was trained for 40.
FEW_EPOCHS, MANY_EPOCHS = 4, 40


@dataclass(frozen=True)
class Mixture:
    """`cumulative[s]` is the integer weight of all sources before source s; the last is the sum."""

    cumulative: tuple[int, ...]

    def shares(self) -> list[float]:
        """Return each source's share of the rows."""
        total = self.cumulative[-1]
        return [(b - a) / total for a, b in zip(self.cumulative, self.cumulative[1:], strict=False)]

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
                            "than one sequence in 1e12; leave it out or raise its weight")
        cumulative.append(cumulative[-1] + round(weight / total * (1 << _WEIGHT_BITS)))
    return Mixture(tuple(cumulative))


def temperature_weights(sizes: list[float], temperature: float) -> list[float]:
    """Return weights proportional to size ** (1 / temperature), summing to one.

    Temperature 1 keeps the natural shares, larger values raise small languages (mT5, XLM-R: 1/0.3).
    """
    if not temperature > 0 or not sizes or min(sizes) <= 0:
        raise UserError("temperature and every size must be positive")
    raised = (np.asarray(sizes, dtype=np.float64) / max(sizes)) ** (1.0 / temperature)
    return (raised / raised.sum()).tolist()


@dataclass(frozen=True)
class Stage:
    """What a checkpoint says about the data: `used[i]` is the next row of `sources[i]`, `orders[i]`
    its shuffle, `content_hashes` {path: hex}, `cache` where it kept what lies at a URL.
    """

    place: str
    seq_len: int
    sources: tuple[SourceConfig, ...]
    used: tuple[int, ...]
    orders: tuple[tuple[int, int], ...]
    content_hashes: dict[str, str]
    cache: Cache


def stage_of(place: str | Path, *, config: dict, sequences_seen: int, content_hashes: dict[str, str]
             ) -> Stage:
    """Return the stage of a checkpoint from what its run.json holds; UserError names `place`."""
    data = from_dict(config, str(place)).data
    sources = data.sources
    given = build_mixture([source.weight for source in sources]).consumed(sequences_seen)
    return Stage(
        str(place), data.seq_len, sources,
        tuple(source.first_sequence + count for source, count in zip(sources, given, strict=True)),
        tuple(source.order or (data.seed, number) for number, source in enumerate(sources)),
        content_hashes, Cache(data.cache, data.cache_gigabytes))


def next_source(path: str, stages: list[Stage], *, seq_len: int,
                part: tuple[float, float] | None = None, cache: Cache = DEFAULT_CACHE
               ) -> tuple[SourceConfig, Corpus]:
    """Return (source, its corpus) that repeats nothing of `stages`, given from old to new.

    A corpus is known by its path or, where it lies elsewhere now, by its content hash; that no
    stage has read it is said on stderr. `part` None means the part that was used before at this
    length, else all. UserError if a stage has read these shards at another length or in other
    parts, or if the corpus has changed.
    """
    found = SourceConfig(path=path, part=part or (0.0, 1.0))
    known = {stage.place: _names_of(path, stage, cache) for stage in stages}
    if stages and not any(known.values()):
        print(f"note: {path}: no stage of --after has read it, by its path or its sequences of "
              "that length, so it begins at its first sequence", file=sys.stderr, flush=True)
    for stage in stages:
        for source, used, order in zip(stage.sources, stage.used, stage.orders, strict=True):
            if source.path not in known[stage.place]:
                continue
            wanted = source.part if part is None and stage.seq_len == seq_len else found.part
            if wanted[1] <= source.part[0] or source.part[1] <= wanted[0]:
                continue
            if stage.seq_len != seq_len or wanted != source.part:
                raise UserError(
                    f"{path}: part {list(wanted)} at length {seq_len} would repeat tokens of "
                    f"{stage.place}, which took part {list(source.part)} at length "
                    f"{stage.seq_len}; give --part outside of that (the earlier stage must "
                    "leave some), or leave out --after if they shall repeat")
            corpus = Corpus(path, seq_len=seq_len, part=wanted, cache=cache)
            read = _read_by(stage, source)
            if read != corpus.content_hash:
                raise UserError(
                    f"{path}: not the corpus that {stage.place} has read (its "
                    "content_hash differs); where that stage stopped means nothing here")
            found = replace(found, first_sequence=used, order=order, part=wanted)
    return found, Corpus(path, seq_len=seq_len, part=found.part, cache=cache)


def _names_of(path: str, stage: Stage, cache: Cache) -> list[str]:
    """Return what a stage calls the corpus at `path`."""
    names = [source.path for source in stage.sources
             if os.path.realpath(source.path) == os.path.realpath(path)]
    if names:
        return names
    try:
        rows = Corpus(path, seq_len=stage.seq_len, cache=cache).rows_content_hash
    except UserError:  # it has no rows of that length, or cannot be read, which the caller says
        return []
    return [source.path for source in stage.sources
            if _read_by(stage, source).partition("[")[0] == rows][:1]


def _read_by(stage: Stage, source: SourceConfig) -> str:
    """Return the content hash of the rows that a stage has read of one source."""
    return stage.content_hashes.get(source.path, "").partition(", replaced ")[0]
