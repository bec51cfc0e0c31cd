"""The files of a checkpoint: what each rank writes, and loading any slice of it into an engine.

    rank-00000.safetensors ...   each rank's buffers: "GROUP.fp32", "GROUP.exp_avg", ...
    layout.json                  where every parameter lies in them (Layout of engine/state.py),
                                 counters, loss scale, optimizer scalars

No pickles. A rank writes one file and hashes it while it writes; a reader opens the files of those
ranks that have what it asks for, and no others.
"""

import operator
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deberta_ds.base import user_code
from deberta_ds.base.errors import listed
from deberta_ds.base.files import read_json
from deberta_ds.checkpoint.find import (
    LAYOUT_FILE,
    RUN_FILE,
    list_finished,
    problems_read_alone,
    rank_file,
    read_newest,
    read_run_record,
)
from deberta_ds.cluster import dist
from deberta_ds.config.model import computed_anywhere
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine.state import (
    COUNTERS,
    MASTER,
    Buffer,
    CheckpointError,
    Layout,
    aliases,
    base_optimizer,
    buffers,
    is_on_disk,
    layout_from,
    layout_of,
    read_loss_scale,
    write_loss_scale,
)
from deberta_ds.model.backbone import on_meta
from deberta_ds.objectives.build import build_model

_BUFFER = "buffer."  # before the names of the module's buffers, in rank 0's file


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
            self.aliases, self.all_keys = dict(values["aliases"]), list(values["keys"])
            self.loss_scale = dict(values["loss_scale"])
            # {key: parameters that have none}
            self._without = {key: frozenset(names) for key, names in values["without"].items()}
            self._scalars = {
                key: torch.tensor(found["value"], dtype=getattr(torch, found["tensor"]))
                if found["tensor"] else found["value"] for key, found in values["scalars"].items()}
            shapes = {name: tuple(shape) for name, shape in values["buffers"].items()}
            if not all(isinstance(text, str) for text in
                       (*self.all_keys, *self.aliases, *self.aliases.values())):
                raise ValueError
            if not all(isinstance(value, int | float | None)
                       for value in self.loss_scale.values()):
                raise ValueError
            self._frozen = {name for group in self.layout.groups if group.is_frozen
                            for name in group.names}
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
        return [key for key in self.all_keys if name not in self._without.get(key, ())]

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

    def read_whole(self, name: str, key: str = MASTER) -> Tensor:
        """Return a parameter's fp32 weights, or its `key` of the optimizer's state, which a frozen
        one does not have: then its weights.
        """
        found = self.read(name, MASTER if name in self._frozen else key)
        return found.float().reshape(self.shapes[name])

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


def load_whole_state(path: str | Path, key: str = MASTER
                     ) -> tuple[dict[str, torch.Tensor], RunConfig]:
    """Return (all parameters in fp32 on the CPU, the run's config) of a checkpoint directory.

    The model of that config is computed as this machine can, whatever the run's machine had. Works
    for every ZeRO stage, on one rank alone. The files are verified first. `key`: what of the
    optimizer's state to return in place of the weights.
    """
    return read_newest(path, partial(_load_whole_state, key=key))


def _load_whole_state(path: Path, key: str) -> tuple[dict[str, torch.Tensor], RunConfig]:
    if problems := problems_read_alone(path):
        others = [step.name for step in list_finished(path.parent.parent) if step != path]
        remedy = f"name another one next to it ({listed(others[::-1])})" if others else \
            "copy it again from its source"
        raise CheckpointError(f"{path}: not a whole checkpoint: {listed(problems)}; {remedy}")
    record = read_run_record(path)
    run = record.run(path / RUN_FILE)
    user_code.check_same(run, record.content_hashes, str(path))
    state = SavedState(path)
    if key not in (known := [MASTER, *state.all_keys]):
        raise CheckpointError(f"{path}: the optimizer's state has no {key!r}; there are "
                              f"{', '.join(known)}")
    whole = {name: state.read_whole(name, key) for name in state.shapes}
    whole |= {name: whole[owner] for name, owner in state.aliases.items() if owner in whole}
    whole |= {name: buffer.float() for name, buffer in state.buffers.items()}
    wanted, found = ({name: tuple(tensor.shape) for name, tensor in tensors.items()}
                     for tensors in (on_meta(build_model, run).state_dict(), whole))
    if differing := _differing(wanted, found):
        raise CheckpointError(f"{path}: its tensors are not those of the model in {RUN_FILE}: "
                              f"{differing}; use an older checkpoint")
    return whole, replace(run, model=computed_anywhere(run.model))


def _differing(wanted: dict, found: dict) -> str:
    """Return the names of some tensors that one of two models lacks, or has in another shape."""
    names = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    return ", ".join(names[:5]) + " ..." * (len(names) > 5)


@torch.no_grad()
def load_state(engine, path: str | Path, *, is_other_run: bool = False) -> None:
    """Write a verified checkpoint into the engine: weights, moments, counters, loss scale, buffers.

    Call on every rank. `is_other_run`: of another run, whose steps are not counted: the optimizer's
    counters alone. Raises CheckpointError if the engine has other parameters. Each rank reads the
    slices that it owns, one buffer in memory at a time, so world size and stage may differ.
    DeepSpeed's own loaders unpickle, and 0.19.8's go wrong silently
    (docs/explanation/reliability.md).
    """
    # What may fail comes first, on all ranks together: writing into an engine has collectives.
    state, layout = dist.together(lambda: SavedState(path)), layout_of(engine)
    dist.together(lambda: open_files(layout, state))
    optimizer = base_optimizer(engine)
    for number, buffer in enumerate(buffers(engine, layout, writing=True)):
        names = [name for name, _ in buffer.held] or layout.groups[number].names
        # A parameter that never had a gradient may lack what the others of its buffer have.
        _fill(buffer, max(names, key=lambda name: len(state.state_keys(name))), optimizer, state)
    write_loss_scale(engine, state.loss_scale)
    for name, value in ({} if is_other_run else state.counters).items():
        setattr(engine, name, value)
    for name, value in engine.module.named_buffers():
        if name in state.buffers:
            value.copy_(state.buffers[name])
    dist.barrier()


def open_files(layout: Layout, state: SavedState) -> None:
    """Check the parameters, and open the files that hold what this rank will own."""
    if differing := _differing(layout.shapes, state.shapes):
        raise CheckpointError(f"{state.directory}: its parameters are not the model's: {differing}")
    wanted: list[tuple[str, int, int | None]] = []
    for number, group in enumerate(layout.groups):
        is_whole = layout.is_replicated or group.is_frozen and layout.cut == "line"
        wanted += [(name, 0, None) for name in group.names] if is_whole else [
            (name, piece.start, piece.count)
            for name, piece in layout.held_by(dist.rank(), number)]
    ranks = {piece.rank for one in wanted for piece in state.layout.pieces(*one)}
    for rank in sorted(ranks):
        state.open(rank)


def _fill(buffer: Buffer, name: str, optimizer: torch.optim.Optimizer,
          state: SavedState) -> None:
    """Write a buffer's weights and its entry in the optimizer's state, which is that of `name`."""
    target = buffer.weights
    _copy(target.data, MASTER, buffer, state)
    if buffer.is_frozen:
        return
    entry = {}
    for key in state.state_keys(name):
        entry[key] = torch.zeros_like(target.data)
        _copy(entry[key], key, buffer, state)
    on_device = any(group.get("fused") or group.get("capturable")
                    for group in optimizer.param_groups)
    for key, value in state.scalars(name).items():
        if torch.is_tensor(value):  # a tensor of its own: the optimizer counts in place
            value = value.clone().to(target.device if on_device else "cpu")
        entry[key] = value
    optimizer.state[target] = entry


def _copy(target: Tensor, key: str, buffer: Buffer, state: SavedState) -> None:
    flat = target.view(-1)
    for name, piece in buffer.held:
        flat[piece.offset:piece.offset + piece.count] = state.read(
            name, key, piece.start, piece.count)
