"""Triton kernels in one pass each way: LayerNorm(dropout(sublayer output) + residual), where torch
makes three and saves a mask; GELU(product + bias), whose backward pass sums the bias gradient;
dropout; and sums of columns. Sums over rows are made in parts of a fixed number and order: no
atomics, the same bits in every run and on every card. Arithmetic is fp32.

Legend: R rows, C columns, P parts.
"""

import triton
import triton.language as tl
from torch import Tensor, empty_like, float32
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from deberta_ds.model.dropout import MIX_1, MIX_2
from deberta_ds.model.kernels.operators import ceil_div, operator

_NORM_PARTS, _GELU_PARTS = 1024, 64  # a program of LayerNorm's gradient is one warp at most widths
_GELU_ROWS, _GELU_GRADIENT_ROWS, _GELU_COLUMNS = 16, 8, 256
_SUM_PARTS, _SUM_ROWS = 256, 16
_NORM_STAGES, _GELU_STAGES = tl.constexpr(3), tl.constexpr(2)  # the next rows are on their way
_MIX_1, _MIX_2 = tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _kept(element, KEY, threshold, keep_scale):
    """Return the factor of `DropoutMask` for elements by index, bit for bit."""
    word = element.to(tl.uint32) + tl.load(KEY).to(tl.uint32)
    word = ((word ^ (word >> 16)) * _MIX_1) ^ tl.load(KEY + 1).to(tl.uint32)
    word = (word ^ (word >> 15)) * _MIX_2
    word = word ^ (word >> 15)
    return tl.where(word >= threshold.to(tl.uint32), keep_scale, 0.0)


@triton.jit(do_not_specialize=["threshold"])
def _norm_kernel(SUBLAYER, RESIDUAL, WEIGHT, BIAS, SUMMED, OUT, MEAN, INVERSE, KEY, threshold,
                 keep_scale, epsilon, C: tl.constexpr, BLOCK: tl.constexpr,
                 DROPOUT: tl.constexpr):
    """One row: SUMMED = dropout(SUBLAYER) + RESIDUAL in its own dtype, OUT its norm."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    summed = tl.load(SUBLAYER + row * C + c, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        summed *= _kept(row * C + c, KEY, threshold, keep_scale)
    summed += tl.load(RESIDUAL + row * C + c, mask=inside, other=0.0).to(tl.float32)
    rounded = summed.to(SUMMED.dtype.element_ty)
    tl.store(SUMMED + row * C + c, rounded, mask=inside)
    summed = rounded.to(tl.float32)
    mean = tl.sum(summed, 0) / C
    centered = tl.where(inside, summed - mean, 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centered * centered, 0) / C + epsilon)
    weight = tl.load(WEIGHT + c, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(BIAS + c, mask=inside, other=0.0).to(tl.float32)
    out = centered * inverse * weight + bias
    tl.store(OUT + row * C + c, out.to(OUT.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(INVERSE + row, inverse)


@triton.jit(do_not_specialize=["threshold", "R"])
def _norm_gradient_kernel(GRAD, OTHER, SUMMED, MEAN, INVERSE, WEIGHT, D_SUBLAYER, D_RESIDUAL, PARTS,
                          R, KEY, threshold, keep_scale, TWO: tl.constexpr,
                          C: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr):
    """Rows p, p + P, ... of part p; PARTS [P,2,C] are its sums for weight and bias.

    With TWO the norm's gradient is GRAD + OTHER. Without DROPOUT both gradients are D_RESIDUAL, and
    D_SUBLAYER is not written.
    """
    part = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < C
    weight = tl.load(WEIGHT + c, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(part, R, tl.num_programs(0), num_stages=_NORM_STAGES):
        row = tl.cast(number, tl.int64)
        grad = tl.load(GRAD + row * C + c, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(OTHER + row * C + c, mask=inside, other=0.0).to(tl.float32)
        summed = tl.load(SUMMED + row * C + c, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(INVERSE + row)
        normal = tl.where(inside, (summed - tl.load(MEAN + row)) * inverse, 0.0)
        weight_sum += grad * normal
        bias_sum += grad
        grad *= weight
        along, mean = tl.split(tl.sum(tl.join(grad * normal, grad), 0) / C)  # one exchange
        gradient = (grad - mean - normal * along) * inverse
        tl.store(D_RESIDUAL + row * C + c, gradient.to(D_RESIDUAL.dtype.element_ty), mask=inside)
        if DROPOUT:
            gradient *= _kept(row * C + c, KEY, threshold, keep_scale)
            d_sublayer = gradient.to(D_SUBLAYER.dtype.element_ty)
            tl.store(D_SUBLAYER + row * C + c, d_sublayer, mask=inside)
    tl.store(PARTS + part * 2 * C + c, weight_sum, mask=inside)
    tl.store(PARTS + (part * 2 + 1) * C + c, bias_sum, mask=inside)


@triton.jit
def _tile(X, BIAS, r, c, R, C: tl.constexpr):
    """Return where a tile of X lies, which of it exists, and it with its bias in fp32."""
    place = r.to(tl.int64)[:, None] * C + c[None, :]
    inside = (r < R)[:, None] & (c < C)[None, :]
    bias = tl.load(BIAS + c, mask=c < C, other=0.0).to(tl.float32)
    return place, inside, tl.load(X + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]


@triton.jit
def _normal_cdf(x):
    """Return the normal cumulative distribution (cdf) at x, and exp(-x^2 / 2).

    Abramowitz and Stegun 7.1.26, off by 7.5e-8 at most: half the instructions of an error function
    and an exponential, and better than their difference where the cdf is small.
    """
    density = tl.exp2(x * x * -0.7213475204444817)  # log2(e) / 2
    t = 1 / (1 + 0.23164190 * tl.abs(x))
    tail = 0.530702714 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = (tail * t + 0.127414796) * t * density
    return tl.where(x < 0, tail, 1 - tail), density


@triton.jit(do_not_specialize=["R"])
def _gelu_kernel(X, BIAS, OUT, R, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    place, inside, x = _tile(X, BIAS, r, c, R, C)
    cdf, _ = _normal_cdf(x)
    tl.store(OUT + place, (x * cdf).to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _gelu_gradient_kernel(GRAD, X, BIAS, DX, PARTS, R, C: tl.constexpr, BR: tl.constexpr,
                          BC: tl.constexpr):
    """Tiles p, p + P, ... of rows; PARTS [P,C] are their sums for the bias."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = tl.zeros([BR, BC], tl.float32)
    for first in tl.range(part * BR, R, tl.num_programs(0) * BR, num_stages=_GELU_STAGES):
        r = first + tl.arange(0, BR)
        place, inside, x = _tile(X, BIAS, r, c, R, C)
        grad = tl.load(GRAD + place, mask=inside, other=0.0).to(tl.float32)
        cdf, density = _normal_cdf(x)
        gradient = tl.where(inside, grad * (cdf + x * density * 0.3989422804014327), 0.0)
        sums += gradient
        tl.store(DX + place, gradient.to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTS + part * C + c, tl.sum(sums, 0), mask=c < C)


@triton.jit(do_not_specialize=["R"])
def _column_sum_kernel(X, SUMS, R, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Tiles p, p + P, ... of rows; SUMS [P,C]."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = tl.zeros([BR, BC], tl.float32)
    for first in tl.range(part * BR, R, tl.num_programs(0) * BR, num_stages=_GELU_STAGES):
        r = first + tl.arange(0, BR)
        inside = (r < R)[:, None] & (c < C)[None, :]
        sums += tl.load(X + (r.to(tl.int64)[:, None] * C + c[None, :]), mask=inside, other=0.0)
    tl.store(SUMS + part * C + c, tl.sum(sums, 0).to(SUMS.dtype.element_ty), mask=c < C)


def _empty_norm(_sublayer, residual: Tensor, *_rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = [residual.new_empty(residual.shape[:-1], dtype=float32) for _ in range(2)]
    return empty_like(residual), empty_like(residual), *rows


@operator("residual_norm", _empty_norm)
def _norm(sublayer: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float,
          key: Tensor | None, threshold: int, keep_scale: float
          ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm, its input (the sum), and the rows' means and inverse standard deviations.

    sublayer, residual: contiguous, of one shape. key, threshold: of `DropoutMask`, the threshold as
    int32; key None: no dropout.
    """
    outputs = _empty_norm(sublayer, residual)
    out, summed, means, inverses = outputs
    if means.numel():
        _norm_kernel[(means.numel(),)](
            sublayer, residual, weight, bias, summed, out, means, inverses, key, threshold,
            keep_scale, epsilon, **_row_constants(residual, key))
    return outputs


def _empty_gradients(_grad, _other, summed: Tensor, _means, _inverses, _weight,
                     like_sublayer: Tensor, key: Tensor | None, *_rest
                     ) -> tuple[Tensor, Tensor, Tensor]:
    sublayer = like_sublayer.new_empty(0 if key is None else summed.shape)
    rows = summed.numel() // summed.shape[-1]
    parts = summed.new_empty(min(rows, _NORM_PARTS), 2, summed.shape[-1], dtype=float32)
    return sublayer, empty_like(summed), parts


@operator("residual_norm_gradients", _empty_gradients)
def _norm_gradients(grad: Tensor, other: Tensor | None, summed: Tensor, means: Tensor,
                    inverses: Tensor, weight: Tensor, like_sublayer: Tensor, key: Tensor | None,
                    threshold: int, keep_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of sublayer (empty without dropout) and residual, and PARTS.

    grad, other: of the norm's two uses. like_sublayer: any tensor of the sublayer's dtype.
    """
    outputs = _empty_gradients(grad, other, summed, means, inverses, weight, like_sublayer, key)
    if summed.numel():
        _norm_gradient_kernel[(len(outputs[2]),)](
            grad, grad if other is None else other, summed, means, inverses, weight, *outputs,
            means.numel(), key, threshold, keep_scale, TWO=other is not None,
            **_row_constants(summed, key, 1024))
    return outputs


def _row_constants(residual: Tensor, key: Tensor | None, of_warp: int = 256) -> dict:
    size = residual.shape[-1]
    block = triton.next_power_of_2(size)
    return {"C": size, "BLOCK": block, "DROPOUT": key is not None,
            "num_warps": min(max(block // of_warp, 1), 16)}


class _ResidualNorm(Function):
    @staticmethod
    def forward(ctx, sublayer, residual, weight, bias, epsilon, key, threshold, keep_scale):
        out, *saved = _norm(sublayer, residual, weight, bias, epsilon, key, threshold, keep_scale)
        ctx.save_for_backward(*saved, weight, sublayer.new_empty(0), key)
        ctx.numbers, ctx.bias_dtype = (threshold, keep_scale), bias.dtype
        ctx.set_materialize_grads(False)
        return out, out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        given = [x.contiguous() for x in grads if x is not None]
        if not given:
            return (None,) * 8
        summed, means, inverses, weight, like_sublayer, key = ctx.saved_tensors
        sublayer, residual, parts = _norm_gradients(
            given[0], given[1] if len(given) > 1 else None, summed, means, inverses, weight,
            like_sublayer, key, *ctx.numbers)
        if not sublayer.numel():
            sublayer = residual.to(like_sublayer.dtype)
        weight_grad, bias_grad = parts.sum(0).to(weight.dtype)
        return sublayer, residual, weight_grad, bias_grad.to(ctx.bias_dtype), *[None] * 4


def residual_norm(sublayer: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float,
                  mask=None) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(dropout(sublayer) + residual) in the dtype of `residual`; `mask` of dropout.

    It comes as two tensors of one memory, for two uses: their gradients are added where the
    backward pass reads them.
    """
    numbers = (mask.key, mask.signed_threshold, mask.scale) if mask else (None, 0, 1.0)
    return _ResidualNorm.apply(sublayer.contiguous(), residual.contiguous(), weight, bias, epsilon,
                               *numbers)


@triton.jit(do_not_specialize=["threshold"])
def _dropout_kernel(X, OUT, KEY, threshold, keep_scale, C: tl.constexpr, BLOCK: tl.constexpr,
                    DROPOUT: tl.constexpr):
    c = tl.arange(0, BLOCK)
    element = tl.program_id(0).to(tl.int64) * C + c
    kept = tl.load(X + element, mask=c < C, other=0.0).to(tl.float32)
    kept *= _kept(element, KEY, threshold, keep_scale)
    tl.store(OUT + element, kept.to(OUT.dtype.element_ty), mask=c < C)


@operator("dropout", lambda x, *_rest: empty_like(x))
def _dropout(x: Tensor, key: Tensor, threshold: int, keep_scale: float) -> Tensor:
    """Return what `DropoutMask.apply` returns, x contiguous."""
    out = empty_like(x)
    if x.numel():
        _dropout_kernel[(x.numel() // x.shape[-1],)](x, out, key, threshold, keep_scale,
                                                     **_row_constants(x, key))
    return out


class _Dropout(Function):
    @staticmethod
    def forward(ctx, x, key, threshold, keep_scale):
        ctx.save_for_backward(key)
        ctx.numbers = threshold, keep_scale
        return _dropout(x, key, threshold, keep_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (key,) = ctx.saved_tensors
        return _dropout(grad.contiguous(), key, *ctx.numbers), None, None, None


def dropout(x: Tensor, mask) -> Tensor:
    """Return dropout(x) by a `DropoutMask`; backward keeps nothing but its key."""
    return _Dropout.apply(x.contiguous(), mask.key, mask.signed_threshold, mask.scale)


@operator("biased_gelu", lambda x_RC, bias_C: empty_like(x_RC))
def _gelu(x_RC: Tensor, bias_C: Tensor) -> Tensor:
    """Return GELU(x + bias), x contiguous."""
    out_RC = empty_like(x_RC)
    rows, size = x_RC.shape
    if rows:
        grid = (ceil_div(rows, _GELU_ROWS), ceil_div(size, _GELU_COLUMNS))
        _gelu_kernel[grid](x_RC, bias_C, out_RC, rows, C=size, BR=_GELU_ROWS, BC=_GELU_COLUMNS)
    return out_RC


def _empty_gelu_gradients(_grad_RC, x_RC: Tensor, _bias_C) -> tuple[Tensor, Tensor]:
    rows, size = x_RC.shape
    parts = min(ceil_div(rows, _GELU_GRADIENT_ROWS), _GELU_PARTS)
    return empty_like(x_RC), x_RC.new_empty(parts, size, dtype=float32)


@operator("biased_gelu_gradients", _empty_gelu_gradients)
def _gelu_gradients(grad_RC: Tensor, x_RC: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and of the bias in PARTS."""
    outputs = _empty_gelu_gradients(grad_RC, x_RC, bias_C)
    rows, size = x_RC.shape
    if rows:
        _gelu_gradient_kernel[(len(outputs[1]), ceil_div(size, _GELU_COLUMNS))](
            grad_RC, x_RC, bias_C, *outputs, rows, C=size, BR=_GELU_GRADIENT_ROWS,
            BC=_GELU_COLUMNS)
    return outputs


@operator("column_sums", lambda x_RC: x_RC.new_empty(x_RC.shape[1]))
def column_sums(x_RC: Tensor) -> Tensor:
    """Return the sums of columns, x contiguous, in two steps: one would not fill a GPU."""
    rows, size = x_RC.shape
    parts_PC = x_RC.new_empty(min(ceil_div(rows, _SUM_ROWS), _SUM_PARTS), size, dtype=float32)
    sums_C, grid = x_RC.new_empty(size), ceil_div(size, _GELU_COLUMNS)
    for of, to, parts in ((x_RC, parts_PC, len(parts_PC)), (parts_PC, sums_C, 1)):
        _column_sum_kernel[(parts, grid)](
            of, to, len(of), C=size, BR=_SUM_ROWS, BC=_GELU_COLUMNS)
    return sums_C


class _BiasedGelu(Function):
    @staticmethod
    def forward(ctx, x_RC, bias_C):
        ctx.save_for_backward(x_RC, bias_C)
        return _gelu(x_RC, bias_C)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RC):
        x_RC, bias_C = ctx.saved_tensors
        found, parts = _gelu_gradients(grad_RC.contiguous(), x_RC, bias_C)
        return found, parts.sum(0).to(bias_C.dtype)


def biased_gelu(x: Tensor, bias_C: Tensor) -> Tensor:
    """Return GELU(x + bias) in the dtype of x [..., C], the exact one by erf."""
    return _BiasedGelu.apply(x.contiguous().flatten(0, -2), bias_C).view(x.shape)
