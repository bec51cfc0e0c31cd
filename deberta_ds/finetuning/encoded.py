"""A split encoded once per node.

What is unusual: each rank of a node encodes a part of the split and pickles it into memory without
a name (memfd), which all of them map. It goes with their last process, however that ends.
"""

import os
import pickle
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import chain
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from typing import BinaryIO

import numpy as np

from deberta_ds.base.errors import naming
from deberta_ds.cluster import dist
from deberta_ds.cluster.process import machine
from deberta_ds.finetuning.features import Feature, TooLongError, encode
from deberta_ds.tasks.readers import Split
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.tables import Faults
from deberta_ds.tokenizer import Tokenizer

_BLOCK_ROWS = 4096
_SAY_SECONDS = 10.0  # between two lines on the progress of encoding
_values_of = attrgetter(*[field.name for field in fields(Feature)][1:])  # all but its position


class Encoded(Sequence[Feature]):
    """The features in files of (path, how many), each made anew when it is asked for.

    lost: positions of the examples that have none. `Feature.position` is the place in here.
    """

    def __init__(self, files: Iterable[tuple[str, int]], lost: Sequence[int] = ()):
        self.lost = lost
        self._parts, self._first = [], [0]
        for path, count in files:
            with open(path, "rb") as file:
                data = mmap(file.fileno(), 0, access=ACCESS_READ)
            starts = np.frombuffer(data, np.int64, count + 1, len(data) - 8 * (count + 1))
            self._parts.append((data, starts))
            self._first.append(self._first[-1] + count)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, place):
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        place = range(len(self))[place]
        part = bisect_right(self._first, place) - 1
        (data, starts), row = self._parts[part], place - self._first[part]
        return Feature(place, *pickle.loads(data[starts[row] : starts[row + 1]]))


def encode_split(split: Split, tokenizer: Tokenizer, settings: Settings,
                 say: Callable[[str], None], faults: Faults | None = None) -> Encoded:
    """Return a split's features as `encode` does, and say every 10 seconds how far it is.

    Call it on every rank; all raise the same error.
    """
    total, bad, where = len(split.examples), Faults(), f"{split.source}, encoded in memory"
    ours = [rank for rank, name in enumerate(dist.gather_objects(machine())) if name == machine()]
    part = range(*(total * (ours.index(dist.rank()) + n) // len(ours) for n in (0, 1)))

    def encode_part() -> tuple[int, list, list]:
        with naming(where):
            return _encode_part(file, split, part, tokenizer, settings, say,
                                None if faults is None else bad)

    with naming(where), os.fdopen(os.memfd_create("features"), "wb") as file:
        count, lost, long = dist.together(encode_part)
        mine = (f"/proc/{os.getpid()}/fd/{file.fileno()}", count)
        found = dist.gather_objects((mine, lost, long, bad.errors, bad.needed))
        files, gone, longer, named, most = zip(*[found[rank] for rank in ours], strict=True)
        if too_long := [*chain(*longer)]:
            needed, place, _ = max(too_long)
            raise TooLongError(place, needed, sum(count for *_, count in too_long), total,
                               settings.max_length)
        if faults is not None:
            faults.errors |= dict(chain(*(errors.items() for errors in named)))
            faults.needed = max(faults.needed, *most)
        # No file is closed before all ranks have opened it.
        return dist.together(lambda: Encoded(files, [*chain(*gone)]))


def _encode_part(file: BinaryIO, split: Split, part: range, tokenizer: Tokenizer,
                 settings: Settings, say: Callable[[str], None], faults: Faults | None
                 ) -> tuple[int, list[int], list[tuple[int, str, int]]]:
    """Write the features of a part of a split, then where each begins. Return (how many there are,
    positions of the examples that have none, (tokens, place, count) of what is too long).
    """
    said, starts = time.monotonic(), array("q", [0])
    lost: list[int] = []
    long: list[tuple[int, str, int]] = []
    for first in part[::_BLOCK_ROWS]:
        rows, features = range(first, min(first + _BLOCK_ROWS, part.stop)), []
        try:
            features = encode(
                split.task, split.examples[first : rows.stop], tokenizer,
                max_length=settings.max_length, window_overlap=settings.window_overlap,
                truncation=settings.truncation, faults=faults)
        except TooLongError as error:
            long.append((error.needed, error.place, error.count))
        for feature in features:
            starts.append(starts[-1] + file.write(pickle.dumps(_values_of(feature), 5)))
        lost += sorted({*rows} - {first + feature.position for feature in features})
        if time.monotonic() >= said + _SAY_SECONDS:
            said, share = time.monotonic(), (rows.stop - part.start) / len(part)
            say(f"  encoding {split.source}: {share:.0%} of {len(split.examples):,}")
    file.write(starts.tobytes())
    file.flush()
    return len(starts) - 1, lost, long
