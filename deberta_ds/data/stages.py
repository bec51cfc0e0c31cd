"""What an earlier stage of a run has read, and where a later one goes on so that no row repeats.

Rows of one length are continued: same shards, same shuffle, from the first row not yet used. Rows
of another length hold the same tokens differently cut, so they must come from other shards.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import SourceConfig, from_dict
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.mixture import build_mixture
from deberta_ds.data.remote import DEFAULT_CACHE, Cache

WHOLE = (0.0, 1.0)


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
        content_hashes, Cache(data.cache, data.cache_gigabytes),
    )


def next_source(
    path: str, stages: list[Stage], *, seq_len: int, part: tuple[float, float] | None = None,
    cache: Cache = DEFAULT_CACHE,
) -> tuple[SourceConfig, Corpus]:
    """Return (source, its corpus) that repeats nothing of `stages`, given from old to new.

    A corpus is known by its path or, where it lies elsewhere now, by its content hash; that no
    stage has read it is said on stderr. `part` None means the part that was used before at this
    length, else all. UserError if a stage has read these shards at another length or in other
    parts, or if the corpus has changed.
    """
    found = SourceConfig(path=path, part=part or WHOLE)
    known = {stage.place: _names_of(path, stage, cache) for stage in stages}
    if stages and not any(known.values()):
        print(f"note: {path}: no stage of --after has read it, by its path or by its rows of their "
              "length, so it begins at its first row", file=sys.stderr, flush=True)
    for stage in stages:
        for source, used, order in zip(stage.sources, stage.used, stage.orders, strict=True):
            if source.path not in known[stage.place]:
                continue
            wanted = source.part if part is None and stage.seq_len == seq_len else found.part
            if wanted[1] <= source.part[0] or source.part[1] <= wanted[0]:
                continue
            if stage.seq_len != seq_len or wanted != source.part:
                raise UserError(_overlap(path, wanted, seq_len, stage, source.part))
            corpus = Corpus(path, seq_len=seq_len, part=wanted, cache=cache)
            read = _read_by(stage, source)
            if read != corpus.content_hash:
                raise UserError(
                    f"{path}: not the corpus that {stage.place} has read (its "
                    "content_hash differs); where that stage stopped means nothing here"
                )
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


def _overlap(path: str, part: tuple, seq_len: int, stage: Stage, used: tuple) -> str:
    return (
        f"{path}: part {list(part)} in rows of {seq_len} would repeat tokens of {stage.place}, "
        f"which took part {list(used)} in rows of {stage.seq_len}; give --stretch outside of that "
        "(the earlier stage must leave some), or leave out --after if they shall repeat"
    )
