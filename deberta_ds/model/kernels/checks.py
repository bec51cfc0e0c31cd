"""Problems that show whether the Triton kernels are right on this GPU, one function per kernel.

Each takes what was asked of `choose.pick`; see `kernel_check` for who solves them, and when.

Legend: T target rows, V vocabulary; R rows, C columns; see `attention/dispatch.py` for the others.
"""

from collections.abc import Callable, Iterator
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
from deberta_ds.model.kernels.kernel_check import Problem
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

GEOMETRY = Geometry(512, 256)  # of every released v2 and v3 model
_LEAST_SAME_SAMPLES = 0.99  # the others lie at an edge between two ids
_ROWS = 1100  # so that programs of the weights' gradients take several turns


class Rows(NamedTuple):
    """The shape of a problem of attention."""

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


def attention(request: Request, fused: Callable | None = None) -> Iterator[Problem]:
    """Packed rows, all but the first with padding; `request.long` ones have pairs beyond the
    relative table's reach, which other loops take.
    """
    fused = fused or load("kernels.attention:fused_path")
    device, dtype, size = request[:3]
    for length, gathered, dropout, keep, batch, heads in LONG if request.long else SHORT:
        generator, queries = torch.Generator().manual_seed(length), gathered or length
        shapes: list[tuple[int, ...]]
        shapes = [(batch, count, heads, size) for count in (queries, length, length)]
        shapes += [(heads, GEOMETRY.num_slots, size) for one in request.terms if one]
        *values, grad = [torch.randn(*shape, generator=generator).to(device, dtype)
                         for shape in [*shapes, shapes[0]]]
        values[:3] = [x.transpose(1, 2) for x in values[:3]]
        segments = torch.ones(batch, length, dtype=torch.int32)
        segments[1:, length // 3 :] = 2
        segments[1:, length - 20 :] = 0
        columns = torch.randint(0, length, (batch, queries), generator=generator).to(device)
        options = dict(geometry=GEOMETRY, segments_BL=segments.to(device), dropout=dropout,
                       query_positions_BQ=columns if gathered else None,
                       seed=torch.ones(1, dtype=torch.int64, device=device))
        run = partial(_attend, request.terms, options)
        yield Problem(
            f"attention in {batch} rows of {queries} of {length} tokens",
            partial(run, partial(fused, keep_terms=True) if keep else fused),
            partial(run, reference_attention), values,
            " ".join(["queries keys values", *compress(TERMS, request.terms)]), grad)


def _attend(terms: tuple[bool, ...], options: dict, function: Callable, *values: Tensor) -> Tensor:
    tables = iter(values[3:])
    return function(*values[:3], *(next(tables) if one else None for one in terms), **options)


def cross_entropy(request: Request, fused: Callable | None = None) -> Iterator[Problem]:
    """The vocabulary loss, and the ids that are sampled."""
    # Under autocast the bias is in fp32, of which Triton compiles another binary.
    for temperature, valid, of_bias in ((1.0, 990, request.dtype), (0.7, 992, torch.float32)):
        yield from _loss_at(request, fused or load("kernels.fused_cross_entropy:"
                                                   "fused_linear_cross_entropy"),
                            temperature, valid, of_bias)


def _loss_at(request: Request, fused: Callable, temperature: float, valid: int,
             of_bias: torch.dtype) -> Iterator[Problem]:
    device, dtype, size = request[:3]
    generator, (rows, ids) = torch.Generator().manual_seed(size), (300, 1000)
    hidden, table, bias = (torch.randn(*shape, generator=generator)
                           for shape in ((rows, size), (ids, size), (ids,)))
    values = [hidden.to(device, dtype), (table * size**-0.5).to(device, dtype),
              bias.to(device, of_bias)]
    labels = torch.randint(0, valid, (rows,), generator=generator).to(device)
    uniforms = torch.rand(rows, generator=generator).to(device)

    def run(function: Callable, *values: Tensor) -> tuple[Tensor, Tensor]:
        loss, _, samples = function(
            *values, labels, uniforms, temperature=temperature, valid_vocab=valid)
        return loss, samples

    yield Problem(f"the loss at temperature {temperature}", lambda *x: run(fused, *x)[0],
                  lambda *x: run(linear_cross_entropy, *x)[0], values, "states table bias",
                  torch.ones((), device=device))
    right = run(linear_cross_entropy, *(x.float() for x in values))[1]
    yield Problem(f"the samples at temperature {temperature}",
                  lambda *x: (run(fused, *x)[1] == right).double().mean() >= _LEAST_SAME_SAMPLES,
                  lambda *_: torch.ones(()), values)


def norm(request: Request) -> Iterator[Problem]:
    """LayerNorm, dropout, GELU and sums of columns."""
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

    for what, dropout in (("LayerNorm", mask), ("LayerNorm without dropout", None)):
        yield Problem(what, partial(fused, dropout), partial(plain, dropout), values,
                      "sublayer state weight bias", grad)
    yield Problem("dropout", lambda x: fused_norm.dropout(x, mask), lambda x: x * kept,
                  values[:1], "state", grad)
    yield Problem("GELU", fused_norm.biased_gelu, lambda x, bias: F.gelu(x + bias),
                  [wide, inner_bias], "state bias", wide_grad)
    yield Problem("sums of columns", fused_norm.column_sums, lambda x: x.sum(0), [wide])
