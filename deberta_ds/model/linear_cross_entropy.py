"""Cross-entropy of a linear layer over a large vocabulary, without the logits.

Works through vocabulary chunks with a running logsumexp, and recomputes each chunk in backward, so
memory is tokens x chunk instead of tokens x vocabulary. When one chunk holds the whole vocabulary
its softmax is kept and nothing is recomputed. It can also draw one exact sample a row from the
softmax (the generator of replaced token detection) by inverting the cumulative distribution.

Shape legend: T target rows, C hidden size, V vocabulary, N ids of one chunk, K number of chunks.
"""

import math
from dataclasses import dataclass

import torch

_CHUNK_LOGITS = 1 << 24  # fp32 logits held at once when the caller names no chunk: 64 MiB


@dataclass(frozen=True)
class _Vocabulary:
    """The ids that may be predicted, [0, size), cut into chunks."""

    size: int
    chunk: int

    def spans(self) -> list[tuple[int, int]]:
        starts = range(0, self.size, self.chunk)
        return [(start, min(start + self.chunk, self.size)) for start in starts]


def linear_cross_entropy(
    hidden_TC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor,
    labels_T: torch.Tensor,
    uniforms_T: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    valid_vocab: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (loss_sum, correct_count, sampled_ids).

    loss_sum: fp32 (fp64 for fp64 input) scalar, sum over rows of -log softmax(hidden W^T + b) at
      the label; differentiable in hidden, weight and bias. T = 0 gives 0 with zero gradients.
    correct_count: int64 scalar, rows whose largest logit is at the label (lowest id wins a tie).
    sampled_ids: int64 [T], or None without `uniforms_T`. Row t gets the id where the cumulative
      softmax(logits / temperature) first exceeds uniforms_T[t] in [0, 1): an exact draw.
    chunk: vocabulary ids handled at once; None picks a size that holds 64 MiB of logits.
    valid_vocab: ids from here up are never predicted (probability 0, gradient 0).
    """
    size = weight_VC.shape[0] if valid_vocab is None else valid_vocab
    if not 0 < size <= weight_VC.shape[0]:
        raise ValueError(f"valid_vocab {size} is not in 1..{weight_VC.shape[0]}")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    device = hidden_TC.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_TC, weight_VC = hidden_TC.to(dtype), weight_VC.to(dtype)
    chunk = chunk or max(1024, _CHUNK_LOGITS // max(1, hidden_TC.shape[0]))
    return _LinearCrossEntropy.apply(
        hidden_TC,
        weight_VC,
        bias_V,
        labels_T,
        None if uniforms_T is None else _Draw(uniforms_T, temperature),
        _Vocabulary(size, min(chunk, size)),
    )


@dataclass(frozen=True)
class _Draw:
    """What a draw of one id a row needs: uniforms in [0, 1) and the softmax temperature."""

    uniforms_T: torch.Tensor
    temperature: float


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TC, weight_VC, bias_V, labels_T, draw, vocabulary):
        rows = hidden_TC.shape[0]
        compute = torch.promote_types(hidden_TC.dtype, torch.float32)
        best_T = torch.full((rows,), -math.inf, dtype=compute, device=hidden_TC.device)
        best_id_T = torch.zeros_like(labels_T)
        label_logit_T = torch.zeros_like(best_T)
        masses, draw_masses = [], []
        for start, end in vocabulary.spans():
            logits_TN = _chunk_logits(hidden_TC, weight_VC, bias_V, start, end, compute)
            top_T, top_id_T = logits_TN.max(-1)
            better_T = top_T > best_T
            best_T = torch.where(better_T, top_T, best_T)
            best_id_T = torch.where(better_T, top_id_T + start, best_id_T)
            here_T, column_T = _labels_in(labels_T, start, end)
            label_logit_T += logits_TN.gather(1, column_T[:, None])[:, 0] * here_T
            if draw is not None and draw.temperature != 1.0:
                draw_masses.append((logits_TN / draw.temperature).logsumexp(-1))
            masses.append(logits_TN.logsumexp(-1))
        log_norm_T = torch.stack(masses, -1).logsumexp(-1)
        loss_sum = (log_norm_T - label_logit_T).sum()
        correct = (best_id_T == labels_T).sum()
        whole = len(masses) == 1

        def logits_of(chosen, start, end):
            if whole:
                return logits_TN[chosen]
            return _chunk_logits(hidden_TC[chosen], weight_VC, bias_V, start, end, compute)

        sampled_T = None
        if draw is not None:
            masses_TK = torch.stack(draw_masses or masses, -1)
            sampled_T = _sample(draw, masses_TK, vocabulary, logits_of)
            ctx.mark_non_differentiable(sampled_T)
        probs_TN = None
        if whole:
            probs_TN = logits_TN.sub_(log_norm_T[:, None]).exp_().to(hidden_TC.dtype)
        ctx.save_for_backward(hidden_TC, weight_VC, bias_V, labels_T, log_norm_T, probs_TN)
        ctx.vocabulary = vocabulary
        ctx.mark_non_differentiable(correct)
        return loss_sum, correct, sampled_T

    @staticmethod
    def backward(ctx, grad_loss, _grad_correct, _grad_sampled):
        hidden_TC, weight_VC, bias_V, labels_T, log_norm_T, probs_TN = ctx.saved_tensors
        compute = log_norm_T.dtype
        grad_hidden_TC = torch.zeros_like(hidden_TC, dtype=compute)
        grad_weight_VC = torch.zeros_like(weight_VC)
        grad_bias_V = torch.zeros_like(bias_V)
        scale = grad_loss.to(compute)
        for start, end in ctx.vocabulary.spans():
            if probs_TN is None:
                logits_TN = _chunk_logits(hidden_TC, weight_VC, bias_V, start, end, compute)
                grad_TN = logits_TN.sub_(log_norm_T[:, None]).exp_()
            else:
                grad_TN = probs_TN.clone()
            here_T, column_T = _labels_in(labels_T, start, end)
            grad_TN.scatter_add_(1, column_T[:, None], -here_T[:, None].to(grad_TN.dtype))
            grad_TN = grad_TN.mul_(scale)
            grad_bias_V[start:end] = grad_TN.sum(0, dtype=compute)
            grad_TN = grad_TN.to(hidden_TC.dtype)
            grad_hidden_TC += grad_TN @ weight_VC[start:end]
            torch.mm(grad_TN.t(), hidden_TC, out=grad_weight_VC[start:end])
        return grad_hidden_TC.to(hidden_TC.dtype), grad_weight_VC, grad_bias_V, None, None, None


def _chunk_logits(hidden_TC, weight_VC, bias_V, start, end, compute) -> torch.Tensor:
    """Return the logits [T,N] of ids [start, end) in the compute dtype."""
    weight_CN = weight_VC[start:end].t()
    if hidden_TC.is_cuda and hidden_TC.dtype != compute:
        logits_TN = torch.mm(hidden_TC, weight_CN, out_dtype=compute)
    else:  # the CPU has no half-precision product with an fp32 result
        logits_TN = (hidden_TC @ weight_CN).to(compute)
    return logits_TN.add_(bias_V[start:end].to(compute))


def _labels_in(labels_T, start, end) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (is the label in this chunk, its column there or 0)."""
    here_T = (labels_T >= start) & (labels_T < end)
    return here_T, (labels_T - start).clamp(0, end - start - 1)


def _sample(draw, masses_TK, vocabulary, logits_of) -> torch.Tensor:
    """Return ids by inverse CDF: the chunk from the chunk masses, then the id inside it.

    logits_of(rows, start, end): logits of the chosen rows. float64 throughout: an fp32 cumulative
    sum over 128,000 ids would bias rare ids.
    """
    cumulative_TK = masses_TK.double().softmax(-1).cumsum(-1)
    last = cumulative_TK.shape[1] - 1
    uniforms_T1 = draw.uniforms_T.double()[:, None]
    chunk_T1 = torch.searchsorted(cumulative_TK, uniforms_T1, right=True).clamp_(max=last)
    edges_TK = torch.cat([torch.zeros_like(cumulative_TK[:, :1]), cumulative_TK], -1)
    low_T1, high_T1 = edges_TK.gather(1, chunk_T1), edges_TK.gather(1, chunk_T1 + 1)
    inside_T1 = (uniforms_T1 - low_T1) / (high_T1 - low_T1)
    chunk_T = chunk_T1[:, 0]
    sampled_T = torch.empty_like(chunk_T)
    order_T = chunk_T.argsort(stable=True)
    counts = torch.bincount(chunk_T, minlength=last + 1).tolist()  # the only device sync
    first = 0
    for (start, end), count in zip(vocabulary.spans(), counts, strict=True):
        rows = order_T[first : first + count]
        first += count
        if count:
            probs = (logits_of(rows, start, end).double() / draw.temperature).softmax(-1)
            column = torch.searchsorted(probs.cumsum(-1), inside_T1[rows], right=True)[:, 0]
            sampled_T[rows] = column.clamp_(max=end - start - 1) + start
    return sampled_T
