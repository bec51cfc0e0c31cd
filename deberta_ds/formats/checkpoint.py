"""Sharded checkpoints that are whole or not there.

    OUT/checkpoints/step-00000100/
        zero/...          DeepSpeed's own files, one or more per rank
        run.json          step, rows seen, corpus fingerprints, resolved configs, versions
        manifest.json     every file with its size and xxh3; written last

A directory without manifest.json is a save that never finished. DeepSpeed alone neither notices a
flipped byte nor a missing `latest` (it would start from scratch), so there is no `latest`, every
file is verified before a tensor is loaded, and only a verified directory is ever loaded.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from deberta_ds import dist
from deberta_ds.config import RunConfig, from_dict
from deberta_ds.deepspeed_config import precision, zero_stage
from deberta_ds.files import sync_directory, write_atomic, xxh3
from deberta_ds.formats.restore import restore
from deberta_ds.formats.shards import SWAP_FILE, CheckpointError, ShardedState
from deberta_ds.formats.tensors import save_pickle
from deberta_ds.model.backbone import on_meta
from deberta_ds.model.decay import decay_groups
from deberta_ds.objectives.build import build_model, objective_of

DIRECTORY = "checkpoints"
MANIFEST, RUN_FILE, TAG = "manifest.json", "run.json", "zero"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, and the newer ones that are not whole, with the reason."""

    path: Path | None
    passed_over: tuple[str, ...] = ()


def path_of(out_dir: str | Path, step: int) -> Path:
    return Path(out_dir) / DIRECTORY / f"step-{step:08d}"


def list_steps(out_dir: str | Path) -> list[Path]:
    """Return the checkpoint directories of a run, whole or not, oldest first."""
    directory = Path(out_dir) / DIRECTORY
    found = [p for p in directory.glob("step-*") if _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]))


def list_finished(out_dir: str | Path) -> list[Path]:
    """Return those of `list_steps` whose save ended; their files may have been damaged since."""
    return [path for path in list_steps(out_dir) if (path / MANIFEST).exists()]


def read_run_file(path: str | Path) -> dict:
    """Return run.json of a checkpoint directory."""
    file = Path(path) / RUN_FILE
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; {path} is not a checkpoint directory "
                              f"(those are named OUT/{DIRECTORY}/step-NNNNNNNN)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: damaged: {error}; use an older checkpoint") from None


def newest(directory: str | Path) -> Path:
    """Return a checkpoint directory itself, or the newest finished one of a run's out_dir."""
    directory = Path(directory)
    if (directory / RUN_FILE).exists():
        return directory
    finished = list_finished(directory)
    if not finished:
        raise CheckpointError(f"{directory}: no checkpoint; give the out_dir of a run, or one of "
                              f"its {DIRECTORY}/step-NNNNNNNN")
    return finished[-1]


def save(engine, out_dir: str | Path, step: int, record: dict, keep: int) -> Path:
    """Write a checkpoint on all ranks and delete all but the newest `keep`; return its directory.

    `record` goes into run.json with the step. Call on every rank. Raises CheckpointError on every
    rank if a file cannot be written (disk full); older checkpoints are left alone.
    """
    path = path_of(out_dir, step)
    try:
        _write(engine, path, {"step": step} | record)
    except CheckpointError as error:
        if dist.is_main():
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        raise CheckpointError(
            f"{path}: cannot be saved: {error}; older checkpoints are untouched. Make room (a save "
            "needs space for one checkpoint more than train.keep) and run again") from None
    if dist.is_main():
        _prune(out_dir, keep)
    dist.barrier()
    return path


def _write(engine, path: Path, record: dict) -> None:
    """Write every file of a checkpoint, the manifest last. Raises CheckpointError on all ranks."""
    _on_main(lambda: _empty(path))
    _agree(_write_shards(engine, path))
    _on_main(lambda: write_atomic(path / RUN_FILE, json.dumps(record, indent=1) + "\n"))
    entries, problem = {}, None
    try:
        entries = _describe_my_files(path)
    except OSError as error:  # fsync is where a full disk may first be noticed
        problem = str(error)
    _agree(problem)
    for part in dist.gather_objects(entries):
        entries |= part
    manifest = {"version": 1, "step": record["step"], "files": dict(sorted(entries.items()))}
    _on_main(lambda: write_atomic(path / MANIFEST, json.dumps(manifest, indent=1) + "\n"))
    if dist.is_main():
        sync_directory(path.parent)


def _on_main(action) -> None:
    """Run `action` on rank 0; an OSError there becomes a CheckpointError on every rank."""
    problem = None
    if dist.is_main():
        try:
            action()
        except OSError as error:
            problem = str(error)
    _agree(problem)


def _agree(problem: str | None) -> None:
    """Raise CheckpointError on every rank if any rank has a problem."""
    problems = [(rank, text) for rank, text in enumerate(dist.gather_objects(problem)) if text]
    if problems:
        raise CheckpointError(f"rank {problems[0][0]}: {problems[0][1]}")


def _empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # the remains of a save that was killed
    path.mkdir(parents=True)


def _write_shards(engine, path: Path) -> str | None:
    """Have DeepSpeed write its files; return what went wrong on this rank.

    DeepSpeed's save has collectives after the writing, so a rank whose write failed must go on to
    them: an exception would leave the others waiting, or mix up two collectives. For the same
    reason rank 0 does not copy DeepSpeed's recovery scripts (`load_whole_state` does their work).
    """
    problems = []
    writer = engine.checkpoint_engine

    def save_file(state_dict, path):
        try:
            save_pickle(path, state_dict)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")

    writer.save = save_file
    engine._copy_recovery_script = lambda path: None
    try:
        engine.save_checkpoint(str(path), tag=TAG, save_latest=False)
        _name_swapped_groups(engine, path)
    except OSError as error:
        problems.append(str(error))
    finally:
        del writer.save, engine._copy_recovery_script
    return problems[0] if problems else None


def _name_swapped_groups(engine, path: Path) -> None:
    """Write which copied swap files belong to which group, for an optimizer on NVMe."""
    if not engine.zero_nvme_offload_optimizer():
        return
    zero = engine.optimizer
    names = {group: flat.ds_id for group, flat in enumerate(zero.fp32_partitioned_groups_flat)
             if zero._swappable_optimizer_subgroup(group)}
    directory = path / TAG / "offloaded_tensors" / f"rank{dist.rank():02d}"
    write_atomic(directory / SWAP_FILE, json.dumps(names) + "\n")


def _describe_my_files(path: Path) -> dict[str, dict]:
    """Return {name: size and checksum} of this rank's share of the files, flushed to disk."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    entries = {}
    for file in files[dist.rank()::dist.world_size()]:
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
        entries[file.relative_to(path).as_posix()] = {"bytes": file.stat().st_size,
                                                      "xxh3": xxh3(file)}
    return entries


def _prune(out_dir: str | Path, keep: int) -> None:
    """Delete checkpoints older than the newest `keep` whole ones, each manifest first.

    The remains of killed saves that are older than the newest whole one go too.
    """
    steps = list_steps(out_dir)
    whole = list_finished(out_dir)
    for path in steps[:steps.index(whole[-1])]:
        if path not in whole[-keep:]:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)


def find(out_dir: str | Path, resume: str) -> Found:
    """Return what `--resume auto|never|PATH` means for a run; verified, equal on every rank.

    auto: the newest whole checkpoint; newer broken ones are named. Raises CheckpointError if there
    are finished checkpoints but none is whole, if PATH is not whole, or if `never` meets any. A run
    killed in its very first save has an unfinished one only, and starts from step 0.
    """
    candidates = dist.broadcast_object(list_steps(out_dir))
    if resume == "never":
        if candidates:
            raise CheckpointError(f"{out_dir}/{DIRECTORY} holds checkpoints, but --resume never "
                                  "was given; use --resume auto, or another out_dir")
        return Found(None)
    if resume != "auto":
        problems = problems_of(Path(resume))
        if problems:
            raise CheckpointError(f"{resume}: not a whole checkpoint: {'; '.join(problems)}")
        return Found(Path(resume))
    passed_over = []
    for path in reversed(candidates):
        problems = problems_of(path)
        if not problems:
            return Found(path, tuple(passed_over))
        passed_over.append(f"{path}: {'; '.join(problems)}")
    if dist.broadcast_object(list_finished(out_dir)):
        raise CheckpointError("no whole checkpoint to resume from:\n  " + "\n  ".join(passed_over)
                              + "\n  delete them to start from step 0")
    return Found(None, tuple(passed_over))


def problems_of(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files; each rank checks its share, all agree."""
    mine = _problems_in_share(path, dist.rank(), dist.world_size())
    every_rank = [problem for part in dist.gather_objects(mine) for problem in part]
    return list(dict.fromkeys(every_rank))


def _problems_in_share(path: Path, rank: int, world_size: int) -> list[str]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        name = _NAME.fullmatch(path.name)
        if manifest["version"] != 1 or (name and manifest["step"] != int(name[1])):
            raise ValueError
        files = manifest["files"]
        names = sorted(files)[rank::world_size]
        return [problem for name in names if (problem := _file_problem(path / name, files[name]))]
    except FileNotFoundError:
        return ["no manifest.json: the save did not finish"]
    except (ValueError, KeyError, TypeError):  # not JSON, or not what we write
        return ["manifest.json is damaged"]


def _file_problem(file: Path, entry: dict) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"{file.name} has {size} bytes, not {entry['bytes']} (truncated?)"
    if xxh3(file) != entry["xxh3"]:
        return f"{file.name} has another checksum than when it was saved (flipped bits)"
    return None


def check_layout(record: dict, ds: dict, place: str) -> None:
    """Raise CheckpointError if the checkpoint cannot be loaded into this world size and stage.

    Between ZeRO-1, 2, 3 and fp32 without ZeRO everything can. Without ZeRO in bf16 or fp16,
    DeepSpeed keeps its state in a form of its own (and starts Adam at step 1): it alone reads it.
    """
    saved = (zero_stage(record["deepspeed"]), precision(record["deepspeed"]))
    now = (zero_stage(ds), precision(ds))
    for stage, kind in (saved, now):
        if stage == 0 and kind != "fp32" and saved != now:
            raise CheckpointError(
                f"{place} was written with ZeRO-{saved[0]} in {saved[1]}, this job has "
                f"ZeRO-{now[0]} in {now[1]}: ZeRO-0 in {kind} goes on as itself only; use ZeRO-1")


def layout_changes(record: dict, ds: dict) -> str:
    """Return "2 ranks, ZeRO-3, fp32 -> 1 ranks, ..." if a checkpoint's layout differs, or ""."""
    saved = (f"{record['world_size']} ranks, ZeRO-{zero_stage(record['deepspeed'])}, "
             f"{precision(record['deepspeed'])}")
    now = f"{dist.world_size()} ranks, ZeRO-{zero_stage(ds)}, {precision(ds)}"
    return f"{saved} -> {now}" if saved != now else ""


def load(engine, path: str | Path) -> None:
    """Load a verified checkpoint into the engine, whatever world size and stage wrote it."""
    record = read_run_file(path)
    stage = zero_stage(record["deepspeed"])
    if stage == 0 and precision(record["deepspeed"]) != "fp32":
        loaded, _ = engine.load_checkpoint(str(path), tag=TAG)
        if loaded is None:  # DeepSpeed's way to say that it found nothing
            raise CheckpointError(f"{path}: DeepSpeed found no checkpoint in it")
    else:
        restore(engine, _open_state(Path(path) / TAG, record))
    dist.barrier()


def _open_state(directory: Path, record: dict) -> ShardedState:
    run = from_dict(record["config"])
    return ShardedState(directory, zero_stage(record["deepspeed"]), _plain_order(run),
                        objective_of(run).RENAMED)


def _plain_order(run: RunConfig) -> list[str]:
    """Return the names of a run's parameters in the order of its optimizer."""
    model = on_meta(build_model, run)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = decay_groups(model, run.optim.weight_decay)
    return [names[id(parameter)] for group in groups for parameter in group["params"]]


def load_whole_state(path: str | Path) -> tuple[dict[str, torch.Tensor], RunConfig]:
    """Return (all parameters in fp32 on the CPU, the run's config) of a checkpoint directory.

    Works for every ZeRO stage, on one rank alone. The files are verified first: they are pickles,
    and only what this system wrote is read.
    """
    path = Path(path)
    if finished := list_finished(path):  # a run directory: its newest checkpoint
        path = finished[-1]
    problems = _problems_in_share(path, rank=0, world_size=1)
    if problems:
        raise CheckpointError(f"{path}: not a whole checkpoint: {'; '.join(problems)}")
    record = read_run_file(path)
    run = from_dict(record["config"], str(path / RUN_FILE))
    state = _open_state(path / TAG, record)
    whole = {name: state.read_whole(name) for name in state.shapes}
    whole |= {name: whole[owner] for name, owner in state.shared.items()}
    return whole | {name: buffer.float() for name, buffer in state.buffers.items()}, run
