"""Sharded checkpoints that are whole or not there.

    OUT/checkpoints/step-00000100/
        rank-00000.safetensors ...   what each rank holds (saved_state.py)
        layout.json                  where every parameter lies in those files
        run.json                     step, rows seen, corpus content hashes, configs, versions
        spm.model                    the tokenizer
        manifest.json                every file with its size and xxh3; written last
    OUT/best                         points to the checkpoint with the best train.best_metric

A directory without manifest.json is a save that never finished. There is no `latest` file: every
file is verified before a tensor is loaded, and only a verified directory is ever loaded.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError, listed, naming
from deberta_ds.base.files import xxh3
from deberta_ds.base.json_files import parse_json, read_json
from deberta_ds.base.numbers import counted
from deberta_ds.checkpoint.download import local_copy
from deberta_ds.checkpoint.run_record import (
    DIRECTORY,
    MANIFEST,
    RUN_FILE,
    RunRecord,
    read_run_record,
)
from deberta_ds.checkpoint.saved_state import LAYOUT_FILE, SavedState, rank_file
from deberta_ds.cluster import dist
from deberta_ds.config.model import computed_anywhere
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine.ds_config import precision, zero_stage
from deberta_ds.engine.layout import CheckpointError, Layout
from deberta_ds.engine.state import (
    MASTER,
    Buffer,
    base_optimizer,
    buffers,
    layout_of,
    write_loss_scale,
)
from deberta_ds.model.backbone import on_meta
from deberta_ds.objectives.build import build_model
from deberta_ds.tracking.records import METRICS_FILE

VERSION = 2  # of the manifest
T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from; `warnings` name newer ones that are not whole, and why."""

    path: Path | None
    warnings: tuple[str, ...] = ()
    begun_from: str = ""  # the PATH of --resume from which the run began


def path_of(out_dir: str | Path, step: int) -> Path:
    """Return where a run keeps the checkpoint of a step."""
    return Path(out_dir) / DIRECTORY / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint directory that is named as `path_of` does."""
    return int(path.name.removeprefix("step-"))


def is_step(name: str) -> bool:
    """Return whether a file name is that of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def list_steps(out_dir: str | Path) -> list[Path]:
    """Return the checkpoint directories of a run, whole or not, oldest first."""
    directory = Path(out_dir) / DIRECTORY
    found = [p for p in directory.glob("step-*") if is_step(p.name)]
    return sorted(found, key=step_of)


def list_finished(out_dir: str | Path) -> list[Path]:
    """Return those of `list_steps` whose save ended; their files may have been damaged since."""
    return [path for path in list_steps(out_dir) if (path / MANIFEST).exists()]


def is_unsaved_run(directory: Path) -> bool:
    """Return whether a run was begun here that has written its metrics, but no checkpoint yet."""
    return (directory / METRICS_FILE).is_file() and not list_finished(directory)


def newest(directory: str | Path) -> Path:
    """Return a checkpoint directory itself, or the newest finished one of a run's out_dir.

    Of a URL it is a copy in the cache.
    """
    directory = local_copy(directory)
    if (directory / RUN_FILE).exists():
        return directory
    finished = list_finished(directory)
    if not finished and is_unsaved_run(directory):
        raise CheckpointError(f"{directory}: this run has saved no checkpoint yet; run its command "
                              "again, and end it after train.save_every steps or with one Ctrl-C, "
                              "which saves before it stops")
    if not finished:
        raise CheckpointError(f"{directory}: no checkpoint; give the out_dir of a run, or one of "
                              f"its {DIRECTORY}/step-NNNNNNNN")
    return finished[-1]


def read_newest(directory: str | Path, read: Callable[[Path], T]) -> T:
    """Return what `read` returns of the checkpoint that `newest` names.

    A run that goes on may delete it meanwhile, once it has a newer one, which is read then.
    """
    path = newest(directory)
    try:
        return read(path)
    except (UserError, OSError):
        if (path / MANIFEST).exists() or newest(directory) == path:
            raise
    return read_newest(directory, read)


def find(out_dir: str | Path, resume: str) -> Found:
    """Return what `--resume auto|never|PATH` means for a run; verified, equal on every rank.

    auto: the newest whole checkpoint; newer broken ones are named. PATH: that one, or the newest
    whole one that a run which began there has saved here, so that a command can be given again
    after an interruption. Raises CheckpointError if there are finished checkpoints but none is
    whole, if PATH is not whole, or if `never` meets any. A run killed in its very first save has an
    unfinished one only, and starts from step 0.
    """
    candidates = dist.from_main(lambda: list_steps(out_dir))
    if resume == "never":
        if candidates:
            raise CheckpointError(f"{out_dir}/{DIRECTORY} holds checkpoints, but --resume never "
                                  "was given; use --resume auto, or another out_dir")
        return Found(None)
    begun_from = ""
    if resume != "auto":
        place = dist.together(lambda: local_copy(resume))
        begun_from = os.path.realpath(place)
        candidates = [place, *dist.from_main(lambda: [
            path for path in list_finished(out_dir) if os.path.realpath(path) != begun_from
            and _recorded(path, "begun_from") == begun_from])]
    skipped: list[str] = []
    for path in reversed(candidates):
        problems = problems_of(path)
        if not problems:
            said = dist.from_main(lambda path=path: _recorded(path, "begun_from"))
            return Found(path, warnings_of(skipped), begun_from or said or "")
        skipped.append(f"{path}: {listed(problems)}")
    if begun_from:
        if of_a_run := dist.from_main(lambda: list_finished(place)):
            raise CheckpointError(f"{resume}: is a run; name a checkpoint, such as {of_a_run[-1]}")
        raise CheckpointError(f"{resume}: not a whole checkpoint: {listed(problems)}")
    if dist.from_main(lambda: list_finished(out_dir)):
        raise CheckpointError("no whole checkpoint to resume from:\n  " + "\n  ".join(skipped)
                              + "\n  delete them to start from step 0")
    return Found(None, warnings_of(skipped))


def warnings_of(skipped: list[str]) -> tuple[str, ...]:
    """Return the log's line of each checkpoint that was skipped, with its problem."""
    return tuple(f"WARNING: checkpoint skipped: {line}" for line in skipped)


def problems_of(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files; each rank checks its share, all agree."""
    files, problems = dist.from_main(lambda: _read_manifest(path))
    names = sorted(files)[dist.rank()::dist.world_size()]
    problems = problems if dist.is_main() else []
    mine = problems + [problem for name in names
                       if (problem := _file_problem(path / name, files[name]))]
    return [problem for part in dist.gather_objects(mine) for problem in part]


def _read_manifest(path: Path) -> tuple[dict[str, dict], list[str]]:
    """Return ({file: size and checksum}, problems) of a checkpoint's manifest.

    It must name the file of every rank that saved, and every file that is there.
    """
    if not (path / MANIFEST).exists():
        return {}, ["no manifest.json: the save did not finish"]
    try:
        with naming(path / MANIFEST):
            data = (path / MANIFEST).read_bytes()
        manifest = parse_json(data)
        name = _NAME.fullmatch(path.name)
        version, files = manifest["version"], manifest["files"]
        if name and manifest["step"] != int(name[1]):
            raise ValueError
        for entry in files.values():
            int(entry["bytes"]), str(entry["xxh3"])
        if version != VERSION:
            return {}, [f"manifest.json has version {version}; this program reads {VERSION}"]
        ranks, saved_by = manifest["world_size"], _recorded(path, "world_size")
        if saved_by is not None and ranks != saved_by:
            return {}, [f"manifest.json is of {ranks} ranks, {RUN_FILE} of {saved_by}"]
        wanted = {RUN_FILE, LAYOUT_FILE, *map(rank_file, range(int(ranks)))}
    except UserError as error:  # of reading it
        return {}, [str(error)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # not what we write
        return {}, ["manifest.json is damaged"]
    # os.walk: a listing says what is a file, and a rank of 4,096 need not ask for each.
    there = {Path(directory, name).relative_to(path).as_posix()
             for directory, _, names in os.walk(path) for name in names
             if not name.startswith(".")} - {MANIFEST}
    unsafe = [name for name in files if ".." in Path(name).parts or Path(name).is_absolute()
              or "\0" in name]
    problems = [f"manifest.json names {name}, outside the directory" for name in unsafe]
    problems += [f"manifest.json does not name {name}" for name in
                 sorted((wanted | there) - files.keys())[:5]]
    return ({}, problems) if unsafe else (files, problems)


def _recorded(path: Path, field: str) -> Any:
    """Return what run.json says; None if it cannot be read, which its checksum will say."""
    try:
        return read_json(path / RUN_FILE).get(field)
    except UserError:
        return None


def _file_problem(file: Path, entry: dict) -> str | None:
    try:
        if not file.is_file():
            return f"{file.name} is missing"
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{file.name} has {size} bytes, not {entry['bytes']} (truncated?)"
        if xxh3(file) != entry["xxh3"]:
            return f"{file.name} has another checksum than when it was saved (flipped bits)"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return None


def layout_changes(record: RunRecord, ds: dict) -> str:
    """Return "2 ranks, ZeRO-3, fp32 -> 1 rank, ..." if a checkpoint's layout differs, or ""."""
    saved = (f"{counted(record.world_size, 'rank')}, ZeRO-{zero_stage(record.deepspeed)}, "
             f"{precision(record.deepspeed)}")
    now = f"{counted(dist.world_size(), 'rank')}, ZeRO-{zero_stage(ds)}, {precision(ds)}"
    return f"{saved} -> {now}" if saved != now else ""


def load_whole_state(path: str | Path) -> tuple[dict[str, torch.Tensor], RunConfig]:
    """Return (all parameters in fp32 on the CPU, the run's config) of a checkpoint directory.

    The model of that config is computed as this machine can, whatever the run's machine had. Works
    for every ZeRO stage, on one rank alone. The files are verified first.
    """
    return read_newest(path, _load_whole_state)


def _load_whole_state(path: Path) -> tuple[dict[str, torch.Tensor], RunConfig]:
    files, problems = _read_manifest(path)
    problems += [problem for name, entry in files.items()
                 if (problem := _file_problem(path / name, entry))]
    if problems:
        others = [step.name for step in list_finished(path.parent.parent) if step != path]
        remedy = f"name another one next to it ({listed(others[::-1])})" if others else \
            "copy it again from its source"
        raise CheckpointError(f"{path}: not a whole checkpoint: {listed(problems)}; {remedy}")
    record = read_run_record(path)
    run = record.run(path / RUN_FILE)
    user_code.check_same(run, record.content_hashes, str(path))
    state = SavedState(path)
    _check_model(run, state, path)
    whole = {name: state.read_whole(name) for name in state.shapes}
    whole |= {name: whole[owner] for name, owner in state.aliases.items()}
    run = replace(run, model=computed_anywhere(run.model))
    return whole | {name: buffer.float() for name, buffer in state.buffers.items()}, run


def _check_model(run: RunConfig, state: SavedState, path: Path) -> None:
    """Raise CheckpointError unless a state holds every tensor of the run's model, in its shape."""
    wanted = {name: tuple(tensor.shape)
              for name, tensor in on_meta(build_model, run).state_dict().items()}
    found = state.shapes | {name: tuple(buffer.shape) for name, buffer in state.buffers.items()}
    found |= {name: state.shapes.get(owner) for name, owner in state.aliases.items()}
    if differing := _differing(wanted, found):
        raise CheckpointError(f"{path}: its tensors are not those of the model in {RUN_FILE}: "
                              f"{differing}; use an older checkpoint")


def _differing(wanted: dict, found: dict) -> str:
    """Return the names of some tensors that one of two models lacks, or has in another shape."""
    names = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    return ", ".join(names[:5]) + " ..." * (len(names) > 5)


@torch.no_grad()
def load(engine, path: str | Path, *, is_other_run: bool = False) -> None:
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
