"""Replaced-token detection with stored replacements: the discriminator alone.

A frozen generator has replaced the tokens once (data_prep/replace.py), so a step runs no generator
(as Fast-ELECTRA proposes; arXiv 2310.07347). Under GDES the frozen E_G
would be a constant to which the discriminator adds a delta: that is one table that starts at E_G,
which `init.generator` gives; without it the table starts at random.

See `objectives.base` for what the functions of this module are for.
"""

from torch import Tensor, nn

from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.model import flops
from deberta_ds.objectives import base, mlm, rtd
from deberta_ds.objectives.base import Metric, Numbers, Tensors

METRICS: tuple[Metric, ...] = rtd.DETECTION_METRICS
HEADS = {"main": "rtd_head."}
MASK_DEFAULTS = rtd.MASK_DEFAULTS
encoders, clip_groups = mlm.encoders, mlm.clip_groups
scores, sentence_scores, headline = rtd.detection_scores, rtd.sentence_scores, rtd.headline


def problems(run: RunConfig) -> list[str]:
    needed: dict[str, str | dict[str, str]] = {
        f"data.sources[{number}].replaced (of {source.path})": source.replaced
        for number, source in enumerate(run.data.sources)}
    if run.data.heldout:
        needed["data.heldout_replaced"] = run.data.heldout_replacements
    return [f'{key} is empty; objective.kind = "rtd_cached" needs what data_prep/replace.py makes'
            for key, value in needed.items() if not value]


class CachedRtdModel(nn.Module):
    """The discriminator with a token embedding of its own."""

    def __init__(self, config: ModelConfig, rtd_weight: float):
        super().__init__()
        self.rtd_weight = rtd_weight
        self.discriminator = rtd.Discriminator(config, "nes")

    def forward(self, batch, normalizers: Tensors) -> tuple[Tensor, Tensors, Tensors]:
        """Return (lambda L_D, sums over this batch, per-token tensors as in `objectives.rtd`).

        The batch's tokens are replaced already; its labels mark where.
        """
        replaced_BL, real_BL = batch.labels >= 0, batch.segments > 0
        logits_BL = self.discriminator(None, batch.input_ids, batch)
        sums, per_token = rtd.detection(logits_BL, replaced_BL, real_BL, self.training)
        return _loss(sums, normalizers, self.rtd_weight), {
            name: value.detach() for name, value in sums.items()}, per_token


def _loss(sums: dict, normalizers: dict, rtd_weight: float) -> Tensor | float:
    return rtd_weight * sums["discriminator_loss"] / normalizers["tokens"]


def build(run: RunConfig, valid_vocab: int | None) -> CachedRtdModel:
    return CachedRtdModel(run.model, run.objective.rtd_weight)


def flops_per_token(run: RunConfig) -> float:
    return 3 * flops.detector(run.model, run.data.seq_len)


def means(run: RunConfig, total: Numbers) -> Numbers:
    return {"loss": _loss(total, total, run.objective.rtd_weight)} | rtd.detection_means(total)


def networks(run: RunConfig, state: Tensors) -> tuple[dict[str, Tensors], list[str]]:
    return {"main": base.network_tensors(state, "discriminator.", "rtd_")}, []


def parameters(run: RunConfig, networks: dict[str, Tensors]) -> tuple[Tensors, list[str]]:
    main = networks["main"]
    return rtd.discriminator_parameters(main) | {
        "discriminator.words.weight": main["words.weight"]}, []
