"""One optimizer step: loss normalized over ranks and micro-batches; no update from a bad step.

The ranks agree on the device, before the last backward pass, whether a step is bad: its loss is
summed over the ranks, and if it is above the ceiling or not finite, the last micro-batch's loss is
multiplied by NaN. DeepSpeed 0.19.8 makes no update from a gradient whose norm is not finite, in any
precision and ZeRO stage (stages 1-3 and the 16-bit wrappers test the norm and clear the gradients;
only stage 0 in fp32 does not, so that case is tested here, by one more host sync). One collective
and one host sync a step carry the verdict, the sums that are logged and the request to stop. Before
it the host waits for nothing: numbers go to a GPU as arguments of kernels, because a copy would
wait for its queue.
"""

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds.base.errors import UserError, listed
from deberta_ds.cluster import dist
from deberta_ds.train.meters import WorkMeter

# Which steps are bad, and which rank and sequences caused it.
#
# A step is bad if its loss or its gradient is not finite, or, with `train.spike_sigmas` above 0,
# if its loss is more than that many standard deviations above the mean of the last 100 accepted
# steps (no finite loss is bad before there are 100). The loss is the one that is trained, a mean
# over all ranks, so every rank decides alike.
WINDOW = 100  # accepted steps that a loss is compared with
MOST_IN_A_ROW = 10  # bad steps after which a run stops whatever it was told
MOST_ROLLBACKS = 3  # to one checkpoint, with good steps between them


class BadStepError(UserError):
    """A loss or a gradient is not finite, or the loss spiked; the update was not made."""

    on_every_rank = True


class SpikeRule:
    """The losses of the last accepted steps, and the ceiling for the next one."""

    def __init__(self, sigmas: float, losses: Sequence[float] = ()):
        self._sigmas = sigmas
        self._losses: deque[float] = deque(losses, WINDOW)

    def ceiling(self) -> float:
        """Return the largest loss that the next step may have."""
        if not self._sigmas or len(self._losses) < WINDOW:
            return torch.finfo(torch.float64).max
        mean = math.fsum(self._losses) / WINDOW
        variance = math.fsum((loss - mean) ** 2 for loss in self._losses) / WINDOW
        return mean + self._sigmas * math.sqrt(variance)

    def accept(self, loss: float) -> None:
        """Take an accepted step's loss into the window (nothing to do without a rule)."""
        if self._sigmas:
            self._losses.append(loss)

    def state(self) -> list[float]:
        """Return the losses to save in a checkpoint, so that a resumed run decides alike."""
        return list(self._losses)


def describe_losses(batches: list, totals: dict[str, Tensor]) -> str:
    """Return each rank's rows and the sum of each net's losses, or the bad ones if any; collective.

    `totals` are this rank's sums by name.
    """
    rows = [int(row) for batch in batches for row in batch.rows]
    mine = {name: float(value) for name, value in totals.items() if name.endswith("loss")}
    every_rank = [(rank, *part) for rank, part in enumerate(dist.gather_objects((rows, mine)))]
    bad = [f"rank {rank}: {name} = {value}, sequences {rows[0]}..{rows[-1]}"
           for rank, rows, losses in every_rank
           for name, value in losses.items() if not math.isfinite(value)]
    if bad:
        return listed(bad)
    first = min(rows[0] for _, rows, _ in every_rank)
    last = max(rows[-1] for _, rows, _ in every_rank)
    return f"sequences {first}..{last}"


def find_bad_gradients(engine, batches: list, run_micro_batch) -> str:
    """Make a step's passes and return which rank, rows and parameters give a bad gradient, or "".

    Only for a run that is about to stop: the engine's gradients are of no use afterwards.
    `run_micro_batch(micro_step)` makes one forward and returns the loss. Collective.
    """
    found: list[tuple[int, int, str]] = []
    parameters = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    for micro_step, batch in enumerate(batches):
        bad: list[str] = []

        def note(gradient: Tensor, name: str, bad: list[str] = bad) -> None:
            if not torch.isfinite(gradient).all():
                bad.append(name)

        hooks = [p.register_hook(lambda g, n=name, note=note: note(g, n)) for name, p in parameters]
        engine.backward(run_micro_batch(micro_step))
        for hook in hooks:
            hook.remove()
        if bad:
            found.append((int(batch.rows[0]), int(batch.rows[-1]), bad[0]))
    return listed([f"rank {rank}: first at {name} in backward order, sequences {first}..{last}"
                   for rank, part in enumerate(dist.gather_objects(found))
                   for first, last, name in part])


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on all ranks."""

    sums: dict[str, float]  # over all ranks: what the model summed, and the counts
    loss: float  # the mean that was trained on
    updated: bool
    problem: str = ""  # why no update was made, with rows; empty for an fp16 scale overflow
    stop: bool = False  # some rank was asked to stop


def seed_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Make dropout of one micro-batch a function of (seed, step, micro-step, rank)."""
    text = f"{seed} {step} {micro_step} {rank}".encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))


def count_over_ranks(batches: list, device: torch.device) -> dict[str, Tensor]:
    """Return {"targets", "tokens"}: fp64 scalars on `device`, over all micro-batches and ranks."""
    mine = (sum(b.num_targets for b in batches), sum(b.num_tokens for b in batches))
    counts = dist.sum_over_ranks(torch.stack([_number(count, device) for count in mine]))
    return {"targets": counts[0], "tokens": counts[1]}


def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=device)


def train_step(engine, batches: list, *, step: int, seed: int,
               ceiling: float = torch.finfo(torch.float64).max, stop: bool = False,
               raise_if_bad: bool = True, meter: WorkMeter | None = None) -> StepResult:
    """Make one update from this rank's micro-batches, unless the step is bad.

    Bad: the loss is above `ceiling` or not finite, or the gradient is not finite. Then no update is
    made, and BadStepError is raised on every rank or, without `raise_if_bad`, `problem` is set.
    `stop` is this rank's request; the result's is that of any rank. `meter` gets the time of the
    forward passes.
    """
    counts = count_over_ranks(batches, engine.device)
    # DeepSpeed averages over ranks and micro-batches; dividing the counts undoes that exactly.
    num_losses = dist.world_size() * len(batches)
    normalizers = {name: (count / num_losses).float() for name, count in counts.items()}
    totals: dict[str, Tensor] = {}
    whole_loss = torch.zeros((), dtype=torch.float64, device=engine.device)

    def run_micro_batch(micro_step: int) -> tuple[Tensor, dict[str, Tensor]]:
        seed_step(seed, step, micro_step, dist.rank())
        with meter.computing() if meter else nullcontext():
            loss, sums, _ = engine(batches[micro_step].to(engine.device), normalizers)
        return loss, sums

    # A batch that grows has another number of micro-batches now and then; a smaller one is a whole
    # one to DeepSpeed, which only adds up its samples wrongly.
    engine.set_train_batch_size(num_losses * engine.train_micro_batch_size_per_gpu())
    for micro_step in range(len(batches)):
        engine.set_gradient_accumulation_boundary(micro_step + 1 == len(batches))
        loss, sums = run_micro_batch(micro_step)
        whole_loss += loss.detach() / num_losses
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value.double()
        if micro_step + 1 < len(batches):
            engine.backward(loss)
            engine.step()
    agreed = torch.stack([whole_loss, _number(float(stop), engine.device), *totals.values()])
    agreed = dist.sum_over_ranks(agreed)
    good = agreed[0] <= ceiling  # False for NaN
    engine.backward(loss * torch.where(good, 1.0, torch.nan).to(loss.dtype))
    mean_loss, stops, *summed = torch.cat([agreed, torch.stack(list(counts.values()))]).tolist()
    sums = dict(zip([*totals, *counts], summed, strict=True))
    bad_loss = not mean_loss <= ceiling
    if bad_loss and raise_if_bad:
        raise _bad_step(step, sums, _bad_loss(mean_loss, ceiling, sums, batches, totals))
    updated = _update(engine)
    problem = ""
    if bad_loss:
        problem = _bad_loss(mean_loss, ceiling, sums, batches, totals)
    elif not updated and not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
        problem = f"gradient not finite, loss {mean_loss:.6g} ({describe_losses(batches, totals)})"
        if raise_if_bad:
            cause = find_bad_gradients(engine, batches, lambda number: run_micro_batch(number)[0])
            cause = cause or "not seen again when the step was repeated: suspect the hardware"
            raise _bad_step(step, sums, f"the gradient is not finite ({cause})")
    return StepResult(sums, mean_loss, updated, problem, stops > 0)


def _update(engine) -> bool:
    """Take the engine's step; return whether the parameters were updated."""
    if hasattr(engine.optimizer, "overflow"):
        try:
            engine.step()
        except Exception as error:  # DeepSpeed has no class of its own for it
            if "loss scale already at minimum" not in str(error):
                raise
            raise BadStepError("the fp16 gradient overflows at the lowest loss scale; train in "
                               "bf16 or fp32, or lower optim.learning_rate") from None
        return not bool(engine.optimizer.overflow)
    # ZeRO-0 in fp32: a plain optimizer, which would apply NaN. All ranks hold the same gradients.
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    finite = bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all())
    if finite:
        engine.step()
    else:  # what the wrappers do; engine.step() cannot clip when there is nothing to clip
        engine.zero_grad()
        engine.micro_steps += 1
        engine.skipped_steps += 1
    return finite


def _bad_loss(loss: float, ceiling: float, sums: dict[str, float], batches: list,
              totals: dict[str, Tensor]) -> str:
    where = describe_losses(batches, totals)
    if not sums["targets"]:
        return f"none of its {sums['tokens']:,.0f} tokens is masked ({where})"
    if not math.isfinite(loss):
        return f"the loss is {loss:.6g} ({where})"
    return f"the loss is {loss:.6g}, above the limit of {ceiling:.6g} ({where})"


def _bad_step(step: int, sums: dict[str, float], cause: str) -> BadStepError:
    remedy = (
        "Resume from the last checkpoint with a lower optim.learning_rate or more warm-up, with "
        'train.on_spike = "skip" or "rollback", or look at those sequences with data_prep/show.py'
    )
    if not sums["targets"]:
        remedy = ("Raise objective.mask.rate or train.global_batch_size, or look at those "
                  'sequences with data_prep/show.py, or skip them with train.on_spike = "skip"')
    return BadStepError(f"step {step + 1}: {cause}; no update was made. {remedy}")
