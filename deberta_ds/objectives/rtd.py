"""Replaced-token detection with gradient-disentangled embedding sharing (DeBERTaV3).

In the order of the paper: mask -> generator -> sample -> discriminator, in one forward that returns
one loss, L_G + lambda L_D: the form that is exact under every ZeRO stage. The discriminator's loss
reaches the generator's table only under "es"; under "gdes" it trains a delta of its own.

See `objectives.base` for what the functions of this module are for.

Legend: B batch, L length, C hidden, T targets, N real tokens.
"""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.base.numbers import format_value
from deberta_ds.base.splitmix import GAMMA, mix_tensor, shift_right, signed
from deberta_ds.config import objective
from deberta_ds.config.model import decoder_problems
from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig, RunConfig
from deberta_ds.model import flops
from deberta_ds.model.backbone import ZERO_INIT
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.encoder import Trunk
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.objectives import base
from deberta_ds.objectives.base import Forward, Metric, Numbers, Tensors
from deberta_ds.objectives.mlm import SENTENCES_AT_ONCE, padded
from deberta_ds.tokenizer import Tokenizer

DETECTION_METRICS = (
    Metric("discriminator_loss", "Discriminator loss",
           "Binary cross-entropy of all tokens: original or replaced?", network="discriminator",
           baseline=("class prior", lambda r: r["discriminator_loss"] + r["discriminator_gain"]),
           is_loss=True, on_console="disc.loss"),
    Metric("discriminator_gain", "Discriminator gain",
           "How far its loss is below that of always answering with the class prior.", "gain",
           "discriminator", ("class prior", lambda r: 0.0), on_console="gain", in_tile=True),
    Metric("discriminator_accuracy", "Discriminator accuracy",
           "Share of all tokens that are told right.", "share", "discriminator",
           ("class prior", lambda r: r["prior_accuracy"])),
    Metric("roc_auc", "ROC-AUC", "Chance that a replaced token scores above an original one.",
           "number", "discriminator", ("chance", lambda r: 0.5), in_tile=True, noise=0.03),
    Metric("average_precision", "Average precision",
           "Area under the precision-recall curve of the replaced tokens.", "number",
           "discriminator", ("chance", lambda r: 1 - r["prior_accuracy"])),
)
METRICS = (*base.masked_metrics("generator", "Generator", "gen.loss"), *DETECTION_METRICS)
HEADS = {"main": "rtd_head.", "generator": "mlm_head."}
MASK_DEFAULTS = objective.MASK_DEFAULTS["rtd"]
# Six discriminators of 8 layers that 2e-3 killed: 4e-4 nats and .005 at most.
_DEAD_GAIN, _DEAD_AREA = 1e-3, 0.02


def encoders(run: RunConfig) -> dict[str, ModelConfig]:
    """The generator has the width of the discriminator and, unless told, half of its depth."""
    layers = run.objective.generator_layers or max(1, run.model.num_layers // 2)
    return {"main": run.model,
            "generator": dataclasses.replace(run.model, num_layers=layers)}


def problems(run: RunConfig) -> list[str]:
    return decoder_problems(encoders(run)["generator"].num_layers, run.model,
                            "objective.generator_layers")


class Discriminator(nn.Module):
    """The published network: encoder, detection head, and its own part of the token embedding."""

    def __init__(self, config: ModelConfig, sharing: str):
        super().__init__()
        self.sharing = sharing
        self.trunk = Trunk(config)
        self.head = ReplacedTokenHead(config)
        if sharing != "es":
            self.words = TokenEmbedding(config.vocab_size, config.hidden_size)
        if sharing == "gdes":
            setattr(self.words.weight, ZERO_INIT, True)

    def forward(self, generator_words: TokenEmbedding, input_ids_BL: Tensor, batch) -> Tensor:
        """Return logits [B, L] in fp32."""
        words = generator_words if self.sharing == "es" else self.words
        vectors_BLC = words(input_ids_BL)
        if self.sharing == "gdes":
            vectors_BLC = vectors_BLC + generator_words(input_ids_BL).detach()
        hidden_BLC = self.trunk(vectors_BLC, batch.segments, batch.positions)
        return self.head(hidden_BLC, batch.positions)


class RtdModel(nn.Module):
    """Generator and discriminator under one engine."""

    def __init__(self, config: ModelConfig, generator_config: ModelConfig,
                 objective: ObjectiveConfig, *, sampling_seed: int, valid_vocab: int | None = None):
        super().__init__()
        self.objective = objective
        self.sampling_seed = sampling_seed
        self.valid_vocab = valid_vocab
        self.words = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.generator = MaskedLm(generator_config)
        self.discriminator = Discriminator(config, objective.embedding_sharing)

    def forward(self, batch, normalizers: Tensors) -> tuple[Tensor, Tensors, Tensors]:
        """Return (L_G + lambda L_D, sums over this batch, per-token tensors).

        Per token, in evaluation only: the discriminator's logits [N] in fp32 of the real tokens,
        and which of these are replaced. A sample equal to the original counts as original.
        """
        generator_sum, num_correct, input_ids_BL = replace_targets(
            self.words, self.generator, batch, seed=self.sampling_seed,
            temperature=self._temperature(batch), valid_vocab=self.valid_vocab)
        original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
        replaced_BL, real_BL = input_ids_BL != original_BL, batch.segments > 0
        logits_BL = self.discriminator(self.words, input_ids_BL, batch)
        detected, per_token = detection(logits_BL, replaced_BL, real_BL, self.training)
        sums = {"generator_loss": generator_sum, "generator_correct": num_correct, **detected}
        loss = _loss(sums, normalizers, self.objective.rtd_weight)
        return loss, {name: value.detach() for name, value in sums.items()}, per_token

    def _temperature(self, batch) -> Tensor | float:
        """Return a number, or of a temperature that changes a scalar: a CUDA graph reads it again.
        """
        temperature = self.objective.temperature_at(batch.run_fraction)
        if self.objective.final_temperature is None or isinstance(temperature, Tensor):
            return temperature
        return torch.full((), temperature, dtype=torch.float64, device=batch.rows.device)


def replace_targets(words: TokenEmbedding, generator: MaskedLm, batch, *, seed: int,
                    temperature: Tensor | float, valid_vocab: int | None
                    ) -> tuple[Tensor, Tensor, Tensor]:
    """Return (generator loss sum, number correct, ids [B, L] with samples at the targets)."""
    columns_BM = batch.target_positions
    length, slots = batch.input_ids.size(1), columns_BM.size(1)
    rows_BM = batch.rows[:, None].expand_as(columns_BM)
    uniforms_T = token_uniforms(seed, rows_BM.flatten(), columns_BM.flatten())
    generator_sum, num_correct, sampled_T = generator(
        words, batch, uniforms_T=uniforms_T, temperature=temperature, valid_vocab=valid_vocab)
    # The sample of a slot without a target goes to a column of its own, behind the sequence.
    spare_M = torch.arange(length, length + slots, device=columns_BM.device)
    targets_BM = torch.where(batch.labels.gather(1, columns_BM) >= 0, columns_BM, spare_M)
    ids_BX = F.pad(batch.input_ids, (0, slots)).scatter(1, targets_BM,
                                                        sampled_T.view_as(columns_BM))
    return generator_sum, num_correct, ids_BX[:, :length]


def detection(logits_BL: Tensor, replaced_BL: Tensor, real_BL: Tensor, training: bool
              ) -> tuple[Tensors, Tensors]:
    """Return sums over the real tokens (loss, correct answers, replaced tokens), and in evaluation
    the tensors of the real tokens that `detection_scores` reads.
    """
    losses_BL = F.binary_cross_entropy_with_logits(
        logits_BL, replaced_BL.float(), reduction="none")
    sums = {"discriminator_loss": (losses_BL * real_BL).sum(),
            "discriminator_correct": (((logits_BL > 0) == replaced_BL) & real_BL).sum(),
            "replaced": replaced_BL.sum()}
    if training:  # which would wait for the device
        return sums, {}
    return sums, {"logits": logits_BL[real_BL], "replaced": replaced_BL[real_BL]}


def _loss(sums: dict, normalizers: dict, rtd_weight: float):
    """Return L_G + lambda L_D: the loss that is trained, and the one that is logged."""
    return sums["generator_loss"] / normalizers["targets"] \
        + rtd_weight * sums["discriminator_loss"] / normalizers["tokens"]


def build(run: RunConfig, valid_vocab: int | None) -> RtdModel:
    return RtdModel(run.model, encoders(run)["generator"], run.objective,
                    sampling_seed=run.data.seed, valid_vocab=valid_vocab)


def clip_groups(run: RunConfig) -> tuple[str, ...]:
    """Clip each network by its own norm; under "es" also the table, which both losses train."""
    own = ("discriminator.",)
    return (*own, "words.") if run.objective.embedding_sharing == "es" else own


def flops_per_token(run: RunConfig) -> float:
    length, rate = run.data.seq_len, run.objective.mask.rate_at(0.5)
    generator = flops.masked_lm(encoders(run)["generator"], length, rate)
    return 3 * (generator + flops.detector(run.model, length))


def means(run: RunConfig, total: Numbers) -> Numbers:
    return {"loss": _loss(total, total, run.objective.rtd_weight),
            "generator_loss": total["generator_loss"] / total["targets"],
            **detection_means(total)}


def detection_means(total: Numbers) -> Numbers:
    """Return what a training step logs of a discriminator."""
    loss = total["discriminator_loss"] / total["tokens"]
    return {"discriminator_loss": loss,
            "discriminator_gain": _entropy(total["replaced"] / total["tokens"]) - loss}


def scores(total: Numbers, per_token: Tensors) -> Numbers:
    return base.masked_scores(total, "generator") | detection_scores(total, per_token)


def detection_scores(total: Numbers, per_token: Tensors) -> Numbers:
    """Accuracy means little here (most tokens are original), so it is shown with the class prior,
    the gain over it in nats, ROC-AUC and average precision.
    """
    prior = total["replaced"] / total["tokens"]
    loss = total["discriminator_loss"] / total["tokens"]
    found = {
        "discriminator_loss": loss,
        "discriminator_accuracy": total["discriminator_correct"] / total["tokens"],
        "prior_accuracy": max(prior, 1 - prior),
        "discriminator_gain": _entropy(prior) - loss}
    if 0 < prior < 1 and math.isfinite(loss):  # the two areas need both classes
        found["roc_auc"], found["average_precision"] = areas(
            per_token["replaced"].numpy(), per_token["logits"].numpy())
    return found


def areas(labels: np.ndarray, logits: np.ndarray) -> tuple[float, float]:
    """Return ROC-AUC and average precision, which need both classes; equal logits are one step."""
    order = np.argsort(-logits, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(logits[order])), len(order) - 1)
    hits = np.cumsum(labels[order], dtype=np.float64)[ends]
    found, false = np.diff(hits, prepend=0), np.diff(1 + ends - hits, prepend=0)
    area = float(((hits - found / 2) * false).sum() / (hits[-1] * false.sum()))
    return area, float((found * hits / (1 + ends)).sum() / hits[-1])


def _entropy(prior: float) -> float:
    """Return the loss in nats of always answering with the class prior."""
    if prior <= 0 or prior >= 1:
        return 0.0
    return -prior * math.log(prior) - (1 - prior) * math.log(1 - prior)


def sentence_scores(forward: Forward, sentences: list[list[int]], tokenizer: Tokenizer
                    ) -> list[float]:
    """log p(no token was replaced), from the discriminator's logits of the unmasked sentence."""
    found = []
    for start in range(0, len(sentences), SENTENCES_AT_ONCE):
        some = sentences[start:start + SENTENCES_AT_ONCE]
        logits_N = forward(padded(some, tokenizer))[1]["logits"]
        for logits in logits_N.split([len(ids) for ids in some]):
            found.append(float(F.logsigmoid(-logits[1:-1].double()).sum()))
    return found


def headline(scores: Numbers) -> str:
    text = base.masked_headline(scores, "generator", "generator")
    gain, area = scores.get("discriminator_gain"), scores.get("roc_auc")
    if gain is not None:
        verb = "beats" if gain > 0 else "does not yet beat"
        text += f" The discriminator {verb} its class prior ({format_value(gain, 'gain')} nats)"
        text += f"; its ROC-AUC is {area:.3f}." if area is not None else "."
        if area is not None and abs(gain) < _DEAD_GAIN and abs(area - 0.5) < _DEAD_AREA:
            text += (" It answers every token alike: if the learning rate's warm-up is over, it "
                     "has died; start again with a lower optim.learning_rate.")
    return text.strip()


def discriminator_parameters(tensors: Tensors) -> Tensors:
    """Return the parameters of a discriminator except its embedding: the inverse function."""
    return {"discriminator." + name.removeprefix("rtd_"): tensor
            for name, tensor in tensors.items() if name.startswith(("trunk.", "rtd_head."))}


def networks(run: RunConfig, state: Tensors) -> tuple[dict[str, Tensors], list[str]]:
    """The discriminator is merged: under gdes, its token embedding is the generator's + delta."""
    main, notes = base.network_tensors(state, "discriminator.", "rtd_"), []
    sharing = run.objective.embedding_sharing
    if sharing == "gdes":
        main["words.delta"] = main.pop("words.weight")
        main["words.weight"] = state["words.weight"].float() + main["words.delta"].float()
        notes.append("derived: discriminator's token embedding = generator's + delta, in fp32")
    elif sharing == "es":
        main["words.weight"] = state["words.weight"].clone()
        notes.append("copied: the token embedding is the generator's (sharing = es)")
    return {"main": main, "generator": base.masked_lm_tensors(state, "generator.")}, notes


def parameters(run: RunConfig, networks: dict[str, Tensors]) -> tuple[Tensors, list[str]]:
    """The GDES delta is taken from the file, or it is the difference of the two token
    embeddings.

    It is never assumed to be zero: the discriminator would silently get the generator's
    embedding. Both tables in fp32: the difference is exact.
    """
    main, generator = networks["main"], networks["generator"]
    found = base.masked_lm_parameters(generator, "generator.") | discriminator_parameters(main)
    words, sharing = main["words.weight"], run.objective.embedding_sharing
    if sharing == "es":
        return found | {"words.weight": words}, [
            "one token embedding, the discriminator's (sharing = es)"]
    if sharing == "nes":
        return found | {"discriminator.words.weight": words}, []
    if "words.delta" in main:
        return found | {"discriminator.words.weight": main["words.delta"]}, [
            "GDES delta taken from the file"]
    delta = words.float() - generator["words.weight"].float()
    return found | {"discriminator.words.weight": delta}, [
        "WARNING: the file has no GDES delta; derived as discriminator's table - generator's"]


def token_uniforms(seed: int, rows_T: Tensor, columns_T: Tensor) -> Tensor:
    """Return fp32 [T] in [0, 1) for int64 row numbers and columns.

    A hash by splitmix64, and no generator: the same on any device and at any world size. 24 bits,
    the mantissa of fp32: every value is exact and below 1.
    """
    state = torch.full_like(rows_T, seed)
    for part in (rows_T, columns_T):
        state = mix_tensor(state + part * signed(GAMMA) + signed(GAMMA))
    return shift_right(state, 64 - 24).float() * 2.0**-24
