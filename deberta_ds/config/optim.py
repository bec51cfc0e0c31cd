"""Section [optim] of a run file, and the learning rate as a function of the step.

Steps count from 0. No update is lost to a rate of zero: warm-up starts at lr / warmup_steps, and
the decay would reach its end one step after the last. `deberta_linear` is the official schedule
(lr_schedulers.py): step 0 has rate 0, and the line after warm-up is not rescaled, so the rate
drops from lr to lr (1 - warm-up share) where warm-up ends.
"""

import math
from collections.abc import Callable
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds.base import user_code
from deberta_ds.base.errors import ConfigError
from deberta_ds.config.options import STRICT, OneOfOrOwn, option

_Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


# What is left of the way from the peak to its last share, by (optim, share of the steps after
# warm-up, step, total steps).
SCHEDULES: dict[str, Callable[["OptimConfig", float, int, int], float]] = {
    "linear": lambda _optim, share, _step, _total: 1 - share,
    "cosine": lambda _optim, share, _step, _total: 0.5 * (1 + math.cos(math.pi * share)),
    "wsd": lambda optim, _share, step, total: min(
        1.0, (total - step) / max(1, round(optim.decay_share * total))),
    "wsd_sqrt": lambda *given: 1 - math.sqrt(1 - SCHEDULES["wsd"](*given)),  # arXiv 2405.18392
    "constant": lambda *_: 1.0,
    "deberta_linear": lambda _optim, _share, step, total: 1 - step / total}


@dataclass(config=STRICT, frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    learning_rate: float = option("peak learning rate", gt=0, le=10)
    name: Annotated[str, OneOfOrOwn(("adamw", "muon", "adam_uncorrected"))] = option(
        "optimizer; muon: Muon for matrices and AdamW for the rest; adam_uncorrected: the official "
        "XAdam; or your own function, FILE.py:NAME", "adamw")
    momentum: _Decay = option("decay of Muon's moving average of gradients", 0.95)
    betas: tuple[_Decay, _Decay] = option("decay rates of Adam's two moving averages", (0.9, 0.98))
    eps: float = option("epsilon of Adam's denominator", 1e-6, ge=1e-37, le=1)  # fp32 begins there
    weight_decay: float = option("decoupled weight decay; biases and norms have none", 0.01, ge=0,
                                 le=10)
    layer_decay: float = option("learning rate of a layer, as a share of that of the next higher "
                                "layer; embeddings are below the first one", 1.0, gt=0, le=1)
    clip_norm: float = option("largest gradient norm, per network (generator and discriminator are "
                              "clipped separately, and so is a table that they share); 0: no "
                              "clipping", 1.0, ge=0, le=1e9)
    warmup_steps: int = option("steps of learning rate warm-up", 0, ge=0, le=1 << 40)
    schedule: Annotated[str, OneOfOrOwn(tuple(SCHEDULES))] = option(
        "learning rate schedule after warm-up; wsd: constant, then a linear decay (wsd_sqrt: 1 - "
        "square root); deberta_linear: the official one, with its jump; or your own function of "
        "warm-up and decay, FILE.py:NAME", "linear")
    decay_share: float = option("wsd, wsd_sqrt: share of all steps in which the learning rate "
                                "decays, at the end; 1: a decay branch", 0.1, gt=0, le=1)
    min_learning_rate_share: float = option("last share of learning_rate", 0.0, ge=0, le=1)


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of update `step` (0 .. total_steps - 1)."""
    if user_code.is_own(optim.schedule):  # which warms up by itself
        factor = user_code.function("optim.schedule", optim.schedule)(step, total_steps, optim)
        if not isinstance(factor, int | float) or not math.isfinite(factor):
            raise ConfigError(f"optim.schedule: {optim.schedule} returned {factor!r} for step "
                              f"{step:,}; it must return a finite number, a share of "
                              "optim.learning_rate")
        return optim.learning_rate * factor
    if step < optim.warmup_steps:
        if optim.schedule == "deberta_linear":
            return optim.learning_rate * (step / optim.warmup_steps)
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    share = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    low, left = optim.min_learning_rate_share, SCHEDULES[optim.schedule]
    return optim.learning_rate * (low + (1 - low) * left(optim, share, step, total_steps))
