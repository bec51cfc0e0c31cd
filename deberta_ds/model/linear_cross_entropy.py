"""Cross-entropy of a linear layer over a large vocabulary, without the logits.

Works through chunks of the vocabulary, in buffers that all chunks share. With few target rows the
matmul of each chunk is saved for backward; with many it is recomputed there, so memory is tokens x
chunk instead of tokens x vocabulary. Under autocast a chunk of the embedding is cast when it is
used: no half-precision copy of the whole embedding, nor of its gradient, is ever made. It can also
take one exact sample per row from the softmax (the generator of replaced token detection) by
inverting the cumulative distribution.

Shape legend: T target rows, C hidden size, V vocabulary, N ids of one chunk, K number of chunks.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds.model.precision import matmul_dtype

# fp32 logits held at once when the caller names no chunk: on the CPU 2 MiB, which stay in cache.
_CPU_CHUNK_LOGITS, _CHUNK_LOGITS = 1 << 19, 1 << 24
_ALIGNED_IDS = 128
IGNORE = -100  # the label of a row that counts for nothing
_SUM_BLOCK = 64
_SAVED_LOGITS = 1 << 26  # up to this many products (256 MiB of fp32) are saved for backward


Spans = list[tuple[int, int]]  # [start, end) of each chunk of the ids that may be predicted


def linear_cross_entropy(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, labels_T: Tensor,
                         uniforms_T: Tensor | None = None, temperature: Tensor | float = 1.0,
                         chunk: int | None = None, valid_vocab: int | None = None
                        ) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (loss_sum, correct_count, sampled_ids).

    loss_sum: fp32 (fp64 for fp64 input) scalar, sum over rows of -log softmax(hidden W^T + b) at
      the label; differentiable in hidden, weight and bias. T = 0 gives 0 with zero gradients.
      Rows with the label -100 count for nothing.
    correct_count: int64 scalar, rows whose largest logit is at the label (lowest id wins a tie).
    sampled_ids: int64 [T], or None without `uniforms_T`. Row t gets the id where the cumulative
      softmax(logits / temperature) first exceeds uniforms_T[t] in [0, 1): an exact sample.
    chunk: vocabulary ids handled at once; None: a size for the device.
    labels_T: ids below valid_vocab, or -100. ValueError for others on a CPU; a GPU would have to be
      waited for, and training data were checked when they were read.
    temperature: a number, or a scalar tensor on the device.
    valid_vocab: ids from here up are never predicted (probability 0, gradient 0).
    """
    size = count_predicted(weight_VC, valid_vocab)
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if labels_T.is_cpu:
        check_labels(labels_T, size)
    hidden_TC = hidden_TC.to(matmul_dtype(hidden_TC))
    chunk = chunk or chunk_for(hidden_TC.shape[0], hidden_TC.device.type)
    spans = [(start, min(start + chunk, size)) for start in range(0, size, chunk)]
    return _LinearCrossEntropy.apply(
        hidden_TC, weight_VC, bias_V, labels_T, uniforms_T, temperature, spans)


def count_predicted(weight_VC: Tensor, valid_vocab: int | None) -> int:
    """Return how many ids may be predicted."""
    size = weight_VC.shape[0] if valid_vocab is None else valid_vocab
    if not 0 < size <= weight_VC.shape[0]:
        raise ValueError(f"valid_vocab {size} is not in 1..{weight_VC.shape[0]}")
    return size


def check_labels(labels_T: Tensor, size: int) -> None:
    """Raise ValueError for a label that cannot be predicted: its loss would look like any other."""
    if type(labels_T) is not Tensor or torch.compiler.is_compiling():
        return  # a traced tensor has no numbers
    labels_T = labels_T[labels_T != IGNORE]
    if not labels_T.numel():
        return
    low, high = (int(label) for label in labels_T.aminmax())
    if not 0 <= low <= high < size:
        raise ValueError(f"labels {low}..{high} are not all in 0..{size - 1}, the ids that may be "
                         "predicted; leave tokens without a label out, and use the tokenizer that "
                         "the model was made for")


def chunk_for(rows: int, device: str) -> int:
    """Return how many ids to handle at once."""
    if device == "cpu":
        return max(1024, _CPU_CHUNK_LOGITS // max(1, rows))
    # A GPU's products of other widths take an unaligned path, several times slower.
    return max(1024, _CHUNK_LOGITS // max(1, rows) // _ALIGNED_IDS * _ALIGNED_IDS)


class _Logits:
    """The logits of one chunk at a time, in buffers that all chunks share."""

    def __init__(self, hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, chunk: int):
        self.hidden_TC, self._weight_VC, self._bias_V = hidden_TC, weight_VC, bias_V
        rows, size = hidden_TC.shape
        self.dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        self._buffer = hidden_TC.new_empty(rows * chunk, dtype=self.dtype)
        same_dtype = hidden_TC.dtype == weight_VC.dtype
        self.cast_NC = None if same_dtype else hidden_TC.new_empty(chunk, size)

    def weight(self, start: int, end: int) -> Tensor:
        """Return the table's rows [N,C] in the dtype of `hidden`, valid until the next call."""
        part_NC = self._weight_VC[start:end]
        return part_NC if self.cast_NC is None else self.cast_NC[: end - start].copy_(part_NC)

    def products(self, weight_NC: Tensor) -> Tensor:
        """Return new [T,N]."""
        return wide_product(self.hidden_TC, weight_NC.t())

    def of(self, products_TN: Tensor, start: int, end: int) -> Tensor:
        """Return the logits [T,N] in the wide dtype, to be worked on in place."""
        rows = self.hidden_TC.shape[0]
        logits_TN = self._buffer[: rows * (end - start)].view(rows, end - start)
        return torch.add(products_TN, self._bias_V[start:end].to(self.dtype), out=logits_TN)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, in fp32 at least; of 16 bits on a CPU, which has no such product."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TC, weight_VC, bias_V, labels_T, uniforms_T, temperature, spans):
        (_, chunk), (_, size) = spans[0], spans[-1]
        logits = _Logits(hidden_TC, weight_VC, bias_V, chunk)
        rows = hidden_TC.shape[0]
        max_logit_T = torch.full((rows,), -math.inf, dtype=logits.dtype, device=hidden_TC.device)
        argmax_T = torch.zeros_like(labels_T)
        label_logit_T = torch.zeros_like(max_logit_T)
        save = rows * size <= _SAVED_LOGITS
        separate = uniforms_T is not None and (isinstance(temperature, Tensor)
                                               or temperature != 1.0)
        chunk_lse, sample_lse, saved = [], [], []
        for start, end in spans:
            products_TN = logits.products(logits.weight(start, end))
            if save:
                saved.append(products_TN)
            logits_TN = logits.of(products_TN, start, end)
            max_T, max_id_T = logits_TN.max(-1)
            better_T = max_T > max_logit_T
            max_logit_T = torch.where(better_T, max_T, max_logit_T)
            argmax_T = torch.where(better_T, max_id_T + start, argmax_T)
            here_T, column_T = _labels_in(labels_T, start, end)
            label_logit_T += logits_TN.gather(1, column_T[:, None])[:, 0] * here_T
            if separate:
                sample_lse.append((logits_TN / temperature).logsumexp(-1))
            chunk_lse.append(logits_TN.sub_(max_T[:, None]).exp_().sum(-1).log_().add_(max_T))
        log_norm_T = torch.stack(chunk_lse, -1).logsumexp(-1)
        loss_sum = sum_of_targets(log_norm_T - label_logit_T, labels_T)
        correct = (argmax_T == labels_T).sum()

        def logits_of(number, some):
            start, end = spans[number]
            subset = _Logits(hidden_TC[some], weight_VC, bias_V, chunk)
            products = saved[number][some] if save else subset.products(subset.weight(start, end))
            return subset.of(products, start, end)

        sampled_T = None
        if uniforms_T is not None:
            lse_TK = torch.stack(sample_lse or chunk_lse, -1)
            sampled_T = _sample(uniforms_T, temperature, lse_TK, spans, logits_of)
            ctx.mark_non_differentiable(sampled_T)
        ctx.save_for_backward(hidden_TC, weight_VC, bias_V, labels_T, log_norm_T, *saved)
        ctx.spans = spans
        ctx.mark_non_differentiable(correct)
        return loss_sum, correct, sampled_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_correct, _grad_sampled):
        hidden_TC, weight_VC, bias_V, labels_T, log_norm_T, *saved = ctx.saved_tensors
        (_, chunk), (_, size) = ctx.spans[0], ctx.spans[-1]
        logits = _Logits(hidden_TC, weight_VC, bias_V, chunk)
        grad_hidden_TC = torch.zeros_like(hidden_TC, dtype=logits.dtype)
        # Zeros would touch every page of the largest tensor of a step once more.
        grad_weight_VC = torch.empty_like(weight_VC)
        grad_bias_V = torch.empty_like(bias_V)
        grad_weight_VC[size:] = 0
        grad_bias_V[size:] = 0
        scale_T1 = torch.where(labels_T >= 0, grad_loss.to(logits.dtype), 0.0)[:, None]
        for number, (start, end) in enumerate(ctx.spans):
            weight_NC = logits.weight(start, end)
            products_TN = saved[number] if saved else logits.products(weight_NC)
            grad_TN = logits.of(products_TN, start, end).sub_(log_norm_T[:, None]).exp_()
            here_T, column_T = _labels_in(labels_T, start, end)
            grad_TN.scatter_add_(1, column_T[:, None], -here_T[:, None].to(grad_TN.dtype))
            grad_TN.mul_(scale_T1)
            grad_bias_V[start:end] = grad_TN.sum(0)
            grad_TN = grad_TN.to(hidden_TC.dtype)
            grad_hidden_TC += grad_TN @ weight_NC
            if not ctx.needs_input_grad[1]:  # a frozen table
                continue
            if logits.cast_NC is None:
                torch.mm(grad_TN.t(), hidden_TC, out=grad_weight_VC[start:end])
            else:  # the cast rows are not needed any more: their buffer takes the matmul
                product_NC = torch.mm(grad_TN.t(), hidden_TC, out=logits.cast_NC[: end - start])
                grad_weight_VC[start:end] = product_NC
        grad_hidden_TC = grad_hidden_TC.to(hidden_TC.dtype)
        return grad_hidden_TC, grad_weight_VC, grad_bias_V, None, None, None, None


def sum_of_targets(losses_T: Tensor, labels_T: Tensor) -> Tensor:
    """Return the sum over rows that have a label, whatever the others hold."""
    return torch.where(labels_T >= 0, losses_T, 0.0).sum()


def _labels_in(labels_T, start, end) -> tuple[Tensor, Tensor]:
    """Return (is the label in this chunk, its column there or 0)."""
    here_T = (labels_T >= start) & (labels_T < end)
    return here_T, (labels_T - start).clamp(0, end - start - 1)


def _sample(uniforms_T: Tensor, temperature: Tensor | float, lse_TK: Tensor, spans: Spans,
            logits_of: Callable) -> Tensor:
    """Return ids by inverse CDF: the chunk by its probability, then the id inside it.

    logits_of(number, rows): logits of some rows in one chunk. float64 throughout: an fp32
    cumulative sum over 128,000 ids would bias rare ids.
    """
    chunk_T, inside_T = sample_chunks(lse_TK, uniforms_T)
    sampled_T = torch.zeros_like(chunk_T)
    for number, (start, end) in enumerate(spans):
        here_T = chunk_T == number
        rows = rows_to_sample(here_T)
        if len(rows):
            probs = (logits_of(number, rows).double() / temperature).softmax(-1)
            inside_T1 = inside_T[rows, None]
            column = torch.searchsorted(running_sums(probs), inside_T1, right=True)[:, 0]
            found_T = sampled_T.index_copy(0, rows, column.clamp_(max=end - start - 1) + start)
            sampled_T = torch.where(here_T, found_T, sampled_T)
    return sampled_T


def rows_to_sample(here_T: Tensor) -> Tensor:
    """Return the rows that need a chunk; on a GPU all: it would have to be waited for."""
    if here_T.is_cpu:
        return here_T.nonzero()[:, 0]
    return torch.arange(len(here_T), device=here_T.device)


def sample_chunks(lse_TK: Tensor, uniforms_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's chunk by inverse CDF and its place in [0, 1) of the chunk's mass (fp64).

    lse_TK: logsumexp of each chunk's logits.
    """
    cumulative_TK = running_sums(lse_TK.double().softmax(-1))
    uniforms_T1 = uniforms_T.double()[:, None]
    chunk_T1 = torch.searchsorted(cumulative_TK, uniforms_T1, right=True)
    chunk_T1.clamp_(max=cumulative_TK.shape[1] - 1)
    edges_TK = torch.cat([torch.zeros_like(cumulative_TK[:, :1]), cumulative_TK], -1)
    low_T1, high_T1 = edges_TK.gather(1, chunk_T1), edges_TK.gather(1, chunk_T1 + 1)
    return chunk_T1[:, 0], ((uniforms_T1 - low_T1) / (high_T1 - low_T1))[:, 0]


def running_sums(values_TN: Tensor) -> Tensor:
    """Return the cumulative sums of each row: products with triangles, first of blocks.

    torch's own on a GPU may add in another order in another run.
    """
    size = values_TN.shape[1]
    padded_TN = F.pad(values_TN, (0, -size % _SUM_BLOCK))
    blocks_TKX = padded_TN.unflatten(1, (padded_TN.shape[1] // _SUM_BLOCK, _SUM_BLOCK))
    inside_TKX = blocks_TKX @ _triangle(_SUM_BLOCK, values_TN, 0)
    before_TK = inside_TKX[:, :, -1] @ _triangle(inside_TKX.shape[1], values_TN, 1)
    return (inside_TKX + before_TK[:, :, None]).flatten(1)[:, :size].contiguous()


def _triangle(size: int, like: Tensor, diagonal: int) -> Tensor:
    return torch.ones(size, size, dtype=like.dtype, device=like.device).triu_(diagonal)
