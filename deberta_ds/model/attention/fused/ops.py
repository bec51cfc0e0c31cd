"""The kernels as torch operators: opaque to torch.compile, with fake kernels and autograd.

Shape legend: B batch, H heads, Q queries, L keys, D head size, C rows of an expanded table, W
columns of a plane.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deberta_ds.model.attention.dropout import drop_threshold
from deberta_ds.model.attention.fused import backward, forward, planes, tiles
from deberta_ds.model.attention.fused.bands import Band, make_band, padded
from deberta_ds.model.kernel_check import on_device_of

# query_facts int32 [4,B,Q]: segment, row column, first and last + 1 key column of the piece.
# key_facts int32 [3,B,L]: segment, first and last + 1 query column of the piece.

_CHUNK_ROWS = 512  # of a table's gradient that a program takes at once
_PROGRAMS = 1024  # wanted for a table's gradient: enough to fill any card


@torch.library.custom_op("deberta_ds::fused_attention", mutates_args=())
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor | None,
    query_table: Tensor | None,
    query_facts: Tensor,
    key_facts: Tensor,
    query_words: Tensor,
    key_words: Tensor,
    reach: int,
    scale: float,
    dropout: float,
    picked: bool,
) -> tuple[Tensor, Tensor]:
    """Return the context [B,Q,H,D] and the base-2 logsumexp [B,H,Q] in fp32.

    key_table, query_table: expanded tables [H,C,D]; words: dropout words (empty without dropout).
    reach: distance from which the relative table is constant. picked: queries are at the columns
    in query_facts, otherwise query i is at column i.
    """
    batch, heads, queries, size = q.shape
    band = make_band(reach, k.shape[2])
    out = torch.empty(batch, queries, heads, size, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    terms = _terms(q, k, key_table, query_table, query_facts, key_facts, band, picked, scale)
    tile = _tile(q, k, "forward", picked)
    forward.forward_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
        q, k, v, *(x.plane for x in terms), *(x.ends for x in terms), out, lse,
        *query_facts, key_facts[0], query_words, key_words,
        *_numbers(q, k, v, band, scale, dropout),
        **_constants(q, key_table, query_table, dropout, band, picked, tile),
    )  # fmt: skip
    return out, lse


@fused_attention.register_fake
def _(q, k, v, key_table, query_table, query_facts, key_facts, query_words, key_words, *_rest):
    batch, heads, queries, size = q.shape
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    return q.new_empty(batch, queries, heads, size), lse


@torch.library.custom_op("deberta_ds::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor | None,
    query_table: Tensor | None,
    query_facts: Tensor,
    key_facts: Tensor,
    query_words: Tensor,
    key_words: Tensor,
    reach: int,
    scale: float,
    dropout: float,
    picked: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v (laid out [B,L,H,D], as views [B,H,L,D]) and of both tables."""
    grad = grad.contiguous()
    batch, heads, queries, _ = q.shape
    keys, band = k.shape[2], make_band(reach, k.shape[2])
    delta = torch.empty_like(lse)
    dq, dk, dv = _row_gradients(q, k, v)
    terms = _terms(q, k, key_table, query_table, query_facts, key_facts, band, picked, scale)
    d_key, d_query = (_Term(torch.empty_like(x.plane), torch.empty_like(x.ends)) for x in terms)
    written = d_query.plane
    if picked and query_table is not None:
        written = q.new_empty(batch, heads, keys, queries)
    shared = (q, k, v, *(x.plane for x in terms), *(x.ends for x in terms), grad, lse, delta)
    facts = (key_facts[0], query_words, key_words, *_numbers(q, k, v, band, scale, dropout))
    tile = _tile(q, k, "query", picked)  # first: it also fills delta
    backward.query_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
        *shared, out, dq, d_key.plane, d_key.ends, *query_facts, *facts,
        **_constants(q, key_table, query_table, dropout, band, picked, tile),
    )  # fmt: skip
    tile = _tile(q, k, "key", picked)
    backward.key_kernel[(triton.cdiv(keys, tile.block_n), batch * heads)](
        *shared, dk, dv, written, d_query.ends, *query_facts[:2], *key_facts[1:], *facts,
        **_constants(q, key_table, query_table, dropout, band, picked, tile),
    )  # fmt: skip
    d_tables = [q.new_empty(0), q.new_empty(0)]
    if key_table is not None:
        d_tables[0] = _collect(d_key, q, key_table, dq, query_facts[1:], keys, band, picked)
    if query_table is not None:
        if picked:
            _spread(written, d_query.plane, query_facts[1], band)
        d_tables[1] = _collect(d_query, k, query_table, dk, key_facts, keys, band, False)
    return *(x.transpose(1, 2) for x in (dq, dk, dv)), *d_tables


@fused_attention_backward.register_fake
def _(grad, out, lse, q, k, v, key_table, query_table, *_rest):
    rows = [x.transpose(1, 2) for x in _row_gradients(q, k, v)]
    tables = (key_table, query_table)
    return *rows, *(q.new_empty(0) if t is None else torch.empty_like(t) for t in tables)


def _row_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return new tensors [B,rows,H,D] for the gradients of q, k and v."""
    return [
        torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
        for x in (q, k, v)
    ]


def _save(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.numbers = inputs[9:]


def _backward(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    with on_device_of(grad):
        grads = fused_attention_backward(grad, out, lse, *tensors, *ctx.numbers)
    d_tables = [None if t is None else g for t, g in zip(tensors[3:5], grads[3:], strict=True)]
    return *grads[:3], *d_tables, *[None] * 8


fused_attention.register_autograd(_backward, setup_context=_save)


class _Term(NamedTuple):
    """One position term, scaled, or the gradient of the unscaled one, for the flash kernels."""

    plane: Tensor  # [B,H,rows,W]: the pairs within the band
    ends: Tensor  # fp32 [2,B,H,rows]: the terms of all pairs before and behind it


def _terms(q, k, key_table, query_table, query_facts, key_facts, band, picked, scale):
    """Return the content-to-position and the position-to-content term."""
    keys = k.shape[2]
    return (
        _term(q, key_table, query_facts[1:], keys, band, picked, scale),
        _term(k, query_table, key_facts, keys, band, False, scale),
    )


def _term(
    x: Tensor, table: Tensor | None, facts, keys: int, band: Band, picked: bool, scale: float
) -> _Term:
    """Return scale x . T; placeholders for an absent term. facts: position, piece start, stop."""
    batch, heads, rows, _ = x.shape
    if table is None:
        return _Term(x.new_empty(0), x.new_empty(0, dtype=torch.float32))
    plane = x.new_empty(batch, heads, padded(rows), band.width(keys))
    ends = x.new_empty(2, batch, heads, rows if band.far else 0, dtype=torch.float32)
    tile = tiles.choose_product(_capability(x), x.shape[-1], "plane")
    planes.plane_kernel[(triton.cdiv(rows, tile.block_m), batch * heads)](
        x, table, plane, ends, *facts, *x.stride()[:3], rows, keys, heads, band.span, scale,
        PICKED=picked, FAR=band.far, **_product_constants(x, tile),
    )  # fmt: skip
    return _Term(plane, ends)


def _collect(d_term: _Term, x, table, dx, facts, keys: int, band: Band, picked: bool) -> Tensor:
    """Add the term's share to dx [B,rows,H,D], and return the table's gradient [H,C,D]."""
    batch, heads, rows, size = x.shape
    tile = tiles.choose_product(_capability(x), size, "rows")
    planes.row_gradient_kernel[(triton.cdiv(rows, tile.block_m), batch * heads)](
        d_term.plane, table, dx, d_term.ends, *facts, rows, keys, heads, band.span,
        PICKED=picked, FAR=band.far, **_product_constants(x, tile),
    )  # fmt: skip
    tile = tiles.choose_product(_capability(x), size, "table")
    blocks = triton.cdiv(table.shape[1], tile.block_n)
    units = batch * triton.cdiv(rows, _CHUNK_ROWS)
    splits = min(units, triton.cdiv(_PROGRAMS, blocks * heads))
    parts = torch.empty(splits, *table.shape, dtype=torch.float32, device=x.device)
    planes.table_gradient_kernel[(blocks, heads, splits)](
        d_term.plane, x, parts, *facts, *x.stride()[:3], batch, rows, keys, heads, band.span,
        PICKED=picked, CHUNK=_CHUNK_ROWS, **_product_constants(x, tile),
    )  # fmt: skip
    d_table = parts.sum(0)
    if band.far:
        ends = torch.einsum("ebhr,bhrd->hed", d_term.ends.to(x.dtype), x)
        d_table[:, :: table.shape[1] - 1] += ends
    return d_table.to(x.dtype)


def _spread(d_scores: Tensor, d_plane: Tensor, positions: Tensor, band: Band) -> None:
    """Fill the plane's gradient from the score gradients [B,H,L,Q] of picked queries."""
    batch, heads, keys, queries = d_scores.shape
    tile = tiles.choose_product(_capability(d_scores), 64, "spread")
    planes.spread_kernel[(triton.cdiv(keys, tile.block_m), batch * heads)](
        d_scores, d_plane, positions, queries, keys, heads, band.span,
        BR=tile.block_m, BC=tile.block_n, PRECISION=_precision(d_scores),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _tile(q: Tensor, k: Tensor, direction: str, picked: bool) -> tiles.Tile:
    longest = max(q.shape[2], k.shape[2])
    return tiles.choose(_capability(q), q.shape[-1], longest, direction, picked)


def _numbers(q, k, v, band: Band, scale: float, dropout: float) -> tuple:
    """Return the scalar arguments that the flash kernels share, in order."""
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = (q.shape[2], k.shape[2], q.shape[1], band.span)
    return *strides, *sizes, scale, 1 / (1 - dropout), drop_threshold(dropout)


def _constants(q, key_table, query_table, dropout, band, picked, tile: tiles.Tile) -> dict:
    return {
        "HAS_KEY_TERM": key_table is not None,
        "HAS_QUERY_TERM": query_table is not None,
        "DROPOUT": dropout > 0,
        "FAR": band.far,
        "PICKED": picked,
        "D": q.shape[-1],
        "BM": tile.block_m,
        "BN": tile.block_n,
        "PRECISION": _precision(q),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _product_constants(x: Tensor, tile: tiles.Tile) -> dict:
    return {
        "D": x.shape[-1],
        "BR": tile.block_m,
        "BC": tile.block_n,
        "PRECISION": _precision(x),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
