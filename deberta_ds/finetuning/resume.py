"""The checkpoint of a fine-tuning run under way: OUT/resume, gone when there is a result.json.

It holds the engine's state between two updates, and in run.json the rest of it (`Progress`).
Everything else is a function of (seed, step). A run that was killed makes the same updates again
from there on, and ends with the same weights, history and scores, bit for bit.

The weights of a better evaluation wait in OUT/.model-STEP until a checkpoint that knows of them is
whole, and become OUT/model then. So OUT/model is always the best of what a killed run goes on from.
"""

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.json_files import read_json, typed
from deberta_ds.base.numbers import counted
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.run_record import RUN_FILE
from deberta_ds.checkpoint.save import save
from deberta_ds.cluster import dist, lock
from deberta_ds.finetuning.directory import MODEL, is_finetuned
from deberta_ds.finetuning.inputs import Job

DIRECTORY = "resume"
SAVE_SECONDS = 300.0  # a save is due after this time, and at every evaluation,
MOST_OF_TIME = 0.05  # unless saves would take more than this share of the run


@dataclass
class Progress:
    """How far a run is."""

    identity: dict[str, Any]  # of its job
    world_size: int
    step: int = 0
    seconds: float = 0.0  # of training, over all starts
    losses: list[list[float]] = field(default_factory=list)  # of updates since an evaluation
    history: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0
    since_best: int = 0  # evaluations

    def accept(self, score: float) -> bool:
        """Take note of an evaluation's score; return whether it is the best one so far."""
        if math.isnan(score) or self.best is not None and score <= self.best:
            self.since_best += 1
            return False
        self.best, self.best_step, self.since_best = score, self.step, 0
        return True


def read_progress(path: Path) -> Progress:
    """Return run.json of a checkpoint; UserError if it is none of ours."""
    try:
        return typed(Progress, read_json(path / RUN_FILE))
    except ValueError as error:
        raise UserError(f"{path / RUN_FILE}: damaged ({error}); delete {path.parents[1]} to start "
                        "this seed from scratch") from None


def newest(out: Path) -> Path | None:
    """Return the newest checkpoint of a run that was killed, None if there is none."""
    return max(find.list_finished(out / DIRECTORY), key=find.step_of, default=None)


def forget(out: Path) -> None:
    """Delete the checkpoint of a run that has ended, and weights that wait; rank 0 alone."""
    shutil.rmtree(out / DIRECTORY, ignore_errors=True)
    forget_waiting(out)


def forget_waiting(out: Path) -> None:
    for left in out.glob(".model-*"):
        shutil.rmtree(left, ignore_errors=True)


def waiting(out: Path, step: int) -> Path:
    """Return where the weights of a better evaluation wait for the next checkpoint."""
    return out / f".model-{step:08d}"


def best_model(out: Path, best_step: int) -> Path:
    """Return where the weights of `best_step` are."""
    path = waiting(out, best_step)
    return path if is_finetuned(path) else out / MODEL


def keep_best(out: Path, best_step: int) -> None:
    """Have OUT/model be the weights of `best_step`, and no others wait; rank 0 alone."""
    path = best_model(out, best_step)
    if path != out / MODEL:
        shutil.rmtree(out / MODEL, ignore_errors=True)
        path.rename(out / MODEL)
    if best_step and not is_finetuned(out / MODEL):
        raise UserError(f"{out / MODEL}: is gone, the best weights of {out / DIRECTORY}; delete "
                        "that, too, to start this seed from scratch")
    forget_waiting(out)


class Checkpoints:
    """Saves and restores one run."""

    def __init__(self, job: Job, engine):
        self._job, self._engine = job, engine
        self._out = job.out / DIRECTORY
        self._saved_at, self._took = time.monotonic(), 0.0
        self._began = time.monotonic()

    def restore(self) -> Progress:
        """Put the newest whole checkpoint into the engine, if there is one; call on every rank."""
        found = find.find(self._out, "auto")
        for line in found.warnings:
            self._job.say(f"  {line}")
        if found.path is None:
            if dist.is_main():
                forget(self._job.out)
                shutil.rmtree(self._job.out / MODEL, ignore_errors=True)
            dist.barrier()
            return Progress(self._job.identity(), dist.world_size())
        progress = dist.together(lambda: read_progress(found.path))
        dist.on_main(lambda: keep_best(self._job.out, progress.best_step))
        find.load(self._engine, found.path)
        self._job.say(f"{self._job.task.name} seed {self._job.seed}: goes on after step "
                      f"{progress.step}, from {found.path}")
        if progress.world_size != dist.world_size():
            self._job.say(f"  saved by {counted(progress.world_size, 'rank')}, now there "
                          f"are {dist.world_size()}: sums are rounded differently")
            progress.world_size = dist.world_size()
        self._began -= progress.seconds
        return progress

    def seconds(self) -> float:
        """Return the seconds of training, over all starts."""
        return time.monotonic() - self._began

    def is_due(self, *, at_evaluation: bool) -> bool:
        """Return whether a save is due by this rank's clock; rank 0's counts."""
        passed = time.monotonic() - self._saved_at
        return (dist.is_main() and passed * MOST_OF_TIME >= self._took
                and (at_evaluation or passed >= SAVE_SECONDS))

    def save(self, progress: Progress) -> None:
        """Save the engine's state; call on every rank, between two updates."""
        began = time.monotonic()
        dist.on_main(lambda: lock.check(self._job.out))
        progress.seconds = self.seconds()
        save(self._engine, self._out, progress, keep=1)
        dist.on_main(lambda: keep_best(self._job.out, progress.best_step))
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began
