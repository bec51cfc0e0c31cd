"""The files of a checkpoint: what each rank writes, and reading any slice of it again.

    rank-00000.safetensors ...   each rank's buffers: "GROUP.fp32", "GROUP.exp_avg", ...
    layout.json                  where every parameter lies in them (layout.py), counters, loss
                                 scale, optimizer scalars

No pickles. A rank writes one file and hashes it while it writes; a reader opens the files of those
ranks that have what it asks for, and no others.
"""

import operator
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deberta_ds.base.json_files import read_json
from deberta_ds.cluster import dist
from deberta_ds.engine.layout import CheckpointError, Layout, layout_from
from deberta_ds.engine.state import (
    COUNTERS,
    MASTER,
    Buffer,
    aliases,
    base_optimizer,
    buffers,
    is_on_disk,
    read_loss_scale,
)

LAYOUT_FILE = "layout.json"
RANK_FILE = re.compile(r"rank-(\d{5,})\.safetensors")
_BUFFER = "buffer."  # before the names of the module's buffers, in rank 0's file


def rank_file(rank: int) -> str:
    """Return the name of a rank's tensors in a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def describe_engine(engine, layout: Layout) -> dict:
    """Return the values of layout.json: all that is not in the ranks' files."""
    entries = _entries(engine, layout)
    keys, without, scalars = [], {}, {}
    for key, value in _of_all([entry for *_, entry in entries]).items():
        without[key] = [name for names, _, entry in entries if key not in entry for name in names]
        if per_element(value):
            keys.append(key)
        else:
            kind = str(value.dtype).removeprefix("torch.") if torch.is_tensor(value) else ""
            scalars[key] = {"value": value.item() if kind else value, "tensor": kind}
    return asdict(layout) | {
        "keys": keys, "scalars": scalars, "without": without,
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "loss_scale": read_loss_scale(engine), "aliases": aliases(engine),
        "buffers": {name: tuple(value.shape) for name, value in _kept_buffers(engine.module)}}


def described_tensors(engine, layout: Layout) -> list[tuple[str, torch.dtype, int]]:
    """Return (name, dtype, elements) of what `tensors_of_rank` will give."""
    entries = [{MASTER: weights} | entry for _, weights, entry in _entries(engine, layout)]
    if layout.is_replicated or is_on_disk(engine):  # one line of all; one kind of entry
        entries = [{MASTER: entries[-1][MASTER]} if group.is_frozen else _of_all(entries)
                   for group in layout.groups]
    described = [(f"{number}.{key}", value.dtype, group.size)
                 for number, (group, entry) in enumerate(zip(layout.groups, entries, strict=True))
                 for key, value in entry.items() if key == MASTER or per_element(value)]
    if dist.is_main():
        described += [(_BUFFER + name, value.dtype, value.numel())
                      for name, value in _kept_buffers(engine.module)]
    return described


def tensors_of_rank(engine, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of this rank's file, each in memory until the next one is asked for."""
    state = base_optimizer(engine).state
    if layout.is_replicated:
        yield from _stretch_of_replica(engine, layout)
    else:
        for number, buffer in enumerate(buffers(engine, layout)):
            size = layout.groups[number].size
            weights = buffer.weights.detach().view(-1)[:size]
            clear_padding(weights, buffer)
            yield f"{number}.{MASTER}", weights
            for key, value in state.get(buffer.weights, {}).items():
                if per_element(value):
                    yield f"{number}.{key}", value.view(-1)[:size]
    if dist.is_main():
        for name, value in _kept_buffers(engine.module):
            yield _BUFFER + name, value.reshape(-1)


def clear_padding(flat: Tensor, buffer: Buffer) -> None:
    """Set what belongs to no parameter to 0: ZeRO-3 pads a parameter with whatever memory held."""
    end = 0
    for piece in sorted((piece for _, piece in buffer.held), key=lambda piece: piece.offset):
        flat[end:piece.offset] = 0
        end = piece.offset + piece.count
    flat[end:] = 0


def _stretch_of_replica(engine, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of a state that every rank has whole."""
    whole = {buffer.held[0][0]: buffer.weights for buffer in buffers(engine, layout)}
    state = base_optimizer(engine).state
    first = next(iter(whole.values()))
    entries = [entry for *_, entry in _entries(engine, layout)]
    keys = [key for key, value in _of_all(entries).items() if per_element(value)]
    for number, group in enumerate(layout.groups):
        for key in (MASTER, *(keys if not group.is_frozen else ())):
            flat = first.new_zeros(group.size)
            for name, piece in layout.held_by(dist.rank(), number):
                source = whole[name] if key == MASTER else state[whole[name]].get(key)
                if source is None:  # of another kind of optimizer (`without` in layout.json)
                    continue
                flat[piece.offset:piece.offset + piece.count] = source.detach().reshape(-1)[
                    piece.start:piece.start + piece.count]
            yield f"{number}.{key}", flat


def _entries(engine, layout: Layout) -> list[tuple[tuple[str, ...], Tensor, dict]]:
    """Return (parameters, weights, entry in the optimizer's state) of this rank's buffers.

    On NVMe the first stands for all: such optimizers have one kind of entry.
    """
    state, found = base_optimizer(engine).state, buffers(engine, layout)
    if is_on_disk(engine):
        weights = next(found).weights
        return [(tuple(layout.shapes), weights, state.get(weights, {}))]
    return [(tuple(name for name, _ in buffer.held) if layout.is_replicated
             else layout.groups[number].names, buffer.weights, state.get(buffer.weights, {}))
            for number, buffer in enumerate(found)]


def _of_all(entries: list[dict]) -> dict:
    """Return the values of several entries of an optimizer's state, the first of each key."""
    return {key: value for entry in reversed(entries) for key, value in entry.items()}


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    kept = module.state_dict(keep_vars=True).keys()
    return [(name, value) for name, value in module.named_buffers() if name in kept]


def per_element(value) -> bool:
    """Return whether a value of an optimizer's state belongs to each element of a parameter."""
    return torch.is_tensor(value) and value.dim() > 0


class SavedState:
    """The parameters, optimizer state, buffers and counters of one verified checkpoint."""

    def __init__(self, directory: str | Path):
        """Read the map of a checkpoint directory; CheckpointError if it is damaged."""
        self.directory = Path(directory)
        place = self.directory / LAYOUT_FILE
        values = read_json(place)
        self.layout = layout_from(values, place)
        self.shapes = self.layout.shapes
        try:
            self.counters = {name: operator.index(values["counters"][name]) for name in COUNTERS}
            self.aliases, self._keys = dict(values["aliases"]), list(values["keys"])
            self.loss_scale = dict(values["loss_scale"])
            # {key: parameters that have none}
            self._without = {key: frozenset(names) for key, names in values["without"].items()}
            self._scalars = {
                key: torch.tensor(found["value"], dtype=getattr(torch, found["tensor"]))
                if found["tensor"] else found["value"] for key, found in values["scalars"].items()}
            shapes = {name: tuple(shape) for name, shape in values["buffers"].items()}
            if not all(isinstance(text, str) for text in
                       (*self._keys, *self.aliases, *self.aliases.values())):
                raise ValueError
            if not all(isinstance(value, int | float | None)
                       for value in self.loss_scale.values()):
                raise ValueError
            self.opened: dict[int, safe_open] = {}
            self.buffers = {name: self.open(0).get_tensor(_BUFFER + name).reshape(shape)
                            for name, shape in shapes.items()}
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError,
                SafetensorError) as error:
            if isinstance(error, CheckpointError):  # of the tensors' file
                raise
            raise CheckpointError(f"{place}: is not what a save writes; use an older checkpoint"
                                  ) from None

    def state_keys(self, name: str) -> list[str]:
        """Return the optimizer's per-element tensors of a parameter, such as exp_avg."""
        return [key for key in self._keys if name not in self._without.get(key, ())]

    def scalars(self, name: str) -> dict:
        """Return the optimizer's other values of a parameter, such as step."""
        return {key: value for key, value in self._scalars.items()
                if name not in self._without.get(key, ())}

    def read(self, name: str, key: str, start: int = 0, count: int | None = None) -> Tensor:
        """Return `count` elements from `start` of a flattened parameter's `key` (a copy, 1-D)."""
        parts = []
        for piece in self.layout.pieces(name, start, count):
            try:
                part = self.open(piece.rank).get_slice(f"{piece.group}.{key}")
                parts.append(part[piece.offset:piece.offset + piece.count])
            except SafetensorError as error:
                raise CheckpointError(f"{self.directory / rank_file(piece.rank)}: {error}; use an "
                                      "older checkpoint") from None
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def read_whole(self, name: str) -> Tensor:
        """Return a parameter's fp32 weights in its own shape."""
        return self.read(name, MASTER).float().reshape(self.shapes[name])

    def open(self, rank: int) -> safe_open:
        """Return the opened file of a rank."""
        if rank not in self.opened:
            path = self.directory / rank_file(rank)
            try:
                self.opened[rank] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be read ({error}); use an older checkpoint"
                                      ) from None
        return self.opened[rank]
