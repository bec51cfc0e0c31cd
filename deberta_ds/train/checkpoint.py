"""Sharded checkpoints that are whole or not there (one of the two files that import deepspeed).

    OUT/checkpoints/step-00000100/
        zero/...          DeepSpeed's own files, one or more per rank
        run.json          step, rows seen, corpus fingerprints, resolved configs, versions
        manifest.json     every file with its size and xxh3; written last

A directory without manifest.json is a save that never finished. DeepSpeed alone neither notices a
flipped byte nor a missing `latest` (it would start from scratch), so every file is verified before
a tensor is loaded, and only a verified directory is ever loaded.
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
from deberta_ds.errors import UserError
from deberta_ds.files import sync_directory, write_atomic, xxh3

DIRECTORY = "checkpoints"
MANIFEST, RUN_FILE, TAG = "manifest.json", "run.json", "zero"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or of another run."""

    on_every_rank = True


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


def save(engine, out_dir: str | Path, step: int, record: dict, keep: int) -> Path:
    """Write a checkpoint on all ranks and delete all but the newest `keep`; return its directory.

    `record` goes into run.json with the step. Call on every rank.
    """
    path = path_of(out_dir, step)
    if dist.is_main():
        shutil.rmtree(path, ignore_errors=True)  # the remains of a save that was killed
        path.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(path), tag=TAG, save_latest=False)
    if dist.is_main():
        text = json.dumps({"step": step} | record, indent=1)
        write_atomic(path / RUN_FILE, text + "\n")
    dist.barrier()
    entries = {}
    for part in dist.gather_objects(_describe_my_files(path)):
        entries |= part
    if dist.is_main():
        manifest = {"version": 1, "step": step, "files": dict(sorted(entries.items()))}
        write_atomic(path / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        sync_directory(path.parent)
        _prune(out_dir, keep)
    dist.barrier()
    return path


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
    """Delete whole checkpoints older than the newest `keep`, manifest first."""
    whole = [p for p in list_steps(out_dir) if (p / MANIFEST).exists()]
    for path in whole[:-keep]:
        (path / MANIFEST).unlink()
        shutil.rmtree(path)


def find(out_dir: str | Path, resume: str) -> Found:
    """Return what `--resume auto|never|PATH` means for a run; verified, equal on every rank.

    auto: the newest whole checkpoint; newer broken ones are named. Raises CheckpointError if there
    are checkpoints but none is whole, if PATH is not whole, or if `never` meets checkpoints.
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
    if passed_over:
        raise CheckpointError("no whole checkpoint to resume from:\n  " + "\n  ".join(passed_over)
                              + "\n  delete them to start from step 0")
    return Found(None)


def problems_of(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files; each rank checks its share, all agree."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        names = sorted(files)[dist.rank()::dist.world_size()]
        mine = [problem for name in names if (problem := _file_problem(path / name, files[name]))]
    except FileNotFoundError:
        mine = ["no manifest.json: the save did not finish"] if dist.is_main() else []
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        mine = ["manifest.json is damaged"] if dist.is_main() else []
    return [problem for part in dist.gather_objects(mine) for problem in part]


def _file_problem(file: Path, entry: dict) -> str | None:
    if not file.exists():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"{file.name} has {size} bytes, not {entry['bytes']} (truncated?)"
    if xxh3(file) != entry["xxh3"]:
        return f"{file.name} has another checksum than when it was saved (flipped bits)"
    return None


def check_layout(record: dict, ds: dict, place: str) -> None:
    """Raise CheckpointError if the checkpoint was written by another world size or ZeRO stage."""
    saved = (record["world_size"], zero_stage(record["deepspeed"]), precision(record["deepspeed"]))
    now = (dist.world_size(), zero_stage(ds), precision(ds))
    if saved != now:
        raise CheckpointError(
            f"{place} was written by {saved[0]} ranks, ZeRO-{saved[1]}, {saved[2]}; this job has "
            f"{now[0]} ranks, ZeRO-{now[1]}, {now[2]}: start it with the same layout")


def load(engine, path: str | Path) -> None:
    """Load a verified checkpoint into the engine; weights, optimizer and counters."""
    loaded, _ = engine.load_checkpoint(str(path), tag=TAG)
    if loaded is None:  # DeepSpeed's way to say that it found nothing
        raise CheckpointError(f"{path}: DeepSpeed found no checkpoint in it")


def load_whole_state(path: str | Path) -> tuple[dict[str, torch.Tensor], RunConfig]:
    """Return (all parameters in fp32 on the CPU, the run's config) of a checkpoint directory.

    Works for every ZeRO stage, without a process group. The files are verified first: they are
    pickles, and only what this system wrote is read.
    """
    path = Path(path)
    if not (path / MANIFEST).exists() and list_steps(path):
        path = list_steps(path)[-1]  # a run directory: its newest checkpoint
    problems = problems_of(path)
    if problems:
        raise CheckpointError(f"{path}: not a whole checkpoint: {'; '.join(problems)}")
    run = from_dict(read_run_file(path)["config"], str(path / RUN_FILE))
    if zero_stage(read_run_file(path)["deepspeed"]) > 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(str(path), tag=TAG)
    else:
        file = path / TAG / "mp_rank_00_model_states.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)["module"]
    return {name: tensor.float() for name, tensor in state.items()}, run

