"""Train one task from one seed and keep the weights of the best evaluation.

The examples of update k are positions k*B .. (k+1)*B of one endless stream, the concatenation of
the epochs' permutations; so every update has exactly B examples, each weighing 1/B, at any number
of ranks and micro-batches (slots that are left over carry weight 0).
"""

import itertools
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import xxhash

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import xxh3
from deberta_ds.cluster import dist
from deberta_ds.config.run_config import to_dict
from deberta_ds.engine import ds_config
from deberta_ds.engine.engine import build_engine, gathered, set_learning_rate
from deberta_ds.engine.optim import learning_rate
from deberta_ds.finetune import metrics
from deberta_ds.finetune.answers import best_threshold
from deberta_ds.finetune.directory import load_finetuned, save_finetuned
from deberta_ds.finetune.features import Feature, collate
from deberta_ds.finetune.layouts import class_of
from deberta_ds.finetune.models import Start, build_model, keep_head, start_from
from deberta_ds.finetune.predict import num_scores, predictions_of, score_split
from deberta_ds.finetune.readers import Split
from deberta_ds.finetune.settings import Settings
from deberta_ds.finetune.tasks import Task
from deberta_ds.release.tensors import weight_file
from deberta_ds.train.step import seed_step


@dataclass(frozen=True)
class Job:
    """One (task, seed) run.

    `tests` are splits to predict (and to score, with labels), `diagnostics` ones to score, by name.
    """

    task: Task
    seed: int
    settings: Settings
    start: Start
    train: Split
    val: Split
    tests: Mapping[str, Split]
    out: Path  # the run's own directory
    deepspeed: dict  # checked DeepSpeed JSON
    device: torch.device
    diagnostics: Mapping[str, Split] = field(default_factory=dict)
    init_from: str = ""  # a fine-tuned directory of another task
    keep_model: bool = True
    show_scores: bool = False  # as tables, at the end
    say: Callable[[str], None] = print

    def identity(self) -> dict:
        """Return what a finished run must agree in, to stand for this one."""
        return {
            "task": self.task.name,
            "seed": self.seed,
            "settings": to_dict(self.settings),
            "start": self.start.name,
            "start_weights": self.start.digest,
            "init_from": self.init_from,
            "init_weights": _digest_of(self.init_from) if self.init_from else "",
            "train": [self.train.source, len(self.train.examples)],
            "val": [self.val.source, len(self.val.examples)],
            "labels_and_texts": digest(self.task, self.train, self.val),
            "precision": ds_config.precision(self.deepspeed),
        }


@lru_cache
def _digest_of(directory: str) -> str:
    """Return a hash of a model's weight file, as it was first seen; "" if it is gone."""
    file = weight_file(Path(directory))
    return xxh3(file) if file else ""


def digest(task: Task, *splits: Split) -> str:
    """Return a hash of what a task makes of its data: texts, labels, answers, metrics."""
    found = xxhash.xxh3_128(repr((task.head, task.labels, task.metrics,
                                    task.language, task.columns.get("group"))).encode())
    for example in itertools.chain.from_iterable(split.examples for split in splits):
        found.update(repr((example.sequences, example.label, example.spans, example.names,
                           example.gold)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def train(job: Job, features: Mapping[str, Sequence[Feature]]) -> dict:
    """Train on features["train"]; leave the best evaluation's weights in out/model.

    Returns {"steps", "best_step", "history"}. Raises DivergedError on a loss that is not finite.
    """
    settings, rows = job.settings, features["train"]
    rows = rows[: settings.train_rows] if settings.train_rows else rows
    total_steps = math.ceil(settings.epochs * len(rows) / settings.global_batch_size)
    optim = settings.optim(total_steps)
    if dist.is_main():
        shutil.rmtree(job.out / "model", ignore_errors=True)  # of a start that was killed
    dist.barrier()
    engine, shape = _engine(job, optim)
    try:
        best_step, history = _updates(job, engine, shape, optim, rows, features["val"], total_steps)
    finally:
        engine.destroy()
    return {"steps": total_steps, "best_step": best_step, "history": history}


def _updates(job, engine, shape, optim, rows, val_features, total_steps) -> tuple[int, list[dict]]:
    """Make every update and evaluation; return the best evaluation's step and the history."""
    settings = job.settings
    num_evals = settings.epochs * settings.evals_per_epoch
    evals = {max(1, round(total_steps * (i + 1) / num_evals)) for i in range(num_evals)}
    history: list[dict] = []
    lengths = np.array([row.num_tokens for row in rows])
    best, best_step, since_best = -math.inf, 0, 0
    class_weights = weights_of_classes(job.task, settings, rows)
    losses, began = [], time.monotonic()
    for step in range(total_steps):
        set_learning_rate(engine, learning_rate(optim, step, total_steps))
        chosen = stream(lengths, job.seed, step, settings.global_batch_size, settings.group_updates)
        picked = [rows[i] for i in chosen]
        losses.append(_step(engine, picked, shape, job.seed, step, class_weights))
        if step + 1 not in evals:
            continue
        values, threshold = _evaluate(job, engine, val_features)
        score = metrics.task_score(job.task, values)
        if settings.best_metric:
            score = values[settings.best_metric]
        epoch = (step + 1) * settings.global_batch_size / len(rows)
        loss, adversarial = np.mean(losses, axis=0).round(5).tolist()
        entry = {"step": step + 1, "epoch": round(epoch, 2), "loss": loss}
        if settings.sift_weight > 0:
            entry["adversarial"] = adversarial
        history.append(entry | values)
        losses, since_best = [], since_best + 1
        if score > best:
            best, best_step, since_best = score, step + 1, 0
            _keep(job, engine, threshold)
        _say_epoch(job, history[-1], total_steps, time.monotonic() - began, since_best == 0)
        if settings.patience and since_best >= settings.patience:
            job.say(f"  no better evaluation in {settings.patience}: stopped at step {step + 1}")
            break
    return best_step, history


def _evaluate(job: Job, engine, features: Sequence[Feature]) -> tuple[dict[str, float], float]:
    """Return (metrics, margin above which "no answer" is said, 0 where there is no such thing)."""
    sizes = [num_scores(job.task, example) for example in job.val.examples]
    engine.eval()
    scores = score_split(
        engine, features, sizes, global_batch_size=job.settings.eval_batch_size, device=job.device
    )
    engine.train()
    threshold = best_threshold(job.val.examples, scores) if job.task.no_answer else 0.0
    guesses = predictions_of(job.task, job.val.examples, scores, threshold)
    return metrics.score(job.task, job.val.examples, guesses), threshold


@dataclass(frozen=True)
class _Shape:
    """How one update is cut: `accumulation` micro-batches of `micro_rows` slots on every rank."""

    global_batch_size: int
    micro_rows: int
    accumulation: int


def _engine(job: Job, optim):
    """Return (engine, shape of an update); says what was kept of another task's head."""
    settings, world = job.settings, dist.world_size()
    share = math.ceil(settings.global_batch_size / world)
    micro = min(settings.micro_batch_size or share, share)
    shape = _Shape(settings.global_batch_size, micro, math.ceil(share / micro))
    start, saved = job.start, None
    if job.init_from:
        saved = load_finetuned(job.init_from)
        start = start_from(start, saved, job.init_from)
    model = build_model(job.task, start, settings, job.seed)
    if saved is not None:
        job.say(f"  {keep_head(model, job.task, saved)}")
    values = ds_config.complete(
        job.deepspeed, rows=shape.micro_rows * shape.accumulation * world,
        micro_rows=shape.micro_rows, accumulation=shape.accumulation, clip_norm=settings.clip_norm)
    shares = layer_shares(model, settings.layer_decay)
    engine = build_engine(model, optim, values, rate_shares=shares)
    engine.train()
    return engine, shape


def layer_shares(model: torch.nn.Module, decay: float) -> dict[str, float]:
    """Return {parameter: its learning rate as a share}: lower layers move less (ELECTRA, 3.1).

    The head 1, the top layer `decay`, each layer below that times `decay`, and what lies below the
    first layer (tables, their norms) once more; nothing if `decay` is 1.
    """
    if decay == 1.0:
        return {}
    prefix = "backbone.trunk.encoder.layers."
    num_layers = model.backbone.config.num_layers
    shares = {}
    for name, _ in model.named_parameters():
        if name.startswith("backbone."):
            inside = name.startswith(prefix)
            layer = int(name.removeprefix(prefix).split(".")[0]) if inside else -1
            shares[name] = decay ** (num_layers - layer)
    return shares


def stream(
    lengths: np.ndarray, seed: int, step: int, global_batch_size: int, group_updates: int
) -> list[int]:
    """Return the rows of update `step`: a pure function, each epoch a fresh permutation.

    The rows of `group_updates` updates in a row are dealt to them by length, so that a batch has
    little padding, and those updates are made in random order. An update that two epochs share
    keeps its rows as they were drawn.
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
        low * global_batch_size - epoch * num_rows : high * global_batch_size - epoch * num_rows
    ]
    by_length = rows[np.argsort(lengths[rows], kind="stable")] if group_updates > 1 else rows
    turn = np.random.default_rng([seed, epoch, low]).permutation(high - low)[step - low]
    number = turn if group_updates > 1 else 0
    return by_length[number * global_batch_size : (number + 1) * global_batch_size].tolist()


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


def _step(engine, picked: Sequence[Feature], shape: _Shape, seed: int, step: int,
          class_weights: Sequence[float] = ()):
    """Make one update from the examples in `picked`; return their mean (loss, adversarial)."""
    world, rank = dist.world_size(), dist.rank()
    slots = shape.micro_rows * shape.accumulation
    mine = list(picked[rank * slots : (rank + 1) * slots])
    weights = [class_weights[class_of(row.label)] if class_weights else 1.0 for row in mine]
    weights += [0.0] * (slots - len(mine))
    mine += [picked[0]] * (slots - len(mine))
    # DeepSpeed averages over ranks and micro-batches; this makes it the mean over the batch.
    scale = world * shape.accumulation / shape.global_batch_size
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for micro_step in range(shape.accumulation):
        part = slice(micro_step * shape.micro_rows, (micro_step + 1) * shape.micro_rows)
        batch = collate(mine[part], weights[part]).to(engine.device)
        seed_step(seed, step, micro_step, rank)
        output = engine(batch)
        engine.backward(output.loss_sum * scale)
        total += torch.stack([output.loss_sum.detach(), output.adversarial_sum]).double()
        engine.step()
    means = (dist.sum_over_ranks(total) / shape.global_batch_size).tolist()
    if not math.isfinite(means[0]):
        raise DivergedError(f"the loss became {means[0]} at step {step + 1}; lower learning_rate")
    return means


class DivergedError(UserError):
    """A run's loss became NaN or infinite; a sweep counts it as failed and goes on."""


def _keep(job: Job, engine, threshold: float) -> None:
    """Write the engine's weights; under ZeRO-3 they are made whole one at a time."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with gathered([parameter]):
            if dist.is_main():
                weights[name] = parameter.detach().to("cpu", torch.float32).clone()
    if dist.is_main():
        save_finetuned(job.out / "model", job.task, job.settings, job.start.config, weights,
                       job.start.tokenizer, threshold)
    dist.barrier()


def _say_epoch(job: Job, entry: Mapping, total_steps: int, seconds: float, better: bool) -> None:
    attack = f"  adversarial {entry['adversarial']:.4f}" if "adversarial" in entry else ""
    values = "  ".join(f"{name} {100 * entry[name]:5.1f}" for name in job.task.metrics)
    job.say(
        f"{job.task.name:<8} seed {job.seed}  epoch {entry['epoch']:>5.1f}  step {entry['step']:>5}"
        f"/{total_steps}  loss {entry['loss']:.4f}{attack}  val {values}  {seconds:6.1f}s"
        f"{'  best' if better else ''}"
    )
