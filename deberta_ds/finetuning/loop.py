"""Train one task from one seed and keep the weights of the best evaluation.

The examples of update k are positions k*B .. (k+1)*B of one endless stream, the concatenation of
the epochs' permutations; so every update has exactly B examples, each weighing 1/B, at any number
of ranks and micro-batches (slots that are left over carry weight 0).

The checkpoints of a run under way lie in OUT/resume, the newest and that of the best evaluation;
they are gone when there is a result.json. A checkpoint is the engine's state between two updates
and, in its run.json, the rest of it (`Progress`). Everything else is a function of (seed, step). A
run that was killed makes the same updates again from there on, and ends with the same weights,
history and scores, bit for bit.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deberta_ds.base.errors import UserError, listed
from deberta_ds.base.files import read_json, typed
from deberta_ds.base.numbers import counted
from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import MANIFEST, RUN_FILE
from deberta_ds.checkpoint.save import begin_save, finish_save, point_best, set_aside
from deberta_ds.cluster import dist, lock
from deberta_ds.config.optim import OptimConfig, learning_rate
from deberta_ds.engine.ds_config import complete
from deberta_ds.engine.engine import build_engine, gathered, set_learning_rate
from deberta_ds.finetuning.features import Feature, FeatureBatch, collate
from deberta_ds.finetuning.inputs import Job
from deberta_ds.finetuning.models import (
    FACTS,
    MODEL,
    RESUME,
    build_model,
    keep_head,
    save_finetuned,
    start_from,
)
from deberta_ds.finetuning.predict import best_threshold, predictions_of, score_split
from deberta_ds.tasks import metrics
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import Task
from deberta_ds.training.step import Training, train_step

_MOST_NAMED = 4  # examples of a bad step
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
    threshold: float = 0.0  # of the best evaluation: the margin above which "no answer" is said

    def accept(self, score: float, threshold: float) -> bool:
        """Take note of an evaluation's score; return whether it is the best one so far."""
        if math.isnan(score) or self.best is not None and score <= self.best:
            self.since_best += 1
            return False
        self.best, self.best_step, self.since_best = score, self.step, 0
        self.threshold = threshold
        return True


def newest(out: Path) -> tuple[Path, Progress] | None:
    """Return the newest checkpoint of a run that was killed, None if there is none."""
    found = find.list_finished(out / RESUME)
    return (found[-1], _read_progress(found[-1])) if found else None


def _read_progress(path: Path) -> Progress:
    try:
        return typed(Progress, read_json(path / RUN_FILE))
    except ValueError as error:
        raise UserError(f"{path / RUN_FILE}: damaged ({error}); delete {path.parents[1]} to start "
                        "this seed from scratch") from None


def train(job: Job) -> dict[str, Any]:
    """Train, from a killed run's checkpoint if there is one; return what result.json says of it.

    The weights of the best evaluation are in OUT/model then. Raises BadStepError on a loss or
    gradient that is not finite.
    """
    settings = job.settings
    rows: Sequence[Feature] = job.tables.encoded[id(job.tables.train)]
    rows = rows[: settings.train_rows] if settings.train_rows else rows
    total_steps = math.ceil(settings.epochs * len(rows) / settings.global_batch_size)
    optim = settings.optim(total_steps)
    engine = build(job, optim)
    try:
        progress = restore(job, engine)
        _updates(job, engine, optim, rows, total_steps, progress)
        _write_best(job, engine, progress)
    finally:
        engine.destroy()
    return {"steps": total_steps, "best_step": progress.best_step, "history": progress.history,
            "seconds": progress.seconds}


def restore(job: Job, engine) -> Progress:
    """Put the newest whole checkpoint into the engine, if there is one; call on every rank.

    OUT/resume/best points to that of the best evaluation then, also where a kill came between. Of a
    run that version 0.2.0 began, the best weights may be in OUT/model. UserError if they are gone.
    """
    found = find.find(job.out / RESUME, "auto")
    for line in found.warnings:
        job.say(f"  {line}")
    if found.path is None:
        dist.on_main(lambda: shutil.rmtree(job.out / MODEL, ignore_errors=True))
        return Progress(job.identity, dist.world_size())
    progress = dist.together(lambda: _read_progress(found.path))
    best = find.path_of(job.out / RESUME, progress.best_step)
    is_written = dist.from_main(lambda: (job.out / MODEL / FACTS).is_file())
    if progress.best_step and not is_written and (problems := find.problems_of(best)):
        raise UserError(f"{best}: is gone or damaged ({listed(problems)}), and with it the best "
                        f"weights of this run; delete {job.out / RESUME} to start this seed from "
                        "scratch")
    for line in dist.from_main(lambda: set_aside(job.out / RESUME, progress.step)):
        job.say(f"  {line}")
    dist.on_main(lambda: point_best(best))
    saved_state.load_state(engine, found.path)
    job.say(f"{job.task.name} seed {job.seed}: goes on after step {progress.step}, from "
            f"{found.path}")
    if progress.world_size != dist.world_size():
        job.say(f"  saved by {counted(progress.world_size, 'rank')}, now there are "
                f"{dist.world_size()}: sums are rounded differently")
        progress.world_size = dist.world_size()
    return progress


def _updates(job: Job, engine, optim: OptimConfig, rows: Sequence[Feature], total_steps: int,
             progress: Progress) -> None:
    """Make every update, evaluation and save that is not made yet."""
    settings, training = job.settings, training_of(job)
    num_evals = settings.epochs * settings.evals_per_epoch
    evals = {max(1, round(total_steps * (i + 1) / num_evals)) for i in range(num_evals)}
    lengths = np.array([row.num_tokens for row in rows])
    class_weights = weights_of_classes(job.task, settings, rows)
    took, saved_at = 0.0, time.monotonic()  # of the last save
    began = saved_at - progress.seconds
    while progress.step < total_steps and not _is_past_its_best(job, progress):
        # -------------------------------------------------------------------------- single update
        chosen = stream(lengths, job.seed, progress.step, settings.global_batch_size,
                        settings.group_updates)
        micro = micro_batches([rows[i] for i in chosen], settings, class_weights)
        is_evaluated = progress.step + 1 in evals
        due = dist.is_main() and is_save_due(time.monotonic() - saved_at, took, is_evaluated)
        set_learning_rate(engine, learning_rate(optim, progress.step, total_steps))
        result = train_step(engine, micro, step=progress.step, seed=job.seed, training=training,
                            request=due)
        progress.step += 1
        progress.losses.append([result.sums[name] / settings.global_batch_size
                                for name in ("loss", "adversarial")])
        # ------------------------------------------------------------------------------------------
        progress.seconds, is_best = time.monotonic() - began, False
        if is_evaluated:
            is_best = evaluate(job, engine, progress, total_steps, len(rows))
        if result.request or is_best:
            saved_at = time.monotonic()
            save(job, engine, progress, is_best)
            saved_at, took = time.monotonic(), time.monotonic() - saved_at
    progress.seconds = time.monotonic() - began


def is_save_due(passed: float, took: float, at_evaluation: bool) -> bool:
    """Return whether a save is due by this rank's clock, so many seconds after one that took so
    many; rank 0's counts. The best evaluation is saved in any case."""
    return passed * MOST_OF_TIME >= took and (at_evaluation or passed >= SAVE_SECONDS)


def save(job: Job, engine, progress: Progress, is_best: bool) -> None:
    """Save the engine's state; call on every rank, between two updates."""
    dist.on_main(lambda: lock.check(job.out))
    finish_save(begin_save(engine, job.out / RESUME, progress, keep=1, is_best=is_best))


def _write_best(job: Job, engine, progress: Progress) -> None:
    """Write the weights of the best evaluation to OUT/model; under ZeRO-3 they are made whole one
    at a time.
    """
    best = find.path_of(job.out / RESUME, progress.best_step)
    if not dist.from_main(lambda: (best / MANIFEST).exists()):
        return  # version 0.2.0 has written them
    if progress.step != progress.best_step:
        saved_state.load_state(engine, best)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with gathered([parameter]):
            if dist.is_main():
                weights[name] = parameter.detach().to("cpu", torch.float32).clone()
    dist.on_main(lambda: save_finetuned(job.out / MODEL, job.task, job.settings, job.start, weights,
                                        job.tables.tokenizer_files, progress.threshold))


def _is_past_its_best(job: Job, progress: Progress) -> bool:
    patience = job.settings.patience
    if not 0 < patience <= progress.since_best:
        return False
    job.say(f"  no better evaluation in {patience}: stopped at step {progress.step}")
    return True


def training_of(job: Job) -> Training:
    """Return what a step of fine-tuning does: the mean loss over the examples of an update."""
    def prepare(engine, batches: list[FeatureBatch]):
        # DeepSpeed averages over ranks and micro-batches; this makes it the mean over the batch.
        scale = dist.world_size() * len(batches) / job.settings.global_batch_size

        def forward(batch: FeatureBatch) -> tuple[Tensor, dict[str, Tensor]]:
            output = engine(batch)
            return output.loss_sum * scale, {"loss": output.loss_sum.detach(),
                                             "adversarial": output.adversarial_sum}

        return forward, {}, {}

    def name(rows: Sequence[int]) -> str:
        examples = [job.tables.train.examples[row] for row in dict.fromkeys(rows)]
        places = [example.place or f"example {example.key}" for example in examples]
        more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
        return ", ".join(places[:_MOST_NAMED]) + more

    return Training(prepare, name, "Lower learning_rate, or look at those examples")


def micro_batches(rows: Sequence[Feature], settings: Settings,
                  class_weights: Sequence[float] = ()) -> list[FeatureBatch]:
    """Return this rank's part of an update, `rows`, in micro-batches of the same size."""
    micro_rows, accumulation = shape_of(settings)
    slots = micro_rows * accumulation
    mine = list(rows[dist.rank() * slots : (dist.rank() + 1) * slots])
    weights = [class_weights[row.label] if class_weights else 1.0 for row in mine]
    weights += [0.0] * (slots - len(mine))
    mine += [rows[0]] * (slots - len(mine))
    return [collate(mine[first : first + micro_rows], weights[first : first + micro_rows])
            for first in range(0, slots, micro_rows)]


def shape_of(settings: Settings) -> tuple[int, int]:
    """Return (rows of a micro-batch on every rank, micro-batches of an update)."""
    share = math.ceil(settings.global_batch_size / dist.world_size())
    micro = min(settings.micro_batch_size or share, share)
    return micro, math.ceil(share / micro)


def evaluate(job: Job, engine, progress: Progress, total_steps: int, num_rows: int) -> bool:
    """Evaluate; return whether the weights are the best so far."""
    settings = job.settings
    values, threshold = _evaluate(job, engine)
    best_by = settings.best_metric
    score = values[best_by] if best_by else metrics.task_score(job.task, values)
    epoch = progress.step * settings.global_batch_size / num_rows
    loss, adversarial = np.mean(progress.losses, axis=0).round(5).tolist()
    entry = {"step": progress.step, "epoch": round(epoch, 2), "loss": loss}
    if settings.sift_weight > 0:
        entry["adversarial"] = adversarial
    progress.history.append(entry | values)
    progress.losses = []
    is_best = progress.accept(score, threshold)
    _say_epoch(job, progress.history[-1], total_steps, progress.seconds, is_best)
    return is_best


def _evaluate(job: Job, engine) -> tuple[dict[str, float], float]:
    """Return (metrics, margin above which "no answer" is said, 0 where there is no such thing)."""
    task, val = job.task, job.tables.val
    engine.eval()
    scores = score_split(engine, task, val.examples, job.tables.encoded[id(val)],
                         global_batch_size=job.settings.eval_batch_size, device=job.device)
    engine.train()
    threshold = best_threshold(val.examples, scores) if task.no_answer else 0.0
    guesses = predictions_of(task, val.examples, scores, threshold)
    return metrics.score(task, val.examples, guesses), threshold


def build(job: Job, optim: OptimConfig):
    """Return the engine; says what was kept of another task's head."""
    settings, start, saved = job.settings, job.start, job.initial
    micro_rows, accumulation = shape_of(settings)
    if saved:
        start = start_from(start, saved, job.init_from)
    model = build_model(job.task, start, settings, job.seed)
    if saved is not None:
        job.say(f"  {keep_head(model, job.task, saved)}")
    engine = build_engine(model, optim, complete(
        job.deepspeed, dist.world_size(), micro_rows, accumulation, settings.clip_norm))
    engine.train()
    return engine


def stream(
    lengths: np.ndarray, seed: int, step: int, global_batch_size: int, group_updates: int
) -> list[int]:
    """Return the rows of update `step`: a pure function, each epoch a fresh permutation.

    The rows of `group_updates` updates in a row are dealt to them by length, so that a batch has
    little padding, and those updates are made in random order. An update that two epochs share
    keeps its rows as they were sampled.
    """
    num_rows, start = len(lengths), step * global_batch_size
    epoch = start // num_rows
    first = -(-epoch * num_rows // global_batch_size)  # updates that lie in this epoch as a whole
    end = (epoch + 1) * num_rows // global_batch_size
    if step >= end:
        positions = range(start, start + global_batch_size)
        return [int(_order(num_rows, seed, p // num_rows)[p % num_rows]) for p in positions]
    low = first + (step - first) // group_updates * group_updates
    high = min(low + group_updates, end)
    order = _order(num_rows, seed, epoch)
    rows = order[
        low * global_batch_size - epoch * num_rows : high * global_batch_size - epoch * num_rows]
    by_length = rows[np.argsort(lengths[rows], kind="stable")] if group_updates > 1 else rows
    turn = np.random.default_rng([seed, epoch, low]).permutation(high - low)[step - low]
    return by_length[turn * global_batch_size : (turn + 1) * global_batch_size].tolist()


@lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def weights_of_classes(task: Task, settings: Settings, rows: Sequence[Feature]) -> list[float]:
    """Return what an example counts by its class, in the order of the labels; empty: all alike."""
    wanted = settings.class_weights
    if isinstance(wanted, dict):
        return [wanted.get(label, 1.0) for label in task.labels]
    if not wanted:
        return []
    counts = np.bincount([row.label for row in rows], minlength=len(task.labels))
    return (len(rows) / (len(counts) * np.maximum(counts, 1))).tolist()


def _say_epoch(job: Job, entry: Mapping, total_steps: int, seconds: float, better: bool) -> None:
    attack = f"  adversarial {entry['adversarial']:.4f}" if "adversarial" in entry else ""
    values = "  ".join(f"{name} {100 * entry[name]:5.1f}" for name in job.task.metrics)
    job.say(
        f"{job.task.name:<8} seed {job.seed}  epoch {entry['epoch']:>5.1f}  step {entry['step']:>5}"
        f"/{total_steps}  loss {entry['loss']:.4f}{attack}  val {values}  {seconds:6.1f}s"
        f"{'  best' if better else ''}")
