"""Problems that show whether the Triton kernels are right on this GPU, one function per kernel.

Each takes what was asked of `choose.pick`. As a program, which `kernel_check` starts, this solves
them by the kernels and by torch's operators.

Legend: T target rows, V vocabulary; R rows, C columns; see `model/attention` for the others.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import compress, product
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
# Length, batch and heads of rows: within the relative table's reach, at it, and beyond, which other
# loops take; so many that the loop of `table_gradient_kernel` runs twice.
ROWS = ((300, 2, 2), (600, 2, 2), (1100, 2, 2), (100, 24, 32))
_LEAST_SAME_SAMPLES = 0.99  # the others lie at an edge between two ids
_STATES = 1100  # so that programs of the weights' gradients take several turns


class Problem(NamedTuple):
    """What a kernel and torch's operators compute from the same tensors, these in fp32."""

    what: str
    kernel: Callable
    right: Callable
    values: list[Tensor]
    names: str = ""  # of the values
    grad: Tensor | None = None  # of the result; None: it has no gradients


def worst(problems: Iterable[Problem]) -> tuple[float, str]:
    """Return the largest relative error of results and gradients, NaN above all, and of which."""
    errors = []
    for what, kernel, right, values, names, grad in problems:
        both = []
        for function, given in ((kernel, values), (right, [x.float() for x in values])):
            leaves = [x.detach().clone().requires_grad_(grad is not None) for x in given]
            both.append([function(*leaves)])
            if grad is not None:
                out = both[-1][0]
                both[-1] += torch.autograd.grad(out, leaves, grad.to(out.dtype))
        words = ["result", *(f"gradient of {name}" for name in names.split())]
        for word, *pair in zip(words, *both, strict=True):
            found, wanted = (x.double() for x in pair)
            error = (found - wanted).norm() / (wanted.norm().item() or 1.0)
            errors.append((error.item(), f"{word} of {what}"))
    return max(errors, key=lambda item: float("inf") if item[0] != item[0] else item[0])


def _random(generator: torch.Generator, device: torch.device, *tensors: tuple) -> list[Tensor]:
    """Return random tensors of (dtype, *shape) each, the same numbers on every device."""
    return [torch.randn(shape, generator=generator).to(device, dtype) for dtype, *shape in tensors]


def attention(request: Request, fused: Callable | None = None) -> Iterator[Problem]:
    """Packed rows, all but the first with padding."""
    fused = fused or load(".kernels.attention:fused_path")
    device, dtype, size = request[:3]
    for (length, batch, heads), gathered, dropout, keep in product(
            ROWS, (None, 40), (0.1, 0.0), (False, True)):
        generator, queries = torch.Generator().manual_seed(length), gathered or length
        grad, *values = _random(
            generator, device, *((dtype, batch, count, heads, size) for count in (
                queries, queries, length, length)),
            *[(dtype, heads, GEOMETRY.num_slots, size)] * sum(request.terms))
        values[:3] = [x.transpose(1, 2) for x in values[:3]]
        segments = torch.ones(batch, length, dtype=torch.int32)
        segments[1:, length // 3 :] = 2
        segments[1:, length - 20 :] = 0
        columns = torch.randint(0, length, (batch, queries), generator=generator).to(device)
        run = partial(_attend, request.terms, dict(
            geometry=GEOMETRY, segments_BL=segments.to(device), dropout=dropout,
            query_positions_BQ=columns if gathered else None,
            seed=torch.ones(1, dtype=torch.int64, device=device)))
        yield Problem(
            f"attention in {batch} rows of {queries} of {length} tokens",
            partial(run, partial(fused, keep_terms=keep)), partial(run, reference_attention),
            values, " ".join(["queries keys values", *compress(TERMS, request.terms)]), grad)


def _attend(terms: tuple[bool, ...], options: dict, function: Callable, *values: Tensor) -> Tensor:
    tables = iter(values[3:])
    return function(*values[:3], *(next(tables) if one else None for one in terms), **options)


def cross_entropy(request: Request, fused: Callable | None = None) -> Iterator[Problem]:
    """The vocabulary loss, and the ids that are sampled."""
    fused = fused or load(".kernels.fused_cross_entropy:fused_linear_cross_entropy")
    device, dtype, size = request[:3]
    generator, (rows, ids) = torch.Generator().manual_seed(size), (300, 1000)
    *values, bias = _random(generator, device, (dtype, rows, size), (dtype, ids, size),
                            (torch.float32, ids))
    values[1] *= size**-0.5
    labels = torch.randint(0, 990, (rows,), generator=generator).to(device)
    uniforms = torch.rand(rows, generator=generator).to(device)

    def loss(function: Callable, options: dict, *values: Tensor) -> Tensor:
        return function(*values, labels, uniforms, **options)[0]

    def same(fused: Callable, right: Callable, options: dict, *values: Tensor) -> Tensor:
        samples = fused(*values, labels, uniforms, **options)[2]
        wanted = right(*(x.float() for x in values), labels, uniforms, **options)[2]
        return (samples == wanted).double().mean() >= _LEAST_SAME_SAMPLES

    # Under autocast the bias is in fp32, of which Triton compiles another binary.
    for temperature, valid, of_bias in ((1.0, 990, dtype), (0.7, 992, torch.float32)):
        options = dict(temperature=temperature, valid_vocab=valid)
        given = [*values, bias.to(of_bias)]
        yield Problem(f"the loss at temperature {temperature}", partial(loss, fused, options),
                      partial(loss, linear_cross_entropy, options), given, "states table bias",
                      torch.ones((), device=device))
        yield Problem(f"the samples at temperature {temperature}",
                      partial(same, fused, linear_cross_entropy, options),
                      lambda *_: torch.ones(()), given)


def norm(request: Request) -> Iterator[Problem]:
    """LayerNorm, dropout, GELU and sums of columns."""
    from deberta_ds.model.kernels import fused_norm

    device, sublayer, size = request[:3]
    state, inner = request.state or sublayer, 4 * size  # of a feed-forward part
    mask = DropoutMask(torch.tensor([123_456_789, 4_000_000_000], device=device),
                       round(0.1 * 2**32))
    kept = mask.mask(torch.ones(_STATES, size, device=device)) * mask.scale
    shapes = ((sublayer, _STATES, size), (state, _STATES, size), (state, size), (state, size),
              (state, _STATES, size), (sublayer, _STATES, inner), (state, inner),
              (sublayer, _STATES, inner))
    *values, grad, wide, inner_bias, wide_grad = _random(
        torch.Generator().manual_seed(size), device, *shapes)

    def fused(dropout: DropoutMask | None, x_RC, y_RC, weight_C, bias_C) -> Tensor:
        once, again = fused_norm.residual_norm(x_RC, y_RC, weight_C, bias_C, 1e-7, dropout)
        return once * 0.5 + again if dropout else once  # both uses, or one

    def plain(dropout: DropoutMask | None, x_RC, y_RC, weight_C, bias_C) -> Tensor:
        sum_RC = (x_RC * kept if dropout else x_RC) + y_RC
        return F.layer_norm(sum_RC, (size,), weight_C, bias_C, 1e-7) * (1.5 if dropout else 1)

    for what, dropout in (("LayerNorm", mask), ("LayerNorm without dropout", None)):
        yield Problem(what, partial(fused, dropout), partial(plain, dropout), values,
                      "sublayer state weight bias", grad)
    yield Problem("dropout", lambda x: fused_norm.dropout(x, mask), lambda x: x * kept,
                  values[:1], "state", grad)
    yield Problem("GELU", fused_norm.biased_gelu, lambda x, bias: F.gelu(x + bias),
                  [wide, inner_bias], "state bias", wide_grad)
    yield Problem("sums of columns", fused_norm.column_sums, lambda x: x.sum(0), [wide])


if __name__ == "__main__":
    asked, problems = pickle.load(sys.stdin.buffer)
    with torch.cuda.device(asked.device) if asked.device.type == "cuda" else nullcontext():
        print(json.dumps(worst(load(problems)(asked))))
