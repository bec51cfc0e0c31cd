"""Learning rate as a pure function of the step: nothing to save, nothing to restore.

Steps count from 0. No update is lost to a rate of zero: warm-up starts at lr / warmup_steps, and
the decay would reach its end one step after the last. `deberta_linear` is the official schedule
(lr_schedulers.py): step 0 has rate 0, and the line after warm-up is not rescaled, so the rate drops
from lr to lr (1 - warm-up share) where warm-up ends.
"""

import math

from deberta_ds.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of update `step` (0 .. total_steps - 1)."""
    if optim.schedule == "deberta_linear":
        return optim.lr * _deberta_linear(optim, step, total_steps)
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    share = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    return optim.lr * _decayed(optim, share, step, total_steps)


def _decayed(optim: OptimConfig, share: float, step: int, total_steps: int) -> float:
    low = optim.min_lr_share
    match optim.schedule:
        case "constant":
            return 1.0
        case "linear":
            return low + (1 - low) * (1 - share)
        case "cosine":
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share))
        case "wsd":
            decay_steps = max(1, round(optim.decay_share * total_steps))
            remaining = min(1.0, (total_steps - step) / decay_steps)
            return low + (1 - low) * remaining
    raise AssertionError(optim.schedule)


def _deberta_linear(optim: OptimConfig, step: int, total_steps: int) -> float:
    if step < optim.warmup_steps:
        return step / optim.warmup_steps
    return (1 - optim.min_lr_share) * (1 - step / total_steps) + optim.min_lr_share
