"""Where a run's state lies, in the files of a checkpoint and in a DeepSpeed engine: fp32 weights,
moments, counters, loss scale.

A rank's state is a few flat buffers, one for each group of parameters, and DeepSpeed cuts them in
two ways:
    line       ZeRO-1, 2: the parameters of a group lie end to end, each rank has an equal part
    parameter  ZeRO-3: each rank has an equal share of every parameter
So a map of a few numbers a parameter says for any slice which ranks have it, at any world size:
nobody opens a file to find out what is in it.

One place knows DeepSpeed's private names (0.19.8), for saving and for loading: which buffers this
rank has, which parts of which parameters lie in them, and what must happen after they were
written. A wrapper that is not known here is rejected before the first step (`check_engine`), so
no run trains what it could not resume.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.cluster import dist

MASTER = "fp32"  # the key of the fp32 weights next to the optimizer's own keys
# {DeepSpeed's wrapper: how it cuts}; a plain optimizer does not: every rank has everything
_CUTS: dict[str, Literal["line", "parameter"]] = {
    "DeepSpeedZeroOptimizer": "line", "BF16_Optimizer": "line",
    "DeepSpeedZeroOptimizer_Stage3": "parameter"}
_SCALE_FIELDS = ("dynamic", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


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


@dataclass(frozen=True)
class Buffer:
    """One tensor of fp32 weights of this rank, and the pieces of parameters that lie in it."""

    weights: Tensor
    held: tuple[tuple[str, Piece], ...]
    is_frozen: bool = False


def layout_of(engine) -> Layout:
    """Return how the engine's state lies on the ranks (replicated: in files); frozen parts last."""
    cut, zero, names = _cut_of(engine), engine.optimizer, _names(engine)
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape))
              for name, parameter in engine.module.named_parameters()}
    frozen = {name: shapes[name] for name in _frozen(engine)}
    if cut == "whole":
        trained = {name: shapes[name] for name in shapes if name not in frozen}
        layout = replicated(trained, dist.world_size())
    else:
        groups = []
        for parameters, offsets, flat in _groups(zero):
            size = sum(p.partition_numel() for p in parameters) if cut == "parameter" \
                else flat.numel()
            groups.append(Group(tuple(names[id(p)] for p in parameters), tuple(offsets), size))
        layout = Layout(dist.world_size(), cut, shapes, tuple(groups))
    if not frozen:
        return layout
    last = in_a_line(frozen, dist.world_size(), is_frozen=True)
    if cut == "parameter":
        sizes = [parameter.partition_numel() for parameter in _frozen(engine).values()]
        last = replace(last, offsets=tuple(_ends(sizes)), size=sum(sizes))
    return replace(layout, shapes=shapes, groups=(*layout.groups, last))


def buffers(engine, layout: Layout, *, writing: bool = False) -> Iterator[Buffer]:
    """Yield this rank's buffers, each in memory until the next one is asked for.

    `writing`: they are written by the caller, and the weights that run forward follow.
    """
    cut, zero = _cut_of(engine), engine.optimizer
    if cut == "whole":
        for name, parameter in engine.module.named_parameters():
            piece = Piece(dist.rank(), 0, 0, 0, parameter.numel())
            yield Buffer(parameter, ((name, piece),), not parameter.requires_grad)
    elif cut == "parameter":
        yield from _stage3_buffers(engine, layout, writing)
    else:
        for number, (_, _, flat) in enumerate(_groups(zero)):
            yield Buffer(flat, tuple(layout.held_by(dist.rank(), number)))
        yield from _frozen_buffers(engine, layout, writing)
        if writing:
            zero.update_lp_params()


def base_optimizer(engine) -> torch.optim.Optimizer:
    """Return the optimizer inside DeepSpeed's wrapper; its state is keyed by the buffers."""
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def read_loss_scale(engine) -> dict:
    """Return the fields of the fp16 loss scale; empty where there is none."""
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    found = {field: getattr(scaler, field) for field in _SCALE_FIELDS if hasattr(scaler, field)}
    if hasattr(scaler, "dynamic_loss_scale"):
        found["dynamic"] = scaler.dynamic_loss_scale
    return found if "cur_scale" in found else {}


def write_loss_scale(engine, saved: dict) -> None:
    """Go on with the saved dynamic fp16 scale; a static scale is the JSON's."""
    if read_loss_scale(engine).get("dynamic") and saved.get("dynamic"):
        for field in _SCALE_FIELDS[1:]:
            if saved.get(field) is not None and hasattr(engine.optimizer.loss_scaler, field):
                setattr(engine.optimizer.loss_scaler, field, saved[field])


def aliases(engine) -> dict[str, str]:
    """Return {other name: name} of parameters that the model has under two names."""
    names = _names(engine)
    return {name: names[id(parameter)]
            for name, parameter in engine.module.named_parameters(remove_duplicate=False)
            if names[id(parameter)] != name}


def is_on_disk(engine) -> bool:
    """Return whether the optimizer's state lies on NVMe and comes into memory group by group."""
    return engine.zero_nvme_offload_optimizer()


def _cut_of(engine) -> Literal["whole", "line", "parameter"]:
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return "whole"
    return _CUTS[type(optimizer).__name__]


def _names(engine) -> dict[int, str]:
    return {id(parameter): name for name, parameter in engine.module.named_parameters()}


def _frozen(engine) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in engine.module.named_parameters()
            if not parameter.requires_grad}


def _frozen_buffers(engine, layout: Layout, writing: bool) -> Iterator[Buffer]:
    """Yield a copy of this rank's part of what is frozen; to write, all of it that is here."""
    frozen = _frozen(engine)
    if not frozen:
        return
    held = tuple(layout.held_by(dist.rank(), len(layout.groups) - 1))
    if layout.cut == "parameter":
        parts = [parameter.ds_tensor for parameter in frozen.values()]
        flat = torch.cat([part.view(-1) for part in parts])
        yield Buffer(flat, held, is_frozen=True)
        for part, values in zip(parts, flat.split(list(map(len, parts))), strict=True):
            part.copy_(values)  # changed where it was written
    elif writing:
        for name, parameter in frozen.items():
            whole = Piece(dist.rank(), 0, 0, 0, parameter.numel())
            yield Buffer(parameter, ((name, whole),), is_frozen=True)
    else:
        part = [frozen[name].detach().reshape(-1)[piece.start:piece.start + piece.count]
                for name, piece in held]
        size = layout.groups[-1].size - sum(map(len, part))
        padding = next(iter(frozen.values())).new_zeros(size)
        yield Buffer(torch.cat([*part, padding]), held, is_frozen=True)


def _groups(zero) -> Iterator[tuple[list, list[int], Tensor]]:
    """Yield (parameters, their offsets, this rank's fp32 weights) of each group of a wrapper."""
    kind = type(zero).__name__
    if kind == "BF16_Optimizer":
        for parameters, flat in zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True):
            yield parameters, _ends([p.numel() for p in parameters]), flat
    elif kind == "DeepSpeedZeroOptimizer":
        yield from zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets,
                       zero.single_partition_of_fp32_groups, strict=True)
    else:
        for parameters, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat,
                                    strict=True):
            for parameter in parameters:
                assert zero._get_param_partition_rank(parameter) == dist.rank()
            yield parameters, _ends([p.partition_numel() for p in parameters]), flat


def _ends(sizes: list[int]) -> list[int]:
    """Return where each of some parts begins that lie end to end."""
    return [0, *accumulate(sizes)][:-1]


def _stage3_buffers(engine, layout: Layout, writing: bool) -> Iterator[Buffer]:
    zero = engine.optimizer
    if writing:
        zero.checkpoint_event_prologue()  # every parameter partitioned
        if zero.swap_optimizer:
            zero.optimizer_swapper.purge_state()  # else the swapper keeps the moments it knows
    for number in range(len(zero.fp32_partitioned_groups_flat)):
        with _in_memory(zero, number):
            yield Buffer(zero.fp32_partitioned_groups_flat[number],
                         tuple(layout.held_by(dist.rank(), number)))
            if writing:
                zero._reassign_or_swap_out_partitioned_parameters(number)
    yield from _frozen_buffers(engine, layout, writing)
    if writing:
        zero.checkpoint_event_epilogue()  # small parameters whole again


@contextmanager
def _in_memory(zero, group: int) -> Iterator[None]:
    on_nvme = zero._swappable_optimizer_subgroup(group)
    if on_nvme:
        zero._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        if on_nvme:
            zero._optimizer_states_and_gradient_swap_out(group)
