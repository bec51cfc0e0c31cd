"""Where every element of every parameter lies in the files of a checkpoint.

A rank's state is a few flat buffers, one for each group of parameters, and DeepSpeed cuts them in
two ways:
    line       ZeRO-1, 2: the parameters of a group lie end to end, each rank has an equal part
    parameter  ZeRO-3: each rank has an equal share of every parameter
So a map of a few numbers a parameter says for any slice which ranks have it, at any world size:
nobody opens a file to find out what is in it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from deberta_ds.base.errors import UserError


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or of another run."""

    on_every_rank = True


@dataclass(frozen=True)
class Piece:
    """`count` elements from `start` of a flattened parameter: where one rank's buffer has them."""

    rank: int
    group: int
    offset: int
    start: int
    count: int


@dataclass(frozen=True)
class Group:
    """Parameters that share a buffer of `size` elements on each rank.

    `offsets`, one a parameter: in the end-to-end line, or (cut "parameter") in each rank's buffer.
    `is_frozen`: they have no gradients, so the optimizer knows nothing of them.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    size: int
    is_frozen: bool = False


@dataclass(frozen=True)
class Layout:
    """The cut of one model over `world_size` ranks."""

    world_size: int
    cut: Literal["line", "parameter"]
    shapes: dict[str, tuple[int, ...]]
    groups: tuple[Group, ...]
    is_replicated: bool = False  # every rank has everything, and saves its part of the line

    def pieces(self, name: str, start: int = 0, count: int | None = None) -> Iterator[Piece]:
        """Yield where `count` elements from `start` of a parameter lie (all: count None)."""
        group_number, base = self._place[name]
        total = math.prod(self.shapes[name])
        end = total if count is None else start + count
        assert 0 <= start <= end <= total
        share = self.groups[group_number].size
        if self.cut == "parameter":
            share = math.ceil(total / self.world_size)
        while start < end:
            position = start if self.cut == "parameter" else base + start
            rank, offset = divmod(position, share)
            if self.cut == "parameter":
                offset += base
            taken = min(end - start, share - position % share)
            yield Piece(rank, group_number, offset, start, taken)
            start += taken

    def held_by(self, rank: int, group_number: int) -> Iterator[tuple[str, Piece]]:
        """Yield (parameter, piece) of all that one rank's buffer of a group holds."""
        group = self.groups[group_number]
        for name, base in zip(group.names, group.offsets, strict=True):
            total = math.prod(self.shapes[name])
            if self.cut == "parameter":
                share = math.ceil(total / self.world_size)
                low, high, offset = rank * share, (rank + 1) * share, base
            else:
                low, high = rank * group.size - base, (rank + 1) * group.size - base
                offset = max(0, -low)
            low, high = max(0, low), min(high, total)
            if low < high:
                yield name, Piece(rank, group_number, offset, low, high - low)

    @cached_property
    def _place(self) -> dict[str, tuple[int, int]]:
        return {name: (number, offset) for number, group in enumerate(self.groups)
                for name, offset in zip(group.names, group.offsets, strict=True)}


def in_a_line(shapes: dict[str, tuple[int, ...]], ranks: int, is_frozen: bool = False) -> Group:
    """Return the group of what every rank has whole, and saves an equal part of."""
    *offsets, total = accumulate(map(math.prod, shapes.values()), initial=0)
    return Group(tuple(shapes), tuple(offsets), math.ceil(total / ranks), is_frozen)


def replicated(shapes: dict[str, tuple[int, ...]], world_size: int) -> Layout:
    """Return the layout of what every rank has whole: one line, saved in equal parts."""
    return Layout(world_size, "line", shapes, (in_a_line(shapes, world_size),), is_replicated=True)


def layout_from(values: dict, place: str | Path) -> Layout:
    """Return the layout of plain values; CheckpointError names `place` if they are none."""
    try:
        groups = tuple(Group(tuple(group["names"]), tuple(map(int, group["offsets"])),
                             int(group["size"]), bool(group.get("is_frozen")))
                       for group in values["groups"])
        shapes = {name: tuple(map(int, shape)) for name, shape in values["shapes"].items()}
        layout = Layout(int(values["world_size"]), values["cut"], shapes, groups)
        named = [name for group in groups for name in group.names]
        if sorted(named) != sorted(shapes) or layout.cut not in ("line", "parameter"):
            raise ValueError
        for group in groups:
            for name in group.names:
                *_, last = layout.pieces(name, max(0, math.prod(shapes[name]) - 1))
                if last.rank >= layout.world_size or last.offset >= group.size:
                    raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        raise CheckpointError(f"{place}: is no map of a checkpoint's files; use an older "
                              "checkpoint") from None
    return layout
