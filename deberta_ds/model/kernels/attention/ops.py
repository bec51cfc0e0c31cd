"""Attention by the kernels, forward and backward: what is launched, and on which tensors.

Shape legend: B batch, H heads, Q queries, L keys, D head size, C rows of an expanded table, W
columns of a bias matrix.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds.model.attention.dropout import DIGITS, WORD_KEYS, drop_threshold
from deberta_ds.model.attention.geometry import Band, make_band, padded
from deberta_ds.model.kernels.attention import backward, blocks, forward, position_bias
from deberta_ds.model.kernels.operators import on_device_of, operator

# query_facts int32 [4,B,Q]: segment, row column, first and last + 1 key column of the segment.
# key_facts int32 [7,B,L]: segment, first and last + 1 query column of the segment; the same of all
# segments that enclose the column, and of neighbors of one segment.

TILES = Path(__file__).with_name("tiles.json")  # to refresh it: docs/explanation/attention.md
_LONG_ROW = 1024
_CHUNK_ROWS = 512  # of a table's gradient that a program takes at once
_DROPPED_ROWS, _DROPPED_WORDS, _ROW_DOT_ROWS = 64, 16, 64  # of a program
_PROGRAMS = 1024  # wanted for a table's gradient: enough to fill any card


class FusedAttention(torch.autograd.Function):
    """The context [B,Q,H,D]; the arguments are those of `attention_forward`."""

    @staticmethod
    def forward(ctx, *inputs):
        with on_device_of(inputs[0]):
            results = attention_forward(*inputs)
        ctx.save_for_backward(*results, *inputs[:8])
        ctx.numbers = inputs[8:]
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *results, q, k, v, c2p_table, p2c_table, query_facts, key_facts, seed = ctx.saved_tensors
        tensors = (q, k, v, c2p_table, p2c_table, query_facts, key_facts, seed)
        with on_device_of(q):
            found = attention_backward(grad, results, *tensors, *ctx.numbers)
        tables = (c2p_table, p2c_table)
        d_tables = [None if t is None else g for t, g in zip(tables, found[3:], strict=True)]
        return *found[:3], *d_tables, *[None] * 8


def _fake_forward(q, k, v, c2p_table, p2c_table, query_facts, key_facts, seed, reach, _scale,
                  dropout, _gathered, keep):
    results, band, tables = _empty_results(q), make_band(reach, k.shape[2]), (c2p_table, p2c_table)
    if keep:
        made = [_empty_term(x, t, k.shape[2], band) for x, t in zip((q, k), tables, strict=True)]
        results[2:] = [*_kept(made, keep, *tables), _empty_words(q, k.shape[2], dropout)]
    return results


@operator("fused_attention", _fake_forward)
def attention_forward(q: Tensor, k: Tensor, v: Tensor, c2p_table: Tensor | None,
                      p2c_table: Tensor | None, query_facts: Tensor, key_facts: Tensor,
                      seed: Tensor | None, reach: int, scale: float, dropout: float,
                      gathered: bool, keep: bool) -> list[Tensor]:
    """Return the context [B,Q,H,D], the base-2 logsumexp [B,H,Q] in fp32, and what
    backward keeps: the sum of the bias matrices (or the one there is, in its place), both edge
    terms and the dropped pairs.

    c2p_table, p2c_table: expanded tables [C,H,D], contiguous. reach: distance from which the
    relative table is constant. seed: int64 [1], of dropout. gathered: queries are at the columns in
    query_facts, otherwise query i is at column i. keep: return what backward keeps; otherwise it is
    empty, and backward recomputes it. Not with gathered queries, which may share elements of a bias
    matrix.
    """
    batch, heads, queries, _ = q.shape
    keys, band, tables = k.shape[2], make_band(reach, k.shape[2]), (c2p_table, p2c_table)
    results = _empty_results(q)
    dropped = _dropped(q, keys, query_facts, seed, dropout)
    terms = _terms(q, k, c2p_table, p2c_table, query_facts, key_facts, band, gathered, scale)
    tile = _tile(q, k, "forward", gathered, band)
    forward.forward_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
        q, k, v, *(x.bias for x in terms), *(x.edges for x in terms),
        *results[:2], *query_facts, key_facts[0], *key_facts[5:],
        dropped, *_numbers(q, k, v, band, scale, dropout), SUMMED=_summed(keep, *tables),
        **_constants(q, *tables, dropout, band, gathered, tile))
    return [*results[:2], *_kept(terms, keep, *tables), dropped] if keep else results


def _summed(keep: bool, c2p_table: Tensor | None, p2c_table: Tensor | None) -> bool:
    """Return whether the forward kernel leaves the sum of both terms in the first one's place."""
    return keep and c2p_table is not None and p2c_table is not None


def _kept(terms, keep, c2p_table, p2c_table) -> list[Tensor]:
    c2p, p2c = terms
    single = c2p.bias.new_empty(0) if _summed(keep, c2p_table, p2c_table) else p2c.bias
    return [c2p.bias, single, c2p.edges, p2c.edges]


def _empty_results(q: Tensor) -> list[Tensor]:
    """Return what `attention_forward` returns, not yet filled; without position_bias."""
    batch, heads, queries, size = q.shape
    single = dict(dtype=torch.float32)
    return [q.new_empty(batch, queries, heads, size), q.new_empty(batch, heads, queries, **single),
            q.new_empty(0), q.new_empty(0), q.new_empty(0, **single), q.new_empty(0, **single),
            q.new_empty(0, dtype=torch.int32)]


def _fake_backward(grad, results, q, k, v, c2p_table, p2c_table, *_rest):
    rows = [x.transpose(1, 2) for x in _row_gradients(q, k, v)]
    tables = (c2p_table, p2c_table)
    return *rows, *(q.new_empty(0) if t is None else torch.empty_like(t) for t in tables)


@operator("fused_attention_backward", _fake_backward)
def attention_backward(grad: Tensor, results: list[Tensor], q: Tensor, k: Tensor, v: Tensor,
                       c2p_table: Tensor | None, p2c_table: Tensor | None, query_facts: Tensor,
                       key_facts: Tensor, seed: Tensor | None, reach: int, scale: float,
                       dropout: float, gathered: bool, keep: bool
                      ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v (laid out [B,L,H,D], as views [B,H,L,D]) and of both tables."""
    grad = grad.contiguous()
    batch, heads, queries, size = q.shape
    keys, band = k.shape[2], make_band(reach, k.shape[2])
    whole = not gathered  # five matmuls per tile, see `backward`
    out, lse, *kept, dropped = results
    row_dot = torch.empty_like(lse)
    dq, dk, dv = _row_gradients(q, k, v)
    if keep:
        terms = [_Term(*kept[::2]), _Term(*kept[1::2])]
    else:
        terms = _terms(q, k, c2p_table, p2c_table, query_facts, key_facts, band, gathered, scale)
        dropped = _dropped(q, keys, query_facts, seed, dropout)
    d_c2p = _empty_gradient(q, c2p_table is not None or whole, keys, band)
    d_p2c = _empty_gradient(k, p2c_table is not None, keys, band)
    written = d_p2c.bias
    if gathered and p2c_table is not None:
        written = q.new_empty(batch, heads, keys, queries)
    shared = (q, k, v, *(x.bias for x in terms), *(x.edges for x in terms), grad, lse, row_dot)
    facts = (key_facts[0], dropped, *_numbers(q, k, v, band, scale, dropout))
    settings = (q, c2p_table, p2c_table, dropout, band, gathered)
    if whole and not band.far:
        backward.row_dot_kernel[(triton.cdiv(queries, _ROW_DOT_ROWS), batch * heads)](
            grad, out, row_dot, queries, heads, D=size, BM=_ROW_DOT_ROWS)
    else:  # first: it also fills row_dot
        tile = _tile(q, k, "query", gathered, band)
        backward.query_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
            *shared, out, dq, d_c2p.bias, d_c2p.edges, *query_facts, *facts,
            **_constants(*settings, tile))
    tile = _tile(q, k, "key", gathered, band)
    backward.key_kernel[(triton.cdiv(keys, tile.block_n), batch * heads)](
        *shared, dk, dv, d_c2p.bias, written, d_p2c.edges, *query_facts[:2],
        *key_facts[3:5] if whole else key_facts[1:3], *facts,
        WHOLE=whole, SUMMED=_summed(keep, c2p_table, p2c_table), **_constants(*settings, tile))
    d_tables = [q.new_empty(0), q.new_empty(0)]
    if c2p_table is not None or whole:
        d_tables[0] = _collect(d_c2p, q, c2p_table, dq, query_facts[1:], k, band, gathered, whole)
    if p2c_table is not None:
        if gathered:
            _spread(written, d_p2c.bias, query_facts[1], band)
        d_tables[1] = _collect(d_p2c, k, p2c_table, dk, key_facts[:3], k, band, False, False)
    return *(x.transpose(1, 2) for x in (dq, dk, dv)), *d_tables


def _dropped(q: Tensor, keys: int, query_facts: Tensor, seed: Tensor | None, dropout: float
             ) -> Tensor:
    """Return the words of dropped pairs, see `blocks.dropped_kernel`; without dropout nothing."""
    words, (batch, heads, queries, _) = _empty_words(q, keys, dropout), q.shape
    if dropout:
        blocks.dropped_kernel[(triton.cdiv(queries, _DROPPED_ROWS), batch * heads)](
            words, *query_facts[2:], seed, drop_threshold(dropout), queries, keys, heads,
            DIGITS=DIGITS, BR=_DROPPED_ROWS, BW=_DROPPED_WORDS)
    return words


def _empty_words(q: Tensor, keys: int, dropout: float) -> Tensor:
    shape = (padded(keys) // WORD_KEYS, padded(q.shape[2])) if dropout else (0, 0)
    return q.new_empty(*q.shape[:2], *shape, dtype=torch.int32)


def _row_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return new tensors [B,rows,H,D] for the gradients of q, k and v."""
    return [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
            for x in (q, k, v)]


class _Term(NamedTuple):
    """One position term, scaled, or the gradient of the unscaled one, for the flash kernels."""

    bias: Tensor  # [B,H,rows,W]: the pairs within the band
    edges: Tensor  # fp32 [2,B,H,rows]: the terms of all pairs before and behind it


def _terms(q, k, c2p_table, p2c_table, query_facts, key_facts, band, gathered, scale):
    """Return the content-to-position and the position-to-content term."""
    keys = k.shape[2]
    return (_term(q, c2p_table, query_facts[1:], keys, band, gathered, scale),
            _term(k, p2c_table, key_facts[:3], keys, band, False, scale))


def _term(x: Tensor, table: Tensor | None, facts, keys: int, band: Band, gathered: bool,
          scale: float) -> _Term:
    """Return scale x . T; placeholders for an absent term. facts: position, segment start, stop."""
    batch, heads, rows, _ = x.shape
    if table is None:
        return _empty_term(x, table, keys, band)
    bias, edges = _empty_term(x, table, keys, band)
    tile = choose_product_tile(_capability(x.device), x.shape[-1], "bias")
    position_bias.bias_kernel[(triton.cdiv(rows, tile.block_m), batch * heads)](
        x, table, bias, edges, *facts, *x.stride()[:3], rows, keys, heads, band.span, scale,
        GATHERED=gathered, FAR=band.far, **_product_constants(x, tile))
    return _Term(bias, edges)


def _empty_term(x: Tensor, table: Tensor | None, keys: int, band: Band) -> _Term:
    """Return a term that is not yet filled; placeholders where there is none."""
    batch, heads, rows, _ = x.shape
    if table is None:
        return _Term(x.new_empty(0), x.new_empty(0, dtype=torch.float32))
    bias = x.new_empty(batch, heads, padded(rows), band.width(keys))
    return _Term(bias, _empty_edges(x, band))


def _empty_gradient(x: Tensor, wanted: bool, keys: int, band: Band) -> _Term:
    """Return a bias's gradient that is not yet filled: see `blocks.skewed_shape`."""
    batch, heads, rows, _ = x.shape
    if not wanted:
        return _Term(x.new_empty(0), x.new_empty(0, dtype=torch.float32))
    bias = x.new_empty(batch, heads, padded(rows), 2 * band.radius(keys))
    return _Term(bias, _empty_edges(x, band))


def _empty_edges(x: Tensor, band: Band) -> Tensor:
    batch, heads, rows, _ = x.shape
    return x.new_empty(2, batch, heads, rows if band.far else 0, dtype=torch.float32)


def _collect(d_term: _Term, x, table: Tensor | None, dx, facts, k: Tensor, band: Band,
             gathered: bool, content: bool) -> Tensor:
    """Add the term's part to dx [B,rows,H,D], and return the table's gradient [C,H,D].

    content: the products of the score gradients and the keys, too.
    """
    batch, heads, rows, size = x.shape
    keys = k.shape[2]
    tile = choose_product_tile(_capability(x.device), size, "rows")
    position_bias.row_gradient_kernel[(triton.cdiv(rows, tile.block_m), batch * heads)](
        d_term.bias, k if table is None else table, k, dx, d_term.edges, *facts,
        *k.stride()[:3], rows, keys, heads, band.span, TERM=table is not None, CONTENT=content,
        GATHERED=gathered, FAR=band.far, **_product_constants(x, tile))
    if table is None:
        return x.new_empty(0)
    tile = choose_product_tile(_capability(x.device), size, "table")
    blocks = triton.cdiv(len(table), tile.block_n)
    units = batch * triton.cdiv(rows, _CHUNK_ROWS)
    splits = min(units, triton.cdiv(_PROGRAMS, blocks * heads))
    parts = torch.empty(splits, *table.shape, dtype=torch.float32, device=x.device)
    position_bias.table_gradient_kernel[(blocks, heads, splits)](
        d_term.bias, x, parts, *facts, *x.stride()[:3], batch, rows, keys, heads, band.span,
        GATHERED=gathered, CHUNK=_CHUNK_ROWS, **_product_constants(x, tile))
    d_table = parts.sum(0)
    if band.far:
        d_table[:: len(table) - 1] += torch.einsum("ebhr,bhrd->ehd", d_term.edges.to(x.dtype), x)
    return d_table.to(x.dtype)


def _spread(d_scores: Tensor, d_bias: Tensor, positions: Tensor, band: Band) -> None:
    """Fill the bias's gradient from the score gradients [B,H,L,Q] of gathered queries."""
    batch, heads, keys, queries = d_scores.shape
    tile = choose_product_tile(_capability(d_scores.device), 64, "spread")
    position_bias.spread_kernel[(triton.cdiv(keys, tile.block_m), batch * heads)](
        d_scores, d_bias, positions, queries, keys, heads, band.span,
        BR=tile.block_m, BC=tile.block_n, PRECISION=_precision(d_scores),
        num_warps=tile.warps, num_stages=tile.stages)


class Tile(NamedTuple):
    """Query rows and key columns of a program's tile, and how Triton runs it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@lru_cache
def tile_table() -> dict:
    """Return {architecture: {head size: {class: {direction: [m, n, warps, stages]}}}}.

    class: "short" or "long" sequences, or "gathered" queries; next to them the kernels of the bias
    matrices. "sm100" overrides single "sm90" entries; it is not keyed by head size.
    """
    return json.loads(TILES.read_text())


@lru_cache
def choose_tile(capability: tuple[int, int], size: int, length: int, direction: str, gathered: bool,
                far: bool = False) -> Tile:
    """Return the tile of a flash kernel for a device capability, head size and row length.

    direction: "forward", "query" (backward by query blocks) or "key" (backward by key blocks).
    gathered: gathered queries, which read the position terms pair by pair. far: pairs
    beyond the band, whose loops take registers, so that tiles for short rows would spill.
    """
    architecture = _architecture(capability)
    length_class = "gathered" if gathered else "long" if far or length > _LONG_ROW else "short"
    return Tile(*tile_table()[architecture][str(max(size, 32))][length_class][direction])


@lru_cache
def choose_product_tile(capability: tuple[int, int], size: int, kind: str) -> Tile:
    """Return the tile of a product with a bias matrix: rows, columns or table rows, warps, stages.

    kind: "bias" (write it), "rows" and "table" (their gradients), "spread" (gathered queries).
    """
    own = tile_table()["sm100"] if (10, 0) <= capability < (12, 0) else {}
    return Tile(*own.get(kind, tile_table()[_architecture(capability)][str(max(size, 32))][kind]))


def _architecture(capability: tuple[int, int]) -> str:
    large = (9, 0) <= capability < (12, 0)  # sm_120 has the shared memory of sm_86
    return "sm90" if large else "sm80"


@lru_cache  # asked at nearly every launch
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _tile(q: Tensor, k: Tensor, direction: str, gathered: bool, band: Band) -> Tile:
    longest = max(q.shape[2], k.shape[2])
    return choose_tile(_capability(q.device), q.shape[-1], longest, direction, gathered, band.far)


def _numbers(q, k, v, band: Band, scale: float, dropout: float) -> tuple:
    """Return the scalar arguments that the flash kernels share, in order."""
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = (q.shape[2], k.shape[2], q.shape[1], band.span)
    return *strides, *sizes, scale, 1 / (1 - dropout)


def _constants(q, c2p_table, p2c_table, dropout, band, gathered, tile: Tile) -> dict:
    return {"HAS_C2P": c2p_table is not None, "HAS_P2C": p2c_table is not None,
            "DROPOUT": dropout > 0, "FAR": band.far, "GATHERED": gathered, "D": q.shape[-1],
            "BM": tile.block_m, "BN": tile.block_n, "PRECISION": _precision(q),
            "num_warps": tile.warps, "num_stages": tile.stages}


def _product_constants(x: Tensor, tile: Tile) -> dict:
    return {"D": x.shape[-1], "BR": tile.block_m, "BC": tile.block_n, "PRECISION": _precision(x),
            "num_warps": tile.warps, "num_stages": tile.stages}
