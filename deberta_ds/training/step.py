"""One optimizer step of pretraining or fine-tuning; no update from a bad step, and what a run does
about one (`train.on_spike`).

The ranks agree on the device, before the last backward pass, whether a step is bad: its loss is
summed over the ranks, and if it is above the ceiling or not finite, the last micro-batch's loss is
multiplied by NaN. DeepSpeed 0.19.8 makes no update from a gradient whose norm is not finite, in any
precision and ZeRO stage (stages 1-3 and the 16-bit wrappers test the norm and clear the gradients;
only stage 0 in fp32 does not, so that case is tested here, by one more host sync). One collective
and one host sync a step carry the verdict, the sums that are logged and a request to stop or save.
Before it the host waits for nothing: numbers go to a GPU as arguments of kernels, because a copy
would wait for its queue.
"""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds.base.errors import listed
from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import read_run_record
from deberta_ds.cluster import dist
from deberta_ds.config.batch_schedule import rows_before
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.rows import Batch
from deberta_ds.engine.engine import BadStepError, Update, update
from deberta_ds.engine.passes import Engine, Forward, Sums, first_bad_gradient, span
from deberta_ds.training.meters import WorkMeter

WINDOW = 100  # accepted steps that a loss is compared with
MOST_IN_A_ROW = 10  # bad steps after which a run stops whatever it was told
MOST_ROLLBACKS = 3  # to one checkpoint, with good steps between them


@dataclass(frozen=True)
class Training:
    """What pretraining and fine-tuning do differently in a step.

    `prepare(engine, batches)` returns the forward pass, whose losses add up to the mean over the
    step once DeepSpeed has averaged them over ranks and micro-batches; `normalizers` of it, for a
    pass without DeepSpeed's hooks; and counts over all ranks.
    `name` says which `rows` of micro-batches are meant; `remedy` is what to do after a bad step.
    """

    prepare: Callable[[Engine, list], tuple[Forward, Sums, Sums]]
    name: Callable[[Sequence[int]], str]
    remedy: str


def mean_over_tokens(engine: Engine, batches: list[Batch]) -> tuple[Forward, Sums, Sums]:
    """Return what `Training.prepare` does for pretraining: a mean over targets or tokens."""
    counts = count_over_ranks(batches, engine.device)
    # DeepSpeed averages over ranks and micro-batches; dividing the counts undoes that exactly.
    num_losses = dist.world_size() * len(batches)
    normalizers = {name: (count / num_losses).float() for name, count in counts.items()}

    def forward(batch) -> tuple[Tensor, Sums]:
        loss, sums, _ = engine(batch, normalizers)
        return loss, sums

    return forward, normalizers, counts


PRETRAINING = Training(
    mean_over_tokens, lambda rows: f"sequences {rows[0]}..{rows[-1]}",
    "Resume from the last checkpoint with a lower optim.learning_rate or more warm-up, with "
    'train.on_spike = "skip" or "rollback", or look at those sequences with data_prep/show.py')


def describe_losses(batches: list, totals: Sums, name: Callable) -> str:
    """Return each rank's rows and the sum of each net's losses, or the bad ones if any; collective.

    `totals` are this rank's sums by name.
    """
    rows = [int(row) for batch in batches for row in batch.rows]
    mine = {key: float(value) for key, value in totals.items() if key.endswith("loss")}
    every_rank = dist.gather_objects((rows, mine))
    bad = [f"rank {rank}: {key} = {value}, {name(rows)}"
           for rank, (rows, losses) in enumerate(every_rank)
           for key, value in losses.items() if not math.isfinite(value)]
    return listed(bad) or name(sorted(row for rows, _ in every_rank for row in rows))


def find_bad_gradients(engine, batches: list, forward: Forward, seeds: Sequence[int],
                       name: Callable = PRETRAINING.name) -> str:
    """Make a step's passes and return which rank, rows and parameters give a bad gradient, or "".

    Only for a run that is about to stop: the engine's gradients are of no use afterwards.
    Collective.
    """
    found = [([int(row) for row in batch.rows], first_bad_gradient(engine, batch, seed, forward))
             for batch, seed in zip(batches, seeds, strict=True)]
    return listed([f"rank {rank}: first at {parameter} in backward order, {name(rows)}"
                   for rank, part in enumerate(dist.gather_objects(found))
                   for rows, parameter in part if parameter])


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on all ranks."""

    sums: dict[str, float]  # over all ranks: what the model summed, and the counts
    loss: float  # the mean that was trained on
    updated: bool
    problem: str = ""  # why no update was made, with rows; empty for an fp16 scale overflow
    request: bool = False  # some rank's


def seed_of(seed: int, step: int, micro_step: int, rank: int) -> int:
    """Return the number from which all that is random in one micro-batch follows."""
    text = f"{seed} {step} {micro_step} {rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def count_over_ranks(batches: list, device: torch.device) -> Sums:
    """Return {"targets", "tokens"}: fp64 scalars on `device`, over all micro-batches and ranks."""
    mine = (sum(b.num_targets for b in batches), sum(b.num_tokens for b in batches))
    counts = dist.sum_over_ranks(torch.stack([_number(count, device) for count in mine]))
    return {"targets": counts[0], "tokens": counts[1]}


def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=device)


class SpikeRule:
    """The losses of the last accepted steps, and the ceiling for the next one: with
    `train.spike_sigmas` above 0, so many standard deviations above their mean, once there are 100.
    The loss is the one that is trained, a mean over all ranks, so every rank decides alike.
    """

    def __init__(self, sigmas: float, losses: Sequence[float] = ()):
        self._sigmas = sigmas
        self.losses: deque[float] = deque(losses, WINDOW)  # saved, so a resumed run decides alike

    def ceiling(self) -> float:
        """Return the largest loss that the next step may have."""
        if not self._sigmas or len(self.losses) < WINDOW:
            return torch.finfo(torch.float64).max
        mean = math.fsum(self.losses) / WINDOW
        variance = math.fsum((loss - mean) ** 2 for loss in self.losses) / WINDOW
        return mean + self._sigmas * math.sqrt(variance)

    def accept(self, loss: float) -> None:
        """Take an accepted step's loss into the window (nothing to do without a rule)."""
        if self._sigmas:
            self.losses.append(loss)


def train_step(engine: Engine, batches: list, *, step: int, seed: int,
               training: Training = PRETRAINING, ceiling: float = torch.finfo(torch.float64).max,
               request: bool = False, raise_if_bad: bool = True, meter: WorkMeter | None = None
               ) -> StepResult:
    """Make one update from this rank's micro-batches, unless the step is bad.

    Bad: the loss is above `ceiling` or not finite, or the gradient is not finite. Then no update is
    made, and BadStepError is raised on every rank or, without `raise_if_bad`, `problem` is set.
    `request` is this rank's, to stop or to save; the result's is that of any rank. `meter` gets the
    time of the forward passes.
    """
    forward, normalizers, counts = training.prepare(engine, batches)
    seeds = [seed_of(seed, step, micro_step, dist.rank()) for micro_step in range(len(batches))]
    totals: Sums = {}
    whole_loss, asked = (_number(value, engine.device) for value in (0.0, float(request)))
    engine.passes.begin_step(normalizers, len(batches))
    for batch, number in zip(batches, seeds, strict=True):
        loss, sums = engine.passes.run_pass(batch, number, forward,
                                            meter.computing if meter else nullcontext)
        whole_loss += loss / (dist.world_size() * len(batches))
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value.double()
    agreed = torch.stack([whole_loss, asked, *totals.values()])
    agreed = dist.sum_over_ranks(agreed)
    good = agreed[0] <= ceiling  # False for NaN
    engine.passes.hand_over(good)
    agreed = torch.cat([agreed, *(count.view(1) for count in counts.values())])
    mean_loss, requests, *summed = agreed.tolist()
    sums = dict(zip([*totals, *counts], summed, strict=True))
    problem = ""
    if not mean_loss <= ceiling:
        problem = _bad_loss(mean_loss, ceiling, sums, describe_losses(batches, totals,
                                                                      training.name))
        if raise_if_bad:
            raise BadStepError(f"step {step + 1}: {problem}; no update was made. "
                               f"{training.remedy if sums.get('targets', 1) else _UNMASKED}")
    with span("update"):
        done = update(engine)
    if done is Update.BAD and not problem:
        where = describe_losses(batches, totals, training.name)
        problem = f"gradient not finite, loss {mean_loss:.6g} ({where})"
        if raise_if_bad:
            cause = find_bad_gradients(engine, batches, forward, seeds, training.name) or (
                "not seen again when the step was repeated: suspect the hardware")
            raise BadStepError(f"step {step + 1}: the gradient is not finite ({cause}); no update "
                               f"was made. {training.remedy}")
    return StepResult(sums, mean_loss, done is Update.MADE, problem, requests > 0)


def _bad_loss(loss: float, ceiling: float, sums: dict[str, float], where: str) -> str:
    if not sums.get("targets", 1):
        return f"none of its {sums['tokens']:,.0f} tokens is masked ({where})"
    if not math.isfinite(loss):
        return f"the loss is {loss:.6g} ({where})"
    return f"the loss is {loss:.6g}, above the limit of {ceiling:.6g} ({where})"


_UNMASKED = ("Raise objective.mask.rate or train.global_batch_size, or look at those sequences "
             'with data_prep/show.py, or skip them with train.on_spike = "skip"')


class BadSteps:
    """The bad steps of one run, under "skip" and "rollback"; under "stop" the first one ends it."""

    def __init__(self, run: RunConfig, engine, losses: Sequence[float] = ()):
        self._run, self._engine = run, engine
        self.spikes = SpikeRule(run.train.spike_sigmas, losses)
        self._in_a_row = 0
        self._rollbacks: Counter[Path] = Counter()  # those that threw away good steps

    def accept(self, loss: float) -> None:
        """Take note of a good step."""
        self._in_a_row = 0
        self.spikes.accept(loss)

    def skip(self, step: int, problem: str) -> tuple[str, str, dict[str, int]]:
        """Return the event, its text and the sequences of a bad step, the last of `step` steps.

        Under "rollback", weights and optimizer become those of the newest checkpoint. The run goes
        on with the next step's sequences either way, so a bad batch is never met again. Raises
        BadStepError on every rank where that gets a run nowhere.
        """
        train = self._run.train
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise BadStepError(f"step {step}: {self._in_a_row} bad steps in a row ({problem}); the "
                               "run has diverged: resume from an older checkpoint with a lower "
                               "optim.learning_rate")
        detail = f"no update: {problem}"
        if train.on_spike == "rollback":
            path = self._checkpoint(step, problem)
            saved_state.load_state(self._engine, path)
            self.spikes = SpikeRule(train.spike_sigmas, dist.together(
                lambda: read_run_record(path)).recent_losses)
            detail = f"weights and optimizer of {path}: {problem}"
        return train.on_spike, detail, {"first_sequence": rows_before(train, step - 1),
                                        "last_sequence": rows_before(train, step) - 1}

    def _checkpoint(self, step: int, problem: str) -> Path:
        """Return the newest checkpoint, unless the run has come back to it too often."""
        path = find.find(self._run.out_dir, "auto").path
        if path is None:
            raise BadStepError(f"step {step}: {problem}, and there is no checkpoint to roll back "
                               'to; lower train.save_every or use train.on_spike = "skip"')
        self._rollbacks[path] += self._in_a_row == 1
        if self._rollbacks[path] > MOST_ROLLBACKS:
            raise BadStepError(
                f"step {step}: {problem}, and {MOST_ROLLBACKS} rollbacks to {path} did not get the "
                "run to its next checkpoint; resume from an older one with a lower "
                "optim.learning_rate, or lower train.save_every")
        return path
