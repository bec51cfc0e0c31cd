"""What is learned, and from which tokens: section [objective] of a run file."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds.config.options import STRICT, OneOfOrOwn, option

_Rate = Annotated[float, Field(gt=0, lt=1)]
_Temperature = Annotated[float, Field(ge=0.01, le=100)]


def _on_line(first: float, last: float | None, share: float) -> float:
    """Return the point of a straight line at min(share, 1), exact at both ends; last None: flat."""
    share = 0.0 if last is None else min(1.0, share)
    return (1.0 - share) * first + share * (last or 0.0)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class MaskConfig:
    """Which tokens become targets, and what the model sees in their place."""

    rate: float = option("share of the row's real tokens that become targets", 0.15, gt=0, lt=1)
    final_rate: _Rate | None = option(
        "what the rate has become at the run's last row, on a straight line; evaluations have it "
        "from the start; none: the rate stays", None)
    max_ngram: int = option("words in a masked span: 1 to this many, with P(n) ~ 1/n", 1,
                            ge=1, le=32)
    mask_share: float = option("of the targets: shown as [MASK]", 1.0, ge=0, le=1)
    random_share: float = option("of the targets: shown as a random piece; the rest is unchanged",
                                 0.0, ge=0, le=1)
    selection: Annotated[str, OneOfOrOwn(("uniform", "deberta_window"))] = option(
        "how words are drawn; deberta_window: the official code's sampler; or a function of one's "
        "own", "uniform")

    def rate_at(self, share_of_run: float) -> float:
        """Return the rate of a row that has `share_of_run` of the run's rows before it."""
        return _on_line(self.rate, self.final_rate, share_of_run)

    def __post_init__(self):
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(f"mask_share + random_share = {self.mask_share + self.random_share} "
                             "must be at most 1")


# The published masks (microsoft/DeBERTa apps/tasks): v3 hides every target, v1/v2 use n-grams and
# 80/10/10.
MASK_DEFAULTS = {
    "rtd": {"max_ngram": 1, "mask_share": 1.0, "random_share": 0.0},
    "rtd_cached": {"max_ngram": 1, "mask_share": 1.0, "random_share": 0.0},
    "mlm": {"max_ngram": 3, "mask_share": 0.8, "random_share": 0.1},
}


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is learned: masked LM (v1, v2) or replaced-token detection (v3)."""

    kind: Annotated[str, OneOfOrOwn(("mlm", "rtd", "rtd_cached"), module=True)] = option(
        "mlm: masked LM (v1, v2); rtd: replaced-token detection (v3); rtd_cached: the same with "
        "stored replacements (data_prep/replace.py), without a generator; or a module of one's "
        "own")
    mask: MaskConfig = MaskConfig()
    generator_layers: int = option("rtd: layers of the generator; 0: half of the discriminator's, "
                                   "as in the released v3 models", 0, ge=0, le=1000)
    embedding_sharing: Literal["gdes", "es", "nes"] = option(
        "rtd: the two networks' word tables: gradient-disentangled, shared, apart", "gdes")
    rtd_weight: float = option("rtd: lambda of the discriminator's loss; 50 in the DeBERTaV3 "
                               "paper, 10 in the official script", 50.0, ge=0, le=1e6)
    temperature: float = option("rtd: of the generator's samples", 1.0, ge=0.01, le=100)
    final_temperature: _Temperature | None = option(
        "rtd: what it has become at the run's last step, on a straight line; evaluations have it "
        "from the start; none: it stays", None)
    sample_by: Literal["epoch", "course"] = option(
        "rtd_cached: epoch: a new draw every epoch; course: the draws one after another over the "
        "run, as from hot to cold", "epoch")

    def __post_init__(self):
        for name, value in (("mask.final_rate", self.mask.final_rate),
                            ("final_temperature", self.final_temperature)):
            if self.kind == "rtd_cached" and value is not None:
                raise ValueError(f"{name}: stored replacements have what they were made with; "
                                 "leave it out")

    def temperature_at(self, share_of_run: float) -> float:
        return _on_line(self.temperature, self.final_temperature, share_of_run)
