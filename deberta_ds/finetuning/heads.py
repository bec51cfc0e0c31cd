"""A backbone with the head of one task.

Classification is microsoft/DeBERTa's context pooler (apps/models/sequence_classification.py); WSC
pools its spans by self-attention and WiC adds [CLS] (jiant modules/span_modules.py, models.py);
tags are read off each word's first token (transformers' token classification); answers have a score
for each token to be their first or last (BERT, 4.2 and 4.3; transformers' question answering);
ReCoRD scores every mention, pooled by attention against [CLS], in one pass (apps/models/
record_qa.py). Scores of an example that was read in several windows are averaged.

The score of an answer in a text is that of its first token plus that of its last; no answer's is
twice that of [CLS], the least over the windows, as every window without the answer points there
(BERT's run_squad.py). The best answer is found exactly, not among the n best starts and ends.

Legend: R sequences, L length, C hidden, E examples, S spans, T span tokens, N classes, D answer
lengths, K slots (of answers start and end of every row).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deberta_ds.finetuning.features import FeatureBatch
from deberta_ds.model.backbone import Backbone
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import HeadKind, Task

# Scale-invariant fine-tuning: adversarial noise on normalized token embeddings.
#
# Source: microsoft/DeBERTa sift/sift.py; the DeBERTa paper, section 5. The perturbed quantity is
# what the input block normalizes (token embeddings, and positions where they are absolute), after a
# LayerNorm without parameters, detached; so without noise and step nothing changes. It stays in
# fp32 up to the encoder's input: a step of 1e-4 is lost in 16 bits. What is fixed here: a
# regression output is compared by mean squared error (not by a softmax over the batch), the chosen
# divergence shapes the final loss too, and nothing is hooked, so no tensor outlives its step. Cost
# of a step: three forward and two backward passes.
_NORM_EPS = 1e-7
NEVER = -1e30  # a score that no token has; not an infinity, whose difference to itself is NaN
BEST, START, END, MARGIN = range(4)  # the numbers of an example, see best_answers


def adversarial_divergence(score: Callable[[Tensor], Tensor], sums_RLC: Tensor,
                           clean_scores: Tensor, settings: Settings) -> Tensor:
    """Return the divergence of clean from perturbed scores, one fp32 value per example [E] or [K].

    `score` maps the input block's sums, in fp32, to scores. Gradients reach the parameters through
    both branches, and the token embedding only through the clean one (the perturbed input is
    detached).
    """
    noise, kind = settings.sift_noise, settings.sift_loss
    base_RLC = F.layer_norm(sums_RLC.detach().float(), sums_RLC.shape[-1:], eps=_NORM_EPS)
    noise_RLC = torch.randn_like(base_RLC) * noise
    noise_RLC = noise_RLC.clamp(-2 * noise, 2 * noise).requires_grad_()
    perturbed = score(base_RLC + noise_RLC)
    ascent = divergence(perturbed, clean_scores.detach(), kind).sum()
    # Only the noise gets a gradient: no parameter is touched by the ascent.
    (slope_RLC,) = torch.autograd.grad(ascent, noise_RLC)
    largest_RL1 = slope_RLC.abs().amax(-1, keepdim=True)
    step_RLC = settings.sift_step * slope_RLC / (1e-6 + largest_RL1)
    step_RLC = torch.where(slope_RLC.norm().isfinite(), step_RLC, torch.zeros_like(step_RLC))
    attacked_RLC = base_RLC + noise_RLC.detach() + step_RLC
    return divergence(score(attacked_RLC), clean_scores, kind)


def divergence(scores: Tensor, target: Tensor, kind: str) -> Tensor:
    """Return one non-negative-gradient divergence per row of `scores` against `target`, in fp32.

    [E, N] are class scores, [E, 1] a regression (always MSE), [K] independent yes/no scores.
    Cross-entropies stand for KL: the gradients are equal, the value is offset by an entropy.
    """
    if scores.ndim == 1:  # a yes/no score s is the two-class softmax of (s, 0)
        scores = torch.stack([scores, torch.zeros_like(scores)], -1)
        target = torch.stack([target, torch.zeros_like(target)], -1)
    if kind == "mse" or scores.size(-1) == 1:
        columns = (target > NEVER).sum(-1)  # not those of a longer neighbor in the batch
        return (scores - target).square().sum(-1) / columns
    log_p, log_t = scores.log_softmax(-1), target.log_softmax(-1)
    forward = -(log_t.detach().exp() * log_p).sum(-1)
    if kind == "kl":
        return forward
    return forward - (log_p.detach().exp() * log_t).sum(-1)


class TaskOutput(NamedTuple):
    """`loss_sum` adds up the examples' losses times their weights; `scores` are [E, N], of
    mentions [K], of tags [K, N], of answers [E, 4] as `best_answers` returns them (in training
    [K, L]).

    `adversarial_sum` is SiFT's part of the loss before its weight, 0 without.
    """

    loss_sum: Tensor
    scores: Tensor
    adversarial_sum: Tensor


class TaskModel(nn.Module):
    """`backbone` and `head` of `task`; forward takes a FeatureBatch."""

    def __init__(self, task: Task, backbone: Backbone, settings: Settings):
        super().__init__()
        self.backbone = backbone
        self.head = build_head(task, backbone.config.hidden_size, settings)
        self.settings = settings
        self.kind = task.head

    def forward(self, batch: FeatureBatch) -> TaskOutput:
        """Return summed fp32 loss and fp32 scores.

        In training with SiFT, the loss has the adversarial divergence times its weight added.
        """
        sums_RLC = self.sums(batch)
        scores = self.scores(sums_RLC, batch)
        loss = loss_sum(self.kind, scores, batch)
        adversarial = torch.zeros_like(loss)
        if self.training and self.settings.sift_weight > 0:
            # Of every row of `scores`; of several labels, of every score.
            flat = torch.flatten if self.kind == "multilabel" else lambda values: values
            parts = adversarial_divergence(
                lambda attacked_RLC: flat(self.scores(attacked_RLC, batch)), sums_RLC, flat(scores),
                self.settings)
            adversarial = (by_example(self.kind, parts, batch) * batch.weights_E).sum()
            loss = loss + self.settings.sift_weight * adversarial
        if self.kind == "answer" and not self.training:
            scores = best_answers(scores.detach(), batch, self.settings.max_answer_tokens)
        return TaskOutput(loss, scores, adversarial.detach())

    def sums(self, batch: FeatureBatch) -> Tensor:
        """Return what the input block normalizes: token embeddings (+ absolute positions)."""
        tokens_RLC = self.backbone.words(batch.input_ids_RL)
        columns_RL = torch.arange(tokens_RLC.size(1), device=tokens_RLC.device)
        positions_RL = columns_RL.expand(tokens_RLC.shape[:2])
        return self.backbone.trunk.input.add_positions(tokens_RLC, positions_RL)

    def scores(self, sums_RLC: Tensor, batch: FeatureBatch) -> Tensor:
        """Return the fp32 scores for given `sums` (adversarial training perturbs them)."""
        hidden_RLC = self.backbone.trunk.encode(sums_RLC, batch.segments_RL,
                                                cls_only=reads_first_only(self.head))
        return self.head(hidden_RLC, batch).float()


def reads_first_only(head: nn.Module) -> bool:
    """Return whether a head reads no state but that of [CLS]; no other is computed then."""
    return isinstance(head, ClassifyHead)


def build_head(task: Task, hidden_size: int, settings: Settings) -> nn.Module:
    """Return the head of `task`, not yet initialized."""
    dropout, num_labels = settings.head_dropout, len(task.labels)
    match task.head:
        case "choice":
            return ClassifyHead(hidden_size, 1, dropout, choices=num_labels)
        case "tags":
            return TagHead(hidden_size, num_labels, dropout)
        case "answer":
            return AnswerHead(hidden_size, dropout)
        case "mentions":
            return MentionHead(hidden_size, dropout)
        case "words" | "spans":
            return SpanPairHead(hidden_size, num_labels, dropout, with_cls=task.head == "words")
    return ClassifyHead(hidden_size, num_labels, dropout,
                        largest=settings.truncation == "windows_max")


def loss_sum(kind: HeadKind, scores: Tensor, batch: FeatureBatch) -> Tensor:
    """Return the sum over examples of their loss times their weight.

    Cross-entropy; of a number the squared error; of labels, mentions, tags, or the starts and ends
    of an answer in every window, the mean of theirs.
    """
    labels = batch.labels_E
    if kind == "regress":
        losses = (scores[:, 0] - labels.float()).square()
    elif kind == "multilabel":
        losses = F.binary_cross_entropy_with_logits(scores, labels.float(), reduction="none")
    elif kind == "mentions":
        losses = F.binary_cross_entropy_with_logits(scores, batch.slot_labels_K, reduction="none")
    else:
        targets = batch.slot_labels_K.long() if kind in ("tags", "answer") else labels
        losses = F.cross_entropy(scores, targets, reduction="none", ignore_index=-1)
    return (by_example(kind, losses, batch) * batch.weights_E).sum()


def by_example(kind: HeadKind, values: Tensor, batch: FeatureBatch) -> Tensor:
    """Return the mean of `values` over what an example has several of: labels, mentions, slots."""
    num_examples = batch.weights_E.numel()
    if kind in ("tags", "mentions", "answer"):
        return mean_by(values, batch.slot_example_K, num_examples)
    return values.view(num_examples, -1).mean(-1)


def mean_by(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the mean of `values` (first dimension) in each group; every group has a member."""
    sums = values.new_zeros(num_groups, *values.shape[1:]).index_add(0, group, values)
    counts = torch.bincount(group, minlength=num_groups).to(values.dtype)
    return sums / counts.view(-1, *[1] * (values.ndim - 1))


NO_CHOICE = -1e4  # score of a choice that an example has not: a probability of zero, in fp16 too


class ClassifyHead(nn.Module):
    """Scores per example, averaged over windows or the `largest`; with `choices`, one score for
    each of up to so many sequences, and NO_CHOICE behind."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float, choices: int = 0,
                 largest: bool = False):
        super().__init__()
        self.choices, self.largest = choices, largest
        # The official context pooler; its configuration for SuperGLUE has no dropout before it.
        self.pooler = nn.Sequential(OrderedDict(
            dense=nn.Linear(hidden_size, hidden_size), gelu=nn.GELU()))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, hidden_RLC: Tensor, batch: FeatureBatch) -> Tensor:
        scores_RN = self.classifier(self.dropout(self.pooler(hidden_RLC[:, 0])))
        num_examples = batch.weights_E.numel()
        if self.choices:  # the rows of an example are alternatives
            counts_E = torch.bincount(batch.example_R, minlength=num_examples)
            first_R = (counts_E.cumsum(0) - counts_E)[batch.example_R]
            columns_R = torch.arange(len(first_R), device=first_R.device) - first_R
            scores_EN = scores_RN.new_full((num_examples, self.choices), NO_CHOICE)
            return scores_EN.index_put((batch.example_R, columns_R), scores_RN[:, 0])
        if self.largest:
            group_RN = batch.example_R[:, None].expand_as(scores_RN)
            return scores_RN.new_zeros(num_examples, scores_RN.size(1)).scatter_reduce(
                0, group_RN, scores_RN, "amax", include_self=False)
        return mean_by(scores_RN, batch.example_R, num_examples)


def span_tokens(hidden_RLC: Tensor, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
    """Return the states of every span's tokens [S, T, C] and which of them are real [S, T]."""
    steps_T = torch.arange(batch.longest_span, device=hidden_RLC.device)
    columns_ST = batch.span_start_S[:, None] + steps_T
    real_ST = columns_ST < batch.span_end_S[:, None]
    columns_ST = columns_ST.clamp(max=hidden_RLC.size(1) - 1)
    return hidden_RLC[batch.span_row_S[:, None], columns_ST], real_ST


def attend_spans(tokens_STC: Tensor, scores_ST: Tensor, real_ST: Tensor) -> Tensor:
    """Return the softmax-weighted mean of each span's tokens, [S, C]; softmax in fp32."""
    weights_ST = scores_ST.float().masked_fill(~real_ST, float("-inf")).softmax(-1)
    return torch.einsum("st,stc->sc", weights_ST.to(tokens_STC.dtype), tokens_STC)


class SpanPairHead(nn.Module):
    """Two spans -> one label: self-attentive pooling, [s1; s2] (+ [CLS]) -> linear."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float, with_cls: bool):
        super().__init__()
        self.with_cls = with_cls
        self.attention = nn.Linear(hidden_size, 1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size * (3 if with_cls else 2), num_labels)

    def forward(self, hidden_RLC: Tensor, batch: FeatureBatch) -> Tensor:
        tokens_STC, real_ST = span_tokens(hidden_RLC, batch)
        pooled_SC = attend_spans(tokens_STC, self.attention(tokens_STC).squeeze(-1), real_ST)
        parts = pooled_SC.view(batch.weights_E.numel(), -1)
        if self.with_cls:
            parts = torch.cat([hidden_RLC[:, 0], parts], dim=-1)
        return self.classifier(self.dropout(parts))


class TagHead(nn.Module):
    """One label per word, from its first token; averaged over the windows that show it."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, hidden_RLC: Tensor, batch: FeatureBatch) -> Tensor:
        words_SC = hidden_RLC[batch.span_row_S, batch.span_start_S]
        scores_SN = self.classifier(self.dropout(words_SC))
        return mean_by(scores_SN, batch.span_slot_S, batch.slot_example_K.numel())


class AnswerHead(nn.Module):
    """Scores [K, L] of every token of a row to be the first (even K) or last of the answer; fp32.

    [CLS] stands for "not in this row"; the question and padding are out of the question.
    """

    def __init__(self, hidden_size: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, 2)

    def forward(self, hidden_RLC: Tensor, batch: FeatureBatch) -> Tensor:
        scores_RL2 = self.classifier(self.dropout(hidden_RLC)).float()
        columns_L = torch.arange(hidden_RLC.size(1), device=hidden_RLC.device)
        context_RL = columns_L >= batch.span_start_S[:, None]
        context_RL = context_RL & (columns_L < batch.span_end_S[:, None]) | (columns_L == 0)
        scores_R2L = scores_RL2.masked_fill(~context_RL[..., None], NEVER).transpose(1, 2)
        return scores_R2L.flatten(0, 1)


def best_answers(scores_KL: Tensor, batch: FeatureBatch, max_answer_tokens: int) -> Tensor:
    """Return [E, 4]: the best answer's score, its characters [start, end) in its text, and by how
    much no answer scores more than it."""
    starts_RL, ends_RL = scores_KL[0::2], scores_KL[1::2]
    none_R = starts_RL[:, 0] + ends_RL[:, 0]
    starts_RL = starts_RL.index_fill(1, torch.zeros_like(batch.example_R[:1]), 2 * NEVER)
    length, device = starts_RL.size(1), starts_RL.device
    found = [(starts_RL[:, : length - more] + ends_RL[:, more:]).max(-1)
             for more in range(min(max_answer_tokens, length))]
    best_R, more_R = torch.stack([best.values for best in found], -1).max(-1)
    firsts_RD = torch.stack([best.indices for best in found], -1)
    first_R = firsts_RD.gather(1, more_R[:, None])[:, 0]

    num_examples, rows_R = batch.weights_E.numel(), torch.arange(len(best_R), device=device)

    def of_examples(start, values_R: Tensor, how: str) -> Tensor:
        whole_E = values_R.new_full((num_examples,), start)
        return whole_E.scatter_reduce(0, batch.example_R, values_R, how)

    best_E = of_examples(-torch.inf, best_R, "amax")
    is_best_R = best_R == best_E[batch.example_R]
    last = len(best_R) - 1  # of NaN, none is the best
    row_E = of_examples(last, rows_R.where(is_best_R, last), "amin")
    first_E, more_E = first_R[row_E], more_R[row_E]
    begin_E = batch.characters_RL2[row_E, first_E, 0]
    end_E = batch.characters_RL2[row_E, first_E + more_E, 1]
    margin_E = of_examples(torch.inf, none_R, "amin") - best_E
    return torch.stack([best_E, begin_E.to(best_E), end_E.to(best_E), margin_E], -1)


class MentionHead(nn.Module):
    """One score per entity mention, averaged over the windows that show it."""

    def __init__(self, hidden_size: int, dropout: float):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, 1)

    def forward(self, hidden_RLC: Tensor, batch: FeatureBatch) -> Tensor:
        tokens_STC, real_ST = span_tokens(hidden_RLC, batch)
        cls_SC = hidden_RLC[batch.span_row_S, 0]
        scores_ST = torch.einsum("stc,sc->st", tokens_STC, cls_SC) / cls_SC.size(-1) ** 0.5
        pooled_SC = attend_spans(tokens_STC, scores_ST, real_ST)
        scores_S = self.classifier(self.dropout(F.gelu(self.dense(pooled_SC)))).squeeze(-1)
        return mean_by(scores_S, batch.span_slot_S, batch.slot_example_K.numel())
