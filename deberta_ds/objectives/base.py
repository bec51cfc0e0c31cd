"""What an objective is: everything that differs between masked LM and replaced-token detection.

An objective is a module with the attributes and functions of `Objective`; `build.objective_of(run)`
finds it by its kind, or loads it from your own file. The rest asks the module: the planner
asks for FLOPs, the training loop for means, evaluation for scores, console and report for what to
show, model files for the networks inside a state dict. docs/how-to/extend.md: files of a new one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.data.rows import Batch
from deberta_ds.tokenizer import Tokenizer

Tensors = dict[str, Tensor]
Numbers = dict[str, float]
Forward = Callable[[Batch], tuple[Tensors, Tensors]]  # a batch -> sums, per-token tensors


@dataclass(frozen=True)
class Metric:
    """A number of metrics.jsonl as people see it: a chart and a table column of the page."""

    key: str  # in the records of metrics.jsonl
    title: str
    note: str  # one sentence under the title of its chart
    unit: str = "number"  # number, share, gain (signed), tenths
    network: str = "model"  # whose number it is: a group of columns and a color
    # The baseline: a label, and its value in an evaluation's record (KeyError: unknown).
    baseline: tuple[str, Callable[[dict], float]] | None = None
    is_loss: bool = False  # logged at training steps too, drawn among the losses
    lower_is_better: bool = False  # as of every loss
    on_console: str = ""  # its column title at training steps; empty: none
    in_tile: bool = False  # among the numbers at the top of the page
    noise: float = 0.0  # a score this near to its baseline is neither ahead nor behind

    @property
    def short_title(self) -> str:
        """The title without the network's name, for where that stands above or next to it."""
        first, _, rest = self.title.partition(" ")
        return rest.capitalize() if rest and first.lower().startswith(self.network) else self.title

    def is_better(self, value: float, than: float) -> bool:
        """Return whether one value of the metric is better than another."""
        return value < than if self.is_loss or self.lower_is_better else value > than

    def baseline_of(self, record: dict) -> float | None:
        """Return the baseline's value in an evaluation's record; None where it is not known."""
        try:
            known = {key: value for key, value in record.items() if value is not None}
            return self.baseline[1](known) if self.baseline else None
        except KeyError:
            return None


# Measured next to an objective's own scores where a run asks for it.
MINIMAL_PAIRS = Metric(
    "minimal_pairs", "Minimal pairs",
    "Share of sentence pairs whose grammatical one is the more probable; of 200 pairs, within 7 "
    "points.", "share", "grammar",
    ("chance", lambda record: 0.5), in_tile=True, noise=0.07)


class Objective(Protocol):
    """The functions of an objective's module, in the order in which a run meets them.

    Its model's `forward(batch, normalizers)` returns (loss to backpropagate, {name: detached sum
    over the batch}, {name: flat detached tensor with a value per token, for `scores`}).
    `normalizers` are the denominators of the sums: the numbers of "targets" and of "tokens" in the
    whole step, so that the loss is the exact mean over a step at any world size and micro-batch.
    """

    METRICS: tuple[Metric, ...]
    # {network: prefix of the head it needs}, under the names of model files; "main" is published.
    HEADS: dict[str, str]
    # What [objective.mask] leaves open; a module without it gets the defaults of MaskConfig.
    # MASK_DEFAULTS: dict[str, int | float]
    # inputs(run, known) -> list of training.inputs.Input, of one that reads stored data besides the
    # corpora, which are known["corpora"].value: it has `locate` for the `rows` of a batch.

    def encoders(self, run: RunConfig) -> dict[str, ModelConfig]:
        """Return the shape of every network, by the names in HEADS."""

    def problems(self, run: RunConfig) -> list[str]:
        """Return what is wrong with the run for this objective."""

    def build(self, run: RunConfig, valid_vocab: int | None) -> nn.Module:
        """Return the uninitialized model; ids from `valid_vocab` on are outside every softmax."""

    def clip_groups(self, run: RunConfig) -> tuple[str, ...]:
        """Return prefixes of parameters; the gradient of each group is clipped by its own norm."""

    def flops_per_token(self, run: RunConfig) -> float:
        """Return forward + backward FLOPs per token of a step (`model.flops` has the parts)."""

    def means(self, run: RunConfig, total: Numbers) -> Numbers:
        """Return what a training step logs, from sums and the counts "targets" and "tokens"."""

    def scores(self, total: Numbers, per_token: Tensors) -> Numbers:
        """Return an evaluation's scores, from sums, counts and concatenated `per_token`."""

    def sentence_scores(self, forward: Forward, sentences: list[list[int]], tokenizer: Tokenizer
                        ) -> list[float]:
        """Return how probable each sentence, [CLS] ... [SEP], is to the network that is kept.

        The number of calls of `forward` must follow from the number of sentences alone, because
        under ZeRO-3 all ranks take part in each.
        """

    def headline(self, scores: Numbers) -> str:
        """Return in a sentence what an evaluation's record says was learned."""

    def networks(self, run: RunConfig, state: Tensors) -> tuple[dict[str, Tensors], list[str]]:
        """Return each network's tensors under the names of model files, and notes on them."""

    def parameters(self, run: RunConfig, networks: dict[str, Tensors]) -> tuple[Tensors, list[str]]:
        """Return first values of the model's parameters from networks read from files, and notes.

        Parameters that are not named start at random.
        """


def masked_scores(total: Numbers, network: str) -> Numbers:
    """Return the scores of a masked LM's sums, for the metrics `masked_metrics(network)`."""
    loss = total[f"{network}_loss"] / total["targets"]
    return {f"{network}_loss": loss,
            f"{network}_accuracy": total[f"{network}_correct"] / total["targets"],
            f"{network}_perplexity": math.exp(min(loss, 700.0))}


def masked_metrics(network: str, title: str, on_console: str) -> tuple[Metric, ...]:
    """Return how the numbers of a masked LM are shown, whose keys begin with `network`."""
    return (
        Metric(f"{network}_loss", f"{title} loss", "Cross-entropy of the masked tokens, in nats.",
               network=network, is_loss=True, on_console=on_console),
        Metric(f"{network}_accuracy", f"{title} accuracy",
               "Share of the masked tokens that the first guess names.", "share", network,
               ("unigram", lambda record: record["unigram_accuracy"]), in_tile=True),
        Metric(f"{network}_perplexity", f"{title} perplexity", "exp of the loss.", "tenths",
               network, lower_is_better=True))


def masked_headline(scores: Numbers, network: str, who: str) -> str:
    """Return a masked LM's accuracy next to that of always guessing the most frequent token."""
    accuracy, unigram = scores.get(f"{network}_accuracy"), scores.get("unigram_accuracy")
    if accuracy is None or unigram is None:
        return ""
    return (f"On held-out text the {who} names {accuracy:.1%} of the masked tokens; always "
            f"guessing the most frequent one would name {unigram:.1%}.")


def network_tensors(state: Tensors, prefix: str, head: str) -> Tensors:
    """Return the tensors below `prefix`, which ends with a dot, under the names of model files."""
    names = {name: name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    return {head + short if short.startswith("head.") else short: state[name]
            for name, short in names.items()}


def masked_lm_tensors(state: Tensors, prefix: str) -> Tensors:
    """Return a masked LM's tensors under the names of model files."""
    return {"words.weight": state["words.weight"]} | network_tensors(state, prefix, "mlm_")


def masked_lm_parameters(tensors: Tensors, prefix: str) -> Tensors:
    """Return the parameters of a masked LM in a model: the inverse of `masked_lm_tensors`."""
    return {"words.weight": tensors["words.weight"]} | {
        prefix + name.removeprefix("mlm_"): tensor for name, tensor in tensors.items()
        if name.startswith(("trunk.", "mlm_head.", "positions.weight"))}
