"""Triton kernels: cross-entropy of a linear layer, and samples of it, without logits in memory.

The same function as `linear_cross_entropy`, id for id the same sample from the same uniforms up to
rounding. Forward saves one logsumexp per row and vocabulary tile; sampling chooses a tile by these
and computes the logits of that tile once more. Backward computes logits again and writes
their gradient, in the input's dtype, for some ids at a time; two matrix products do the rest.
No atomics: one writer per element and a fixed order of every sum. Not timed yet
(`benchmarks/cross_entropy.py`).

Shape legend: T target rows, C hidden size, V vocabulary, K vocabulary tiles, N ids of one chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds.model.kernels.attention.tiles import capability_of
from deberta_ds.model.kernels.operators import ceil_div, operator
from deberta_ds.model.linear_cross_entropy import (
    count_predicted,
    sample_chunks,
    sum_of_targets,
    wide_product,
)
from deberta_ds.model.precision import matmul_dtype

_LOG2_E = tl.constexpr(1.4426950408889634)
_ROWS, _IDS, _DEPTH = 128, 128, 64  # tile of logits, and hidden columns taken at once
_GRADIENT_IDS = 64  # tile of backward; 128 would spill registers on sm_90
_FEW_WARPS, _WARPS = 4, 8  # few on sm_90 alone, where they spill nothing (gpu/attention.md)
_GRADIENT_ELEMENTS = 1 << 27  # logit gradients held at once in backward: 256 MiB in bf16
_PITCH = tl.constexpr(128)  # their rows begin at multiples of this, so whole vectors are written


@triton.jit
def _logits(HIDDEN, WEIGHT, BIAS, t, n, in_rows, in_ids, C: tl.constexpr, BK: tl.constexpr,
            BT: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """Return the logits [BT,BN] of rows t and ids n in fp32; -inf for ids out of range."""
    acc = tl.zeros([BT, BN], tl.float32)
    for c0 in range(0, C, BK):
        c = c0 + tl.arange(0, BK)
        hidden = tl.load(
            HIDDEN + t[:, None] * C + c[None, :],
            mask=in_rows[:, None] & (c < C)[None, :], other=0.0)
        weight = tl.load(
            WEIGHT + n[None, :] * C + c[:, None],
            mask=in_ids[None, :] & (c < C)[:, None], other=0.0)
        acc = tl.dot(hidden, weight, acc, input_precision=PRECISION)
    bias = tl.load(BIAS + n, mask=in_ids, other=0.0).to(tl.float32)
    return tl.where(in_ids[None, :], acc + bias[None, :], float("-inf"))


@triton.jit(do_not_specialize=["T", "VALID"])
def _forward_kernel(HIDDEN, WEIGHT, BIAS, LABELS, LSE, SAMPLE_LSE, MAX_LOGIT, ARGMAX, LABEL_LOGIT,
                    T, VALID, INVERSE_TEMPERATURE, SEPARATE: tl.constexpr, C: tl.constexpr,
                    BK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of logits: logsumexp and largest logit of every row, and the label's own logit.

    LSE, SAMPLE_LSE (of logits / temperature, if SEPARATE), MAX_LOGIT and ARGMAX are [K,T].
    """
    tile = tl.program_id(1)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tile * BN + tl.arange(0, BN)
    in_rows, in_ids = t < T, n < VALID
    logits = _logits(
        HIDDEN, WEIGHT, BIAS, t, n, in_rows, in_ids, C, BK, BT, BN, PRECISION)
    out = tile.to(tl.int64) * T + t
    max_logit = tl.max(logits, 1)
    exp_sum = tl.sum(tl.exp2((logits - max_logit[:, None]) * _LOG2_E), 1)
    tl.store(LSE + out, max_logit + tl.log2(exp_sum) / _LOG2_E, mask=in_rows)
    if SEPARATE:
        inverse_temperature = tl.load(INVERSE_TEMPERATURE)
        scaled = (logits - max_logit[:, None]) * (inverse_temperature * _LOG2_E)
        exp_sum = tl.sum(tl.exp2(scaled), 1)
        sample_lse = max_logit * inverse_temperature + tl.log2(exp_sum) / _LOG2_E
        tl.store(SAMPLE_LSE + out, sample_lse, mask=in_rows)
    tl.store(MAX_LOGIT + out, max_logit, mask=in_rows)
    lowest = tl.min(tl.where(logits == max_logit[:, None], n[None, :], VALID), 1)
    tl.store(ARGMAX + out, lowest, mask=in_rows)
    label = tl.load(LABELS + t, mask=in_rows, other=-1)
    is_label = n[None, :] == label[:, None]
    label_logit = tl.sum(tl.where(is_label, logits, 0.0), 1)
    here = in_rows & (label >= tile * BN) & (label < tl.minimum(tile * BN + BN, VALID))
    tl.store(LABEL_LOGIT + t, label_logit, mask=here)


@triton.jit(do_not_specialize=["T", "VALID", "first", "count", "pitches"])
def _gradient_kernel(HIDDEN, WEIGHT, BIAS, LABELS, LOG_NORM, SCALE, D_LOGITS, D_BIAS, T, VALID,
                     first, count, pitches, C: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
                     BN: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of the logits of ids [first, first + count): D_LOGITS [T,pitches x _PITCH], and of
    the bias.

    A program takes one block of ids and all rows, so that it alone sums their bias gradient.
    """
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    n = first + column
    in_ids = (column < count) & (n < VALID)
    bias_sum = tl.zeros([BN], tl.float32)
    for t0 in range(0, T, BT):
        t = t0 + tl.arange(0, BT)
        in_rows = t < T
        logits = _logits(
            HIDDEN, WEIGHT, BIAS, t, n, in_rows, in_ids, C, BK, BT, BN, PRECISION)
        log_norm = tl.load(LOG_NORM + t, mask=in_rows, other=float("inf"))
        label = tl.load(LABELS + t, mask=in_rows, other=-1)
        probs = tl.exp2((logits - log_norm[:, None]) * _LOG2_E)
        hit = (n[None, :] == label[:, None]) & in_ids[None, :]
        scale = tl.load(SCALE + t, mask=in_rows, other=0.0)
        gradient = (probs - tl.where(hit, 1.0, 0.0)) * scale[:, None]
        bias_sum += tl.sum(gradient, 0)
        tl.store(D_LOGITS + t[:, None] * (pitches * _PITCH) + column[None, :],
                 gradient.to(D_LOGITS.dtype.element_ty), mask=in_rows[:, None])
    tl.store(D_BIAS + column, bias_sum.to(D_BIAS.dtype.element_ty), mask=column < count)


@triton.jit(do_not_specialize=["VALID"])
def _sample_kernel(HIDDEN, WEIGHT, BIAS, TILE, INSIDE, SAMPLED, VALID, INVERSE_TEMPERATURE,
                   SEPARATE: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """One row: the id of its tile where the cumulative probability first exceeds INSIDE."""
    t = tl.program_id(0)
    n = tl.load(TILE + t) * BN + tl.arange(0, BN)
    in_ids = n < VALID
    logits = tl.load(BIAS + n, mask=in_ids, other=0.0).to(tl.float32)
    for c0 in range(0, C, BK):
        c = c0 + tl.arange(0, BK)
        hidden = tl.load(HIDDEN + t * C + c, mask=c < C, other=0.0)
        weight = tl.load(
            WEIGHT + n[:, None] * C + c[None, :],
            mask=in_ids[:, None] & (c < C)[None, :], other=0.0)
        logits += tl.sum(weight.to(tl.float32) * hidden.to(tl.float32)[None, :], 1)
    if SEPARATE:
        logits *= tl.load(INVERSE_TEMPERATURE)
    logits = tl.where(in_ids, logits, float("-inf"))
    probs = tl.exp2((logits - tl.max(logits, 0)) * _LOG2_E)
    cumulative = tl.cumsum(probs, 0)
    passed = cumulative <= tl.load(INSIDE + t) * tl.sum(probs, 0)
    last = tl.max(tl.where(in_ids, n, 0), 0)
    first_id = tl.min(n, 0) + tl.sum(passed.to(tl.int32), 0)
    tl.store(SAMPLED + t, tl.minimum(first_id, last).to(tl.int64))


def fused_linear_cross_entropy(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor,
                               labels_T: Tensor, uniforms_T: Tensor | None = None,
                               temperature: Tensor | float = 1.0, valid_vocab: int | None = None
                              ) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (loss_sum, correct_count, sampled_ids); see `linear_cross_entropy`.

    hidden and weight: fp32, fp16 or bf16. Runs on CUDA, and in Triton's interpreter.
    """
    valid, dtype = count_predicted(weight_VC, valid_vocab), matmul_dtype(hidden_TC)
    hidden_TC, weight_VC = (x.to(dtype).contiguous() for x in (hidden_TC, weight_VC))
    return _FusedLinearCrossEntropy.apply(
        hidden_TC, weight_VC, bias_V.contiguous(), labels_T.contiguous(), uniforms_T, temperature,
        valid)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TC, weight_VC, bias_V, labels_T, uniforms_T, temperature, valid):
        inputs = (hidden_TC, weight_VC, bias_V)
        inverse_1 = None  # at temperature 1, which the loss has
        if uniforms_T is not None and (isinstance(temperature, Tensor) or temperature != 1.0):
            inverse_1 = hidden_TC.new_ones(1, dtype=torch.float64).div_(temperature).float()
        lse_KT, sample_lse_KT, max_logit_KT, argmax_KT, label_logit_T = loss_tiles(
            *inputs, labels_T, inverse_1, valid)
        log_norm_T = lse_KT.logsumexp(0)
        tile_T = max_logit_KT.argmax(0)  # the first tile with the largest logit: the lowest id wins
        correct = (argmax_KT.gather(0, tile_T[None])[0] == labels_T).sum()
        loss_sum = sum_of_targets(log_norm_T - label_logit_T, labels_T)
        sampled_T = None
        if uniforms_T is not None:
            lse_TK = (lse_KT if inverse_1 is None else sample_lse_KT).t()
            tile_T, inside_T = sample_chunks(lse_TK, uniforms_T)
            sampled_T = sample_ids(*inputs, tile_T.int(), inside_T.float(), inverse_1, valid)
            ctx.mark_non_differentiable(sampled_T)
        ctx.save_for_backward(*inputs, labels_T, log_norm_T)
        ctx.valid = valid
        ctx.mark_non_differentiable(correct)
        return loss_sum, correct, sampled_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_correct, _grad_sampled):
        hidden_TC, weight_VC, bias_V, labels_T, log_norm_T = ctx.saved_tensors
        rows, vocab = hidden_TC.shape[0], weight_VC.shape[0]
        grad_hidden_TC = torch.zeros_like(hidden_TC, dtype=torch.float32)
        grad_weight_VC, grad_bias_V = torch.zeros_like(weight_VC), torch.zeros_like(bias_V)
        chunk = max(_IDS, _GRADIENT_ELEMENTS // max(1, rows) // _IDS * _IDS)
        scale_T = torch.where(labels_T >= 0, grad_loss.float(), 0.0)
        for start in range(0, ctx.valid if rows else 0, chunk):
            count = min(chunk, vocab - start)
            padded_TN, grad_bias_V[start : start + count] = loss_gradient(
                hidden_TC, weight_VC, bias_V, labels_T, log_norm_T, scale_T, ctx.valid, start,
                count)
            grad_TN = padded_TN[:, :count]
            grad_hidden_TC += wide_product(grad_TN, weight_VC[start : start + count])
            if ctx.needs_input_grad[1]:  # not of a frozen table
                torch.mm(grad_TN.t(), hidden_TC, out=grad_weight_VC[start : start + count])
        return grad_hidden_TC.to(hidden_TC.dtype), grad_weight_VC, grad_bias_V, *[None] * 4


def _empty_tiles(_hidden_TC, _weight_VC, _bias_V, labels_T: Tensor, inverse_1: Tensor | None,
                 valid: int) -> tuple[Tensor, ...]:
    rows, tiles = labels_T.shape[0], ceil_div(valid, _IDS)
    sampled = 0 if inverse_1 is None else tiles
    single = dict(dtype=torch.float32)
    return (labels_T.new_empty(tiles, rows, **single), labels_T.new_empty(sampled, rows, **single),
            labels_T.new_empty(tiles, rows, **single),
            labels_T.new_empty(tiles, rows, dtype=torch.int32),
            labels_T.new_zeros(rows, **single))


@operator("loss_tiles", _empty_tiles)
def loss_tiles(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, labels_T: Tensor,
               inverse_1: Tensor | None, valid: int
               ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return of every tile and row, [K,T]: logsumexp, that of logits / temperature, the largest
    logit and the id it is at; and the logit of every row's label [T].

    inverse_1: 1 / temperature in fp32, [1]; None: 1, and the second result is empty.
    """
    rows, tiles = hidden_TC.shape[0], ceil_div(valid, _IDS)
    outputs = _empty_tiles(hidden_TC, weight_VC, bias_V, labels_T, inverse_1, valid)
    if rows:
        # Blocks of rows run first: the weights of an id tile are then read from memory once.
        _forward_kernel[(ceil_div(rows, _ROWS), tiles)](
            hidden_TC, weight_VC, bias_V, labels_T, *outputs, rows, valid, inverse_1,
            SEPARATE=inverse_1 is not None, **_constants(hidden_TC, _IDS, inverse_1 is None))
    return outputs


def _empty_gradients(hidden_TC: Tensor, _weight_VC, bias_V: Tensor, _labels_T, _log_norm_T,
                     _scale_T, _valid, _start, count: int) -> tuple[Tensor, Tensor]:
    width = ceil_div(count, _PITCH.value) * _PITCH.value
    return hidden_TC.new_empty(hidden_TC.shape[0], width), bias_V.new_empty(count)


@operator("loss_gradient", _empty_gradients)
def loss_gradient(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, labels_T: Tensor,
                  log_norm_T: Tensor, scale_T: Tensor, valid: int, start: int, count: int
                  ) -> tuple[Tensor, Tensor]:
    """Return the gradients of the logits of ids [start, start + count), rows padded, and of their
    biases. What lies behind `count` in a row is 0. scale_T: fp32, of each row's loss.
    """
    arguments = (hidden_TC, weight_VC, bias_V, labels_T, log_norm_T, scale_T)
    outputs = _empty_gradients(*arguments, valid, start, count)
    width = outputs[0].shape[1]
    _gradient_kernel[(width // _GRADIENT_IDS,)](
        *arguments, *outputs, len(hidden_TC), valid, start, count, width // _PITCH.value,
        **_constants(hidden_TC, _GRADIENT_IDS))
    return outputs


def _no_ids(_hidden_TC, _weight_VC, _bias_V, tile_T: Tensor, *_rest) -> Tensor:
    return torch.empty_like(tile_T, dtype=torch.int64)


@operator("sample_ids", _no_ids)
def sample_ids(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, tile_T: Tensor,
               inside_T: Tensor, inverse_1: Tensor | None, valid: int) -> Tensor:
    """Return the id of every row's tile where the cumulative probability first exceeds `inside`."""
    sampled_T = torch.empty_like(tile_T, dtype=torch.int64)
    if len(tile_T):
        _sample_kernel[(len(tile_T),)](
            hidden_TC, weight_VC, bias_V, tile_T, inside_T, sampled_T, valid, inverse_1,
            SEPARATE=inverse_1 is not None, C=hidden_TC.shape[1], BK=_DEPTH, BN=_IDS)
    return sampled_T


def _constants(hidden_TC: Tensor, ids: int, lean: bool = True) -> dict:
    """Return the compile-time arguments; lean: without a temperature, whose sums take registers."""
    few = lean and capability_of(hidden_TC.device)[0] == 9
    return {"C": hidden_TC.shape[1], "BK": _DEPTH, "BT": _ROWS, "BN": ids,
            "PRECISION": "ieee" if hidden_TC.dtype == torch.float32 else "tf32",
            "num_warps": _FEW_WARPS if few else _WARPS, "num_stages": 3}
