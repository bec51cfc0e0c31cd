"""Save a checkpoint: every rank its own file, the manifest last.

A save has two halves. `begin_save` takes the state between two steps: in the foreground it writes
this rank's file at once; in the background it copies the state to host memory (12 bytes a
parameter over the ranks, freed when the file is written) and a thread writes it while training goes
on. `finish_save` waits for that, and rank 0 writes the manifest when every rank's file is on disk;
before that the directory counts as a save that was killed.

Linear in the ranks: a rank hashes its file while it writes it and sends rank 0 the two numbers of
the manifest; nobody lists or reads what others wrote; old checkpoints are deleted by all.
"""

import errno
import json
import logging
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from deberta_ds.base.errors import user_message
from deberta_ds.base.files import ReadFile, sync_directory, write_atomic, xxh3
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.find import BEST, RANK_FILE, RUN_FILE, rank_file
from deberta_ds.checkpoint.saved_state import describe_engine, described_tensors, tensors_of_rank
from deberta_ds.cluster import dist
from deberta_ds.engine.state import CheckpointError, is_on_disk, layout_of

log = logging.getLogger(__name__)


@dataclass
class Save:
    """A checkpoint between `begin_save` and `finish_save`."""

    path: Path
    keep: int
    is_best: bool = False  # OUT/best will point to it
    is_spared: Callable[[Path], bool] = lambda path: False  # never deleted, whatever `keep`
    entries: dict[str, dict] = field(default_factory=dict)  # this rank's part of the manifest
    problem: str = ""  # what went wrong on this rank
    thread: threading.Thread | None = None

    def is_written(self) -> bool:
        """Return whether this rank has nothing left to write."""
        return self.thread is None or not self.thread.is_alive()

    def attempt(self, action: Callable[[], None]) -> None:
        """Run `action`; an OSError becomes this rank's problem, with its remedy."""
        try:
            action()
        except OSError as error:
            self.problem = user_message(error) or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.problem += ("; a save needs space for one checkpoint more than train.keep, "
                                 "for two more with train.best_metric (in fine-tuning for three)")
        except Exception as error:  # a bug of ours, in a thread that nobody would hear
            self.problem = f"{type(error).__name__}: {error}"
            log.error("while a checkpoint was written", exc_info=True)


def begin_save(engine, out_dir: str | Path, record: Any, keep: int,
               tokenizer: Mapping[str, ReadFile] | None = None, *, in_background: bool = False,
               is_best: bool = False, is_spared: Callable[[Path], bool] = lambda path: False
               ) -> Save:
    """Begin a checkpoint of the engine's state; call on every rank, between two steps.

    `record`, a dataclass with the step, goes into run.json, the tokenizer's files, as they were
    read, next to it. All but the newest `keep` checkpoints, the best one and those that `is_spared`
    names on rank 0 will be deleted. An optimizer on NVMe is always written in the foreground.
    """
    one = Save(find.path_of(out_dir, record.step), keep, is_best, is_spared)
    if dist.is_main():
        one.attempt(lambda: empty(one.path))
    one.problem = dist.broadcast_object(one.problem)
    if one.problem:
        return one
    layout = layout_of(engine)
    described, tensors = described_tensors(engine, layout), tensors_of_rank(engine, layout)
    small: dict[str, str | bytes] = {}
    if dist.is_main():
        small = {RUN_FILE: json.dumps(asdict(record), indent=1) + "\n",
                 find.LAYOUT_FILE: json.dumps(describe_engine(engine, layout)) + "\n",
                 **{name: file.data for name, file in (tokenizer or {}).items()}}
    in_background = in_background and not is_on_disk(engine)
    copies: list[tuple[str, Tensor]] = []
    if in_background:
        # clone: on a CPU the tensors are the ones that the next step changes
        copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]
        tensors = iter(copies)

    def write() -> None:
        one.attempt(lambda: write_my_files(one, described, tensors, small))
        copies.clear()

    if in_background:
        one.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        one.thread.start()
    else:
        write()
    return one


def finish_save(one: Save) -> Path:
    """Wait for every rank, write the manifest, delete old checkpoints; return the directory.

    Call on every rank. Raises CheckpointError on every rank if a file could not be written (disk
    full); older checkpoints are left alone.
    """
    if one.thread is not None:
        one.thread.join()
    parts = dist.gather_to_main((one.entries, one.problem))
    if parts is not None:  # on rank 0
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(parts) if problem]
        one.problem = problems[0] if problems else ""
        if not problems:
            one.attempt(lambda: write_manifest(one, [entries for entries, _ in parts]))
        if one.is_best and not one.problem:
            one.attempt(lambda: point_best(one.path))
        if one.problem:
            shutil.rmtree(one.path, ignore_errors=True)
    one.problem = dist.broadcast_object(one.problem)
    if one.problem:
        raise CheckpointError(f"{one.path}: cannot be saved: {one.problem}. Older checkpoints are "
                              "untouched; fix this and run again")
    prune(one.path.parent.parent, one.keep, one.is_spared)
    return one.path


def empty(path: Path) -> None:
    """Make an empty directory of what a killed save may have left; OSError if files stay."""
    shutil.rmtree(path, ignore_errors=True)  # the remains of a save that was killed
    if path.exists():  # some may stay: a file that is open over NFS, or of another user
        aside = path.with_name(f"{path.name.replace('step-', 'remains-')}-{os.getpid()}")
        with suppress(OSError):
            path.rename(aside)
    path.mkdir(parents=True, exist_ok=True)
    if left := [name for name in os.listdir(path) if not name.startswith(".")]:
        raise OSError(errno.EACCES, f"cannot be emptied of what a killed save has left ({left[0]});"
                      " delete it", str(path))


def write_my_files(one: Save, described: list, tensors, small: dict[str, str | bytes]) -> None:
    """Write this rank's tensors, and `small` files."""
    name = rank_file(dist.rank())
    one.entries[name] = write_stream(one.path / name, described, tensors)
    for name, content in small.items():
        file = one.path / name
        write_atomic(file, content)
        one.entries[name] = {"bytes": file.stat().st_size, "xxh3": xxh3(file)}


def write_manifest(one: Save, parts: list[dict[str, dict]]) -> None:
    """Write the manifest, which makes a checkpoint whole; `parts`: {file: size, hash} by rank."""
    files = {name: entry for part in parts for name, entry in sorted(part.items())}
    assert {rank_file(rank) for rank in range(dist.world_size())} <= files.keys()
    manifest = {"version": find.VERSION, "step": find.step_of(one.path),
                "world_size": dist.world_size(), "files": files}
    sync_directory(one.path)
    write_atomic(one.path / find.MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync_directory(one.path.parent)


def point_best(path: Path) -> None:
    """Have OUT/best point to a whole checkpoint, so that every command takes it for one."""
    if not (path / find.MANIFEST).exists():
        return
    link = path.parent.parent / BEST
    fresh = link.with_name(f".{BEST}.tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path.relative_to(link.parent))
    fresh.replace(link)


def set_aside(out_dir: str | Path, step: int) -> list[str]:
    """Rename the checkpoints of later steps than the one that a run goes on from; say so.

    They are damaged, or not what this run goes on from: as the newest ones they would be what is
    kept, and what the next start or a rollback takes. Rank 0 alone calls it.
    """
    lines = []
    for path in find.list_finished(out_dir):
        if find.step_of(path) > step:
            aside = path.with_name(path.name.replace("step-", "left-"))
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            lines.append(f"{path} is later than step {step}, from which this run goes on, and is "
                         f"named {aside.name} now; delete it when it is of no use")
    best = Path(out_dir) / BEST
    if best.is_symlink() and not best.exists():
        best.unlink()
    return lines


def is_permanent(every: int | tuple[int, ...], step: int) -> bool:
    """Return whether train.keep_every says that the checkpoint of a step is saved and kept."""
    return step in every if isinstance(every, tuple) else every > 0 and step % every == 0


def outdated(steps: list[Path], whole: list[Path], keep: int, is_spared: Callable[[Path], bool]
             ) -> list[Path]:
    """Return those of a run's checkpoints, oldest first, that retention deletes.

    They are older than the newest whole one, not among the newest `keep` whole ones, not spared.
    """
    return [path for path in steps[:steps.index(whole[-1])]
            if path not in whole[-keep:] and not is_spared(path)] if whole else []


def prune(out_dir: str | Path, keep: int, is_spared: Callable[[Path], bool] = lambda path: False
          ) -> None:
    """Delete checkpoints older than the newest `keep` whole ones but the best, manifests first.

    Call on every rank: each deletes the files of its own number. The remains of killed saves that
    are older than the newest whole one go too.
    """
    doomed = dist.from_main(lambda: _take_manifests(out_dir, keep, is_spared))
    for path, world_size in doomed:
        for rank in range(dist.rank(), world_size, dist.world_size()):
            (path / rank_file(rank)).unlink(missing_ok=True)
    dist.barrier()
    if dist.is_main():
        for path, _ in doomed:
            shutil.rmtree(path, ignore_errors=True)


def _take_manifests(out_dir: str | Path, keep: int, is_spared: Callable[[Path], bool]
                    ) -> list[tuple[Path, int]]:
    """Delete the manifests of old checkpoints; return (directory, number of files) of each.

    Files are counted in a listing: so all share also the remains of a save that was killed.
    """
    doomed, best = [], (Path(out_dir) / BEST).resolve()
    for path in outdated(find.list_steps(out_dir), find.list_finished(out_dir), keep,
                         lambda path: path.resolve() == best or is_spared(path)):
        (path / find.MANIFEST).unlink(missing_ok=True)
        numbers = [int(found[1]) for name in os.listdir(path)
                   if (found := RANK_FILE.fullmatch(name))]
        doomed.append((path, max(numbers, default=-1) + 1))
    return doomed


_SAFETENSORS_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
                      torch.float64: "F64", torch.int64: "I64", torch.int32: "I32",
                      torch.uint8: "U8", torch.bool: "BOOL"}


def write_stream(path: Path, described: list[tuple[str, torch.dtype, int]],
                 tensors: Iterable[tuple[str, Tensor]]) -> dict:
    """Write flat tensors to a safetensors file, one in memory at a time; return bytes and xxh3.

    `described`: (name, dtype, elements) of each, in the order in which `tensors` gives them. The
    file is hashed while it is written, and flushed to the disk. OSError where that fails.
    """
    header, end = {}, 0
    for name, dtype, count in described:
        start, end = end, end + count * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_TYPES[dtype], "shape": [count],
                        "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb") as file:
        def write(data) -> None:
            nonlocal size
            file.write(data)
            digest.update(data)
            size += len(data)

        write(struct.pack("<Q", len(text)) + text)
        for (name, dtype, count), (found, tensor) in zip(described, tensors, strict=True):
            assert (name, dtype, count) == (found, tensor.dtype, tensor.numel()), name
            write(memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}
