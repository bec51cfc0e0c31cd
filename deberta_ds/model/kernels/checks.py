"""Checks of the Triton kernels on this GPU: small problems through them and torch's operators.

Each takes what was asked of `choose.pick`, and returns the largest relative error (NaN above all)
and of what it is; see `kernel_check` for when it is asked.

Legend: T target rows, V vocabulary; R rows, C columns; see `attention/dispatch.py` for the others.
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.config.model import TERMS
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import reference_attention
from deberta_ds.model.choose import Request, load
from deberta_ds.model.dropout import DropoutMask
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

GEOMETRY = Geometry(512, 256)  # of every released v2 and v3 model
_LEAST_SAME_SAMPLES = 0.99  # the others lie at an edge between two ids
_ROWS = 1100  # so that programs of the weights' gradients take several turns
Found = list[tuple[Tensor, Tensor, str]]  # results, what is right, names


class Rows(NamedTuple):
    """The shape of a test problem, for one kind of kernel."""

    length: int
    gathered: int | None = None  # gathered queries
    dropout: float = 0.1
    keep: bool = False  # save the position terms for backward
    batch: int = 2
    heads: int = 2


# The last one is large enough that the loop of `table_gradient_kernel` runs twice.
SHORT = (Rows(300), Rows(300, gathered=40), Rows(300, dropout=0.0),
         Rows(300, gathered=40, dropout=0.0), Rows(300, keep=True), Rows(100, batch=24, heads=32))
LONG = (Rows(600), Rows(900, keep=True), Rows(1100), Rows(1100, dropout=0.0),
        Rows(1100, gathered=40), Rows(1100, gathered=40, dropout=0.0))


def _worst(found: Found) -> tuple[float, str]:
    errors = []
    for result, right, name in found:
        norm = right.double().norm().item()
        errors.append(((result.double() - right.double()).norm().item() / (norm or 1.0), name))
    return max(errors, key=lambda item: float("inf") if item[0] != item[0] else item[0])


def _compared(what: str, names: str, fused: Callable, right: Callable, values: list[Tensor],
              grad: Tensor) -> Found:
    """Return the result and all gradients of a kernel, next to those of a function in fp32."""
    both = []
    for function, given in ((fused, values), (right, [x.float() for x in values])):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        out = function(*leaves)
        both.append([out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    words = ["result", *(f"gradient of {name}" for name in names.split())]
    return list(zip(*both, [f"{word} of {what}" for word in words], strict=True))


def attention(request: Request, fused: Callable | None = None) -> tuple[float, str]:
    """Check packed sequences; `request.long` ones have pairs beyond the relative table's reach,
    which other loops take.
    """
    fused = fused or load("kernels.attention:fused_path")
    return _worst([one for rows in (LONG if request.long else SHORT)
                   for one in _attention_of(request, rows, fused)])


def _attention_of(request: Request, rows: Rows, fused: Callable) -> Found:
    """Compare one problem: packed rows, all but the first with padding."""
    device, dtype, size, batch, heads = request.device, request.dtype, request.size, *rows[4:]
    length, queries = rows.length, rows.gathered or rows.length
    generator = torch.Generator().manual_seed(length)

    def sample(*shape) -> Tensor:
        values = torch.randn(*shape, generator=generator).to(device, dtype)
        return values.transpose(1, 2) if len(shape) == 4 else values

    tensors = [sample(batch, count, heads, size) for count in (queries, length, length)]
    tensors += [sample(heads, GEOMETRY.num_slots, size) for one in request.terms if one]
    grad = sample(batch, queries, heads, size).transpose(1, 2)
    segments = torch.ones(batch, length, dtype=torch.int32)
    segments[1:, length // 3 :] = 2
    segments[1:, length - 20 :] = 0
    columns = None
    if rows.gathered:
        columns = torch.randint(0, length, (batch, queries), generator=generator).to(device)
    seed = torch.ones(1, dtype=torch.int64, device=device)

    def run(function: Callable, *leaves: Tensor) -> Tensor:
        tables = iter(leaves[3:])
        given = [next(tables) if one else None for one in request.terms]
        return function(*leaves[:3], *given, geometry=GEOMETRY, segments_BL=segments.to(device),
                        query_positions_BQ=columns, dropout=rows.dropout, seed=seed)

    where = f"attention in {batch} rows of {queries} of {length} tokens"
    names = " ".join(["queries keys values", *compress(TERMS, request.terms)])
    return _compared(where, names, partial(run, partial(fused, keep_terms=True) if rows.keep
                                           else fused), partial(run, reference_attention), tensors,
                     grad)


def cross_entropy(request: Request, fused: Callable | None = None) -> tuple[float, str]:
    """Check the vocabulary loss against the chunked function in fp32."""
    fused = fused or load("kernels.fused_cross_entropy:fused_linear_cross_entropy")
    device, dtype, size = request[:3]
    generator = torch.Generator().manual_seed(size)
    rows, ids = 300, 1000
    found: Found = []
    # Under autocast the bias is in fp32, of which Triton compiles another binary.
    for temperature, valid, of_bias in ((1.0, 990, dtype), (0.7, 992, torch.float32)):
        shapes = ((rows, size), (ids, size), (ids,))
        values = [torch.randn(*shape, generator=generator) for shape in shapes]
        values[1] *= size**-0.5
        values = [x.to(device, kind) for x, kind in
                  zip(values, (dtype, dtype, of_bias), strict=True)]
        labels = torch.randint(0, valid, (rows,), generator=generator).to(device)
        uniforms = torch.rand(rows, generator=generator).to(device)
        samples: list[Tensor] = []

        def run(function: Callable, *leaves: Tensor, keep=samples, temperature=temperature,
                valid=valid, labels=labels, uniforms=uniforms) -> Tensor:
            loss, _, sampled = function(*leaves, labels, uniforms, temperature=temperature,
                                        valid_vocab=valid)
            keep.append(sampled)
            return loss

        found += _compared(f"the loss at temperature {temperature}", "states table bias",
                           partial(run, fused), partial(run, linear_cross_entropy), values,
                           torch.ones((), device=device))
        same = (samples[0] == samples[1]).double().mean().item()
        if same < _LEAST_SAME_SAMPLES:
            return float("inf"), f"samples ({same:.1%} the same) at temperature {temperature}"
    return _worst(found)


def norm(request: Request) -> tuple[float, str]:
    """Check LayerNorm, dropout, GELU and sums of columns against torch's operators in fp32."""
    from deberta_ds.model.kernels import fused_norm

    device, sublayer, size = request[:3]
    state, inner = request.state or sublayer, 4 * size  # of a feed-forward part
    generator = torch.Generator().manual_seed(size)
    mask = DropoutMask(torch.tensor([123_456_789, 4_000_000_000], device=device),
                       round(0.1 * 2**32))
    kept = mask.mask(torch.ones(_ROWS, size, device=device)) * mask.scale
    shapes = ((sublayer, _ROWS, size), (state, _ROWS, size), (state, size), (state, size),
              (state, _ROWS, size), (sublayer, _ROWS, inner), (state, inner),
              (sublayer, _ROWS, inner))
    *values, grad, wide, inner_bias, wide_grad = [
        torch.randn(*shape, generator=generator).to(device, dtype) for dtype, *shape in shapes]

    def fused(dropout: DropoutMask | None, x_RC, y_RC, weight_C, bias_C) -> Tensor:
        once, again = fused_norm.residual_norm(x_RC, y_RC, weight_C, bias_C, 1e-7, dropout)
        return once * 0.5 + again if dropout else once  # both uses, or one

    def plain(dropout: DropoutMask | None, x_RC, y_RC, weight_C, bias_C) -> Tensor:
        sum_RC = (x_RC * kept if dropout else x_RC) + y_RC
        return F.layer_norm(sum_RC, (size,), weight_C, bias_C, 1e-7) * (1.5 if dropout else 1)

    found: Found = []
    for what, dropout in (("LayerNorm", mask), ("LayerNorm without dropout", None)):
        found += _compared(what, "sublayer state weight bias", partial(fused, dropout),
                           partial(plain, dropout), values, grad)
    found += _compared("dropout", "state", lambda x: fused_norm.dropout(x, mask),
                       lambda x: x * kept, values[:1], grad)
    found += _compared("GELU", "state bias", fused_norm.biased_gelu,
                       lambda x, bias: F.gelu(x + bias), [wide, inner_bias], wide_grad)
    found.append((fused_norm.column_sums(wide), wide.float().sum(0), "sums of columns"))
    return _worst(found)
