"""The kernels as torch operators: opaque to torch.compile, with fake kernels and autograd.

Shape legend: B batch, H heads, Q queries, L keys, D head size, C rows of an expanded table, W
columns of a plane.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deberta_ds.model.attention.band import Band, make_band, padded
from deberta_ds.model.attention.dropout import drop_threshold, word_stream
from deberta_ds.model.kernels.attention import backward, forward, masks, planes, tiles
from deberta_ds.model.kernels.kernel_check import on_device_of

# query_facts int32 [4,B,Q]: segment, row column, first and last + 1 key column of the piece.
# key_facts int32 [5,B,L]: segment, first and last + 1 query column of the piece; and of all pieces
# that have the column between their ends.

_CHUNK_ROWS = 512  # of a table's gradient that a program takes at once
_WORDS, _DELTA_ROWS = 256, 64  # of a program
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
    seed: int,
    reach: int,
    scale: float,
    dropout: float,
    picked: bool,
    keep: bool,
) -> list[Tensor]:
    """Return the context [B,Q,H,D], the base-2 logsumexp [B,H,Q] in fp32, and for backward the
    dropout words of queries and keys, both planes and both ends (see `_empty_results`).

    key_table, query_table: expanded tables [C,H,D], contiguous. reach: distance from which the
    relative table is constant. picked: queries are at the columns in query_facts, otherwise query i
    is at column i. keep: return planes and ends; otherwise they are empty, and backward computes
    them again.
    """
    batch, heads, queries, _ = q.shape
    keys, band = k.shape[2], make_band(reach, k.shape[2])
    results = _empty_results(q, k, key_table, query_table, dropout, band, keep)
    out, lse, *words = results[:4]
    if dropout > 0:
        programs = (triton.cdiv(max(queries, keys), _WORDS), batch * heads)
        masks.words_kernel[programs](*words, word_stream(seed), queries, keys, BLOCK=_WORDS)
    terms = _terms(q, k, key_table, query_table, query_facts, key_facts, band, picked, scale)
    tile = _tile(q, k, "forward", picked, band)
    forward.forward_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
        q, k, v, *(x.plane for x in terms), *(x.ends for x in terms), out, lse,
        *query_facts, key_facts[0], *words, *_numbers(q, k, v, band, scale, dropout),
        **_constants(q, key_table, query_table, dropout, band, picked, tile),
    )
    if keep:
        results[4:] = [terms[0].plane, terms[1].plane, terms[0].ends, terms[1].ends]
    return results


@fused_attention.register_fake
def _(q, k, v, key_table, query_table, query_facts, key_facts, seed, reach, _scale, dropout,
      _picked, keep):
    band = make_band(reach, k.shape[2])
    results = _empty_results(q, k, key_table, query_table, dropout, band, keep)
    if keep:
        made = [_empty_term(x, table, k.shape[2], band)
                for x, table in ((q, key_table), (k, query_table))]
        results[4:] = [made[0].plane, made[1].plane, made[0].ends, made[1].ends]
    return results


def _empty_results(q, k, key_table, query_table, dropout, band, keep) -> list[Tensor]:
    """Return what `fused_attention` returns, not yet filled; without planes."""
    batch, heads, queries, size = q.shape
    sides = (queries, k.shape[2]) if dropout > 0 else (0, 0)
    words = [q.new_empty(batch, heads, rows, dtype=torch.int32) for rows in sides]
    single = dict(dtype=torch.float32)
    return [
        q.new_empty(batch, queries, heads, size), q.new_empty(batch, heads, queries, **single),
        *words, q.new_empty(0), q.new_empty(0), q.new_empty(0, **single),
        q.new_empty(0, **single),
    ]


@torch.library.custom_op("deberta_ds::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor,
    results: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor | None,
    query_table: Tensor | None,
    query_facts: Tensor,
    key_facts: Tensor,
    reach: int,
    scale: float,
    dropout: float,
    picked: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v (laid out [B,L,H,D], as views [B,H,L,D]) and of both tables."""
    grad = grad.contiguous()
    batch, heads, queries, size = q.shape
    keys, band = k.shape[2], make_band(reach, k.shape[2])
    whole = not picked  # five products a tile, see `backward`
    out, lse, *words = results[:4]
    delta = torch.empty_like(lse)
    dq, dk, dv = _row_gradients(q, k, v)
    if keep:
        terms = [_Term(*results[4::2]), _Term(*results[5::2])]
    else:
        terms = _terms(q, k, key_table, query_table, query_facts, key_facts, band, picked, scale)
    d_key = _empty_gradient(q, key_table is not None or whole, keys, band)
    d_query = _empty_gradient(k, query_table is not None, keys, band)
    written = d_query.plane
    if picked and query_table is not None:
        written = q.new_empty(batch, heads, keys, queries)
    shared = (q, k, v, *(x.plane for x in terms), *(x.ends for x in terms), grad, lse, delta)
    facts = (key_facts[0], *words, *_numbers(q, k, v, band, scale, dropout))
    settings = (q, key_table, query_table, dropout, band, picked)
    if whole and not band.far:
        backward.delta_kernel[(triton.cdiv(queries, _DELTA_ROWS), batch * heads)](
            grad, out, delta, queries, heads, D=size, BM=_DELTA_ROWS
        )
    else:  # first: it also fills delta
        tile = _tile(q, k, "query", picked, band)
        backward.query_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
            *shared, out, dq, d_key.plane, d_key.ends, *query_facts, *facts,
            **_constants(*settings, tile),
        )
    tile = _tile(q, k, "key", picked, band)
    backward.key_kernel[(triton.cdiv(keys, tile.block_n), batch * heads)](
        *shared, dk, dv, d_key.plane, written, d_query.ends, *query_facts[:2],
        *key_facts[3:5] if whole else key_facts[1:3], *facts,
        WHOLE=whole, **_constants(*settings, tile),
    )
    d_tables = [q.new_empty(0), q.new_empty(0)]
    if key_table is not None or whole:
        d_tables[0] = _collect(d_key, q, key_table, dq, query_facts[1:], k, band, picked, whole)
    if query_table is not None:
        if picked:
            _spread(written, d_query.plane, query_facts[1], band)
        d_tables[1] = _collect(d_query, k, query_table, dk, key_facts[:3], k, band, False, False)
    return *(x.transpose(1, 2) for x in (dq, dk, dv)), *d_tables


@fused_attention_backward.register_fake
def _(grad, results, q, k, v, key_table, query_table, *_rest):
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
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.numbers = inputs[8:]
    ctx.set_materialize_grads(False)  # nothing but the context is read: no zeros for the rest
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grads):
    *results, q, k, v, key_table, query_table, query_facts, key_facts = ctx.saved_tensors
    tensors = (q, k, v, key_table, query_table, query_facts, key_facts)
    with on_device_of(q):
        found = fused_attention_backward(grads[0], results, *tensors, *ctx.numbers)
    tables = (key_table, query_table)
    d_tables = [None if t is None else g for t, g in zip(tables, found[3:], strict=True)]
    return *found[:3], *d_tables, *[None] * 8


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
        _term(k, query_table, key_facts[:3], keys, band, False, scale),
    )


def _term(
    x: Tensor, table: Tensor | None, facts, keys: int, band: Band, picked: bool, scale: float
) -> _Term:
    """Return scale x . T; placeholders for an absent term. facts: position, piece start, stop."""
    batch, heads, rows, _ = x.shape
    if table is None:
        return _empty_term(x, table, keys, band)
    plane, ends = _empty_term(x, table, keys, band)
    tile = tiles.choose_product(_capability(x.device), x.shape[-1], "plane")
    planes.plane_kernel[(triton.cdiv(rows, tile.block_m), batch * heads)](
        x, table, plane, ends, *facts, *x.stride()[:3], rows, keys, heads, band.span, scale,
        PICKED=picked, FAR=band.far, **_product_constants(x, tile),
    )
    return _Term(plane, ends)


def _empty_term(x: Tensor, table: Tensor | None, keys: int, band: Band) -> _Term:
    """Return a term that is not yet filled; placeholders where there is none."""
    batch, heads, rows, _ = x.shape
    if table is None:
        return _Term(x.new_empty(0), x.new_empty(0, dtype=torch.float32))
    plane = x.new_empty(batch, heads, padded(rows), band.width(keys))
    return _Term(plane, _empty_ends(x, band))


def _empty_gradient(x: Tensor, wanted: bool, keys: int, band: Band) -> _Term:
    """Return a plane's gradient that is not yet filled: see `bands.skewed_shape`."""
    batch, heads, rows, _ = x.shape
    if not wanted:
        return _Term(x.new_empty(0), x.new_empty(0, dtype=torch.float32))
    plane = x.new_empty(batch, heads, padded(rows), 2 * band.radius(keys))
    return _Term(plane, _empty_ends(x, band))


def _empty_ends(x: Tensor, band: Band) -> Tensor:
    batch, heads, rows, _ = x.shape
    return x.new_empty(2, batch, heads, rows if band.far else 0, dtype=torch.float32)


def _collect(d_term: _Term, x, table: Tensor | None, dx, facts, k: Tensor, band: Band,
             picked: bool, content: bool) -> Tensor:
    """Add the term's share to dx [B,rows,H,D], and return the table's gradient [C,H,D].

    content: the products of the score gradients and the keys, too.
    """
    batch, heads, rows, size = x.shape
    keys = k.shape[2]
    tile = tiles.choose_product(_capability(x.device), size, "rows")
    planes.row_gradient_kernel[(triton.cdiv(rows, tile.block_m), batch * heads)](
        d_term.plane, k if table is None else table, k, dx, d_term.ends, *facts,
        *k.stride()[:3], rows, keys, heads, band.span, TERM=table is not None, CONTENT=content,
        PICKED=picked, FAR=band.far, **_product_constants(x, tile),
    )
    if table is None:
        return x.new_empty(0)
    tile = tiles.choose_product(_capability(x.device), size, "table")
    blocks = triton.cdiv(len(table), tile.block_n)
    units = batch * triton.cdiv(rows, _CHUNK_ROWS)
    splits = min(units, triton.cdiv(_PROGRAMS, blocks * heads))
    parts = torch.empty(splits, *table.shape, dtype=torch.float32, device=x.device)
    planes.table_gradient_kernel[(blocks, heads, splits)](
        d_term.plane, x, parts, *facts, *x.stride()[:3], batch, rows, keys, heads, band.span,
        PICKED=picked, CHUNK=_CHUNK_ROWS, **_product_constants(x, tile),
    )
    d_table = parts.sum(0)
    if band.far:
        d_table[:: len(table) - 1] += torch.einsum("ebhr,bhrd->ehd", d_term.ends.to(x.dtype), x)
    return d_table.to(x.dtype)


def _spread(d_scores: Tensor, d_plane: Tensor, positions: Tensor, band: Band) -> None:
    """Fill the plane's gradient from the score gradients [B,H,L,Q] of picked queries."""
    batch, heads, keys, queries = d_scores.shape
    tile = tiles.choose_product(_capability(d_scores.device), 64, "spread")
    planes.spread_kernel[(triton.cdiv(keys, tile.block_m), batch * heads)](
        d_scores, d_plane, positions, queries, keys, heads, band.span,
        BR=tile.block_m, BC=tile.block_n, PRECISION=_precision(d_scores),
        num_warps=tile.warps, num_stages=tile.stages,
    )


@lru_cache  # asked at nearly every launch
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _tile(q: Tensor, k: Tensor, direction: str, picked: bool, band: Band) -> tiles.Tile:
    longest = max(q.shape[2], k.shape[2])
    return tiles.choose(_capability(q.device), q.shape[-1], longest, direction, picked, band.far)


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
