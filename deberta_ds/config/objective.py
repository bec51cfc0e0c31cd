"""What is learned, and from which tokens: section [objective] of a run file."""

import math
from contextlib import suppress
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Literal

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.config.options import STRICT, OneOfOrOwn, option

_Rate = Annotated[float, Field(gt=0, lt=1)]
_Temperature = Annotated[float, Field(ge=0.01, le=100)]
_SampleBy = Annotated[Literal["epoch", "run"],  # "course": of 0.2.0
                      pydantic.BeforeValidator(lambda value: "run" if value == "course" else value)]
_RATE_STEPS = 8  # numbers of slots of a run whose mask rate changes
_OVERSHOOT = 16  # tokens of the word with which the official sampler passes its budget


def _on_line(first: float, last: float | None, share):
    """Return the point of a straight line at min(share, 1), exact at both ends; last None: flat.

    share: a number, or a scalar tensor of at most 1.
    """
    if last is None:
        return first
    share = min(1.0, share) if isinstance(share, (int, float)) else share
    return (1.0 - share) * first + share * last


@dataclass(config=STRICT, frozen=True, kw_only=True)
class MaskConfig:
    """Which tokens become targets, and what the model sees in their place."""

    rate: float = option("share of the real tokens of a sequence that become targets", 0.15, gt=0,
                         lt=1)
    final_rate: _Rate | None = option("final mask rate. Interpolated linearly over training; "
                                      "evaluation always uses the final value. Unset: constant",
                                      None)
    max_ngram: int = option("longest masked span in words; length n has P(n) ~ 1/n", 1, ge=1, le=32)
    mask_share: float = option("share of the targets that are replaced by [MASK]", 1.0, ge=0, le=1)
    random_share: float = option("share of the targets that are replaced by a random token; the "
                                 "rest is unchanged", 0.0, ge=0, le=1)
    selection: Annotated[str, OneOfOrOwn(("uniform", "deberta_window"))] = option(
        "how words are sampled; deberta_window: as the official code does; or your own function, "
        "FILE.py:NAME", "uniform")

    def rate_at(self, run_fraction: float) -> float:
        """Return the rate of a row that has `run_fraction` of the run's rows before it."""
        return _on_line(self.rate, self.final_rate, run_fraction)

    def slots(self, length: int, rate: float) -> int:
        """Return for how many targets a sequence at this rate has room: of a run, few numbers.

        Each is another shape of a step, which a CUDA graph is captured for and a CPU compiles for.
        """
        final = self.rate if self.final_rate is None else self.final_rate
        low, high = sorted((self.rate, final))
        step = (high - low) / _RATE_STEPS
        if step:
            rate = min(high, low + math.ceil((rate - low) / step - 1e-9) * step)
        by_words = self.selection == "deberta_window" and self.max_ngram > 1
        return min(length, math.ceil(rate * length - 1e-9) + (_OVERSHOOT if by_words else 0))

    def __post_init__(self):
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(f"mask_share + random_share = {self.mask_share + self.random_share} "
                             "must be at most 1")


_FILES = Path(__file__).parents[1] / "objectives"  # not imported here: it needs torch
KINDS = tuple(sorted({one.name for one in iter_modules([str(_FILES)])} - {"base", "build"}))
# The published masks (microsoft/DeBERTa apps/tasks): v3 hides every target, as a kind does that is
# not named here; v1/v2 use n-grams and 80/10/10.
MASK_DEFAULTS = {"rtd": {"max_ngram": 1, "mask_share": 1.0, "random_share": 0.0},
                 "rtd_cached": {"max_ngram": 1, "mask_share": 1.0, "random_share": 0.0},
                 "mlm": {"max_ngram": 3, "mask_share": 0.8, "random_share": 0.1}}


def mask_defaults(kind: str) -> dict:
    """Return the masks of a kind, of one's own those of its file."""
    if user_code.is_own(kind):
        with suppress(UserError):  # said on all ranks together, when the run is checked
            return getattr(user_code.load("objective.kind", kind), "MASK_DEFAULTS", {})
    return MASK_DEFAULTS.get(kind, {})


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is learned: masked LM (v1, v2) or replaced-token detection (v3)."""

    kind: Annotated[str, OneOfOrOwn(KINDS, module=True)] = option(
        "mlm: masked LM (v1, v2); rtd: replaced-token detection (v3); rtd_cached: replaced-token "
        "detection on stored replacements (data_prep/replace.py), without a generator; or your "
        "own module, FILE.py")
    mask: MaskConfig = MaskConfig()
    generator_layers: int = option("rtd: layers of the generator; 0: half of the discriminator's, "
                                   "as in the released v3 models", 0, ge=0, le=1000)
    embedding_sharing: Literal["gdes", "es", "nes"] = option(
        "rtd: token embeddings of the two networks; gdes: gradient-disentangled sharing; es: "
        "shared; nes: separate", "gdes")
    rtd_weight: float = option("rtd: weight (lambda) of the discriminator's loss; 50 in the "
                               "DeBERTaV3 paper, 10 in the official script", 50.0, ge=0, le=1e6)
    temperature: float = option("rtd: temperature of the generator's samples", 1.0, ge=0.01, le=100)
    final_temperature: _Temperature | None = option("rtd: final temperature. Interpolated linearly "
                                                    "over training; evaluation always uses the "
                                                    "final value. Unset: constant", None)
    sample_by: _SampleBy = option(
        "rtd_cached: which stored sample of the replacements is used; epoch: the next one in every "
        "epoch; run: one after another over the run, for example from hot to cold", "epoch")

    def __post_init__(self):
        for name, value in (("mask.final_rate", self.mask.final_rate),
                            ("final_temperature", self.final_temperature)):
            if self.kind == "rtd_cached" and value is not None:
                raise ValueError(f"{name}: stored replacements have what they were made with; "
                                 "leave it out")

    def temperature_at(self, run_fraction: float) -> float:
        """Return the temperature of the generator's samples after a share of the run."""
        return _on_line(self.temperature, self.final_temperature, run_fraction)
