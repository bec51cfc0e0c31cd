"""Train one task from one seed and keep the weights of the best evaluation.

The examples of update k are positions k*B .. (k+1)*B of one endless stream, the concatenation of
the epochs' permutations; so every update has exactly B examples, each weighing 1/B, at any number
of ranks and micro-batches (slots that are left over carry weight 0).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deberta_ds.cluster import dist
from deberta_ds.config.run_config import OptimConfig
from deberta_ds.engine import ds_config
from deberta_ds.engine.engine import build_engine, gathered, set_learning_rate
from deberta_ds.engine.optim import learning_rate
from deberta_ds.finetuning.answers import best_threshold
from deberta_ds.finetuning.directory import save_finetuned
from deberta_ds.finetuning.features import Feature, FeatureBatch, collate
from deberta_ds.finetuning.inputs import Job
from deberta_ds.finetuning.models import build_model, keep_head, start_from
from deberta_ds.finetuning.predict import predictions_of
from deberta_ds.finetuning.resume import Checkpoints, Progress, forget_waiting, waiting
from deberta_ds.tasks import metrics
from deberta_ds.tasks.layouts import class_of
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import Task
from deberta_ds.training.step import Training, train_step

_MOST_NAMED = 4  # examples of a bad step


def train(job: Job) -> dict[str, Any]:
    """Train, from a killed run's checkpoint if there is one; return what result.json says of it.

    The weights of the best evaluation are at `resume.best_model(job.out, best_step)`. Raises
    BadStepError on a loss or gradient that is not finite.
    """
    settings, rows = job.settings, job.features(job.tables.train)
    rows = rows[: settings.train_rows] if settings.train_rows else rows
    total_steps = math.ceil(settings.epochs * len(rows) / settings.global_batch_size)
    optim = settings.optim(total_steps)
    engine = build(job, optim)
    try:
        progress = _updates(job, engine, optim, rows, total_steps)
    finally:
        engine.destroy()
    return {"steps": total_steps, "best_step": progress.best_step, "history": progress.history,
            "seconds": progress.seconds}


def _updates(job: Job, engine, optim: OptimConfig, rows: Sequence[Feature],
             total_steps: int) -> Progress:
    """Make every update and evaluation that is not made yet."""
    settings, training = job.settings, training_of(job)
    num_evals = settings.epochs * settings.evals_per_epoch
    evals = {max(1, round(total_steps * (i + 1) / num_evals)) for i in range(num_evals)}
    lengths = np.array([row.num_tokens for row in rows])
    class_weights = weights_of_classes(job.task, settings, rows)
    checkpoints = Checkpoints(job, engine)
    progress = checkpoints.restore()
    while progress.step < total_steps and not _is_past_its_best(job, progress):
        # -------------------------------------------------------------------------- single update
        set_learning_rate(engine, learning_rate(optim, progress.step, total_steps))
        chosen = stream(lengths, job.seed, progress.step, settings.global_batch_size,
                        settings.group_updates)
        micro = micro_batches([rows[i] for i in chosen], settings, class_weights)
        due = checkpoints.is_due(at_evaluation=progress.step + 1 in evals)
        result = train_step(engine, micro, step=progress.step, seed=job.seed, training=training,
                            request=due)
        progress.step += 1
        progress.losses.append([result.sums[name] / settings.global_batch_size
                                for name in ("loss", "adversarial")])
        # ------------------------------------------------------------------------------------------
        if progress.step in evals:
            evaluate_and_keep(job, engine, progress, total_steps, len(rows), checkpoints.seconds)
        if result.request:
            checkpoints.save(progress)
    progress.seconds = checkpoints.seconds()
    return progress


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
    weights = [class_weights[class_of(row.label)] if class_weights else 1.0 for row in mine]
    weights += [0.0] * (slots - len(mine))
    mine += [rows[0]] * (slots - len(mine))
    return [collate(mine[first : first + micro_rows], weights[first : first + micro_rows])
            for first in range(0, slots, micro_rows)]


def shape_of(settings: Settings) -> tuple[int, int]:
    """Return (rows of a micro-batch on every rank, micro-batches of an update)."""
    share = math.ceil(settings.global_batch_size / dist.world_size())
    micro = min(settings.micro_batch_size or share, share)
    return micro, math.ceil(share / micro)


def evaluate_and_keep(job: Job, engine, progress: Progress, total_steps: int, num_rows: int,
                       seconds: Callable[[], float]) -> None:
    """Evaluate, and write the weights if they are the best so far."""
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
    is_best = progress.accept(score)
    if is_best:
        _keep(job, engine, threshold, progress.step)
    _say_epoch(job, progress.history[-1], total_steps, seconds(), is_best)


def _evaluate(job: Job, engine) -> tuple[dict[str, float], float]:
    """Return (metrics, margin above which "no answer" is said, 0 where there is no such thing)."""
    engine.eval()
    scores = job.scores(engine, job.tables.val)
    engine.train()
    threshold = best_threshold(job.tables.val.examples, scores) if job.task.no_answer else 0.0
    guesses = predictions_of(job.task, job.tables.val.examples, scores, threshold)
    return metrics.score(job.task, job.tables.val.examples, guesses), threshold


def build(job: Job, optim: OptimConfig):
    """Return the engine; says what was kept of another task's head."""
    settings = job.settings
    start, saved = job.start, job.initial
    if saved:
        start = start_from(start, saved, job.init_from)
    model = build_model(job.task, start, settings, job.seed)
    if saved is not None:
        job.say(f"  {keep_head(model, job.task, saved)}")
    micro_rows, accumulation = shape_of(settings)
    values = ds_config.complete(
        job.deepspeed, rows=micro_rows * accumulation * dist.world_size(),
        micro_rows=micro_rows, accumulation=accumulation, clip_norm=settings.clip_norm)
    engine = build_engine(model, optim, values)
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


def _keep(job: Job, engine, threshold: float, step: int) -> None:
    """Write the engine's weights; under ZeRO-3 they are made whole one at a time."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with gathered([parameter]):
            if dist.is_main():
                weights[name] = parameter.detach().to("cpu", torch.float32).clone()
    if dist.is_main():
        forget_waiting(job.out)  # no checkpoint knows of them
        save_finetuned(waiting(job.out, step), job.task, job.settings, job.start.config, weights,
                       job.start.tokenizer, threshold)
    dist.barrier()


def _say_epoch(job: Job, entry: Mapping, total_steps: int, seconds: float, better: bool) -> None:
    attack = f"  adversarial {entry['adversarial']:.4f}" if "adversarial" in entry else ""
    values = "  ".join(f"{name} {100 * entry[name]:5.1f}" for name in job.task.metrics)
    job.say(
        f"{job.task.name:<8} seed {job.seed}  epoch {entry['epoch']:>5.1f}  step {entry['step']:>5}"
        f"/{total_steps}  loss {entry['loss']:.4f}{attack}  val {values}  {seconds:6.1f}s"
        f"{'  best' if better else ''}")
