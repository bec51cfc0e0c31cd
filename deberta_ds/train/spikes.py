"""Which steps are bad, and who is to blame.

A step is bad if its loss or its gradient is not finite, or, with `train.spike_sigmas` above 0, if
its loss is more than that many standard deviations above the mean of the last 100 accepted steps
(no finite loss is bad before there are 100). The loss is the one that is trained, a mean over all
ranks, so every rank decides alike.
"""

import math
from collections import deque

import torch
from torch import Tensor

from deberta_ds import dist
from deberta_ds.errors import UserError, listed

WINDOW = 100  # accepted steps that a loss is compared with
MOST_IN_A_ROW = 10  # bad steps after which a run stops whatever it was told
MOST_ROLLBACKS = 3  # to one checkpoint, with good steps between them


class BadStepError(UserError):
    """A loss or a gradient is not finite, or the loss spiked; the update was not made."""

    on_every_rank = True


class SpikeRule:
    """The losses of the last accepted steps, and the ceiling for the next one."""

    def __init__(self, sigmas: float, losses: list[float] = ()):
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
        """Return what a checkpoint must hold so that a resumed run decides alike."""
        return list(self._losses)


def describe_losses(batches: list, totals: dict[str, Tensor]) -> str:
    """Return each rank's rows and the sum of each net's losses, or the bad ones if any; collective.

    `totals` are this rank's sums by name.
    """
    rows = [int(row) for batch in batches for row in batch.rows]
    mine = {name: float(value) for name, value in totals.items() if name.endswith("loss")}
    every_rank = [(rank, *part) for rank, part in enumerate(dist.gather_objects((rows, mine)))]
    bad = [f"rank {rank}: {name} = {value}, rows {rows[0]}..{rows[-1]}"
           for rank, rows, losses in every_rank
           for name, value in losses.items() if not math.isfinite(value)]
    if bad:
        return listed(bad)
    first = min(rows[0] for _, rows, _ in every_rank)
    last = max(rows[-1] for _, rows, _ in every_rank)
    return f"rows {first}..{last}"


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
    return listed([f"rank {rank}: first at {name} in backward order, rows {first}..{last}"
                   for rank, part in enumerate(dist.gather_objects(found))
                   for first, last, name in part])
