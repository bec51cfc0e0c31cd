"""Attention by the kernels, forward and backward: what is launched, and on which tensors.

Shape legend: B batch, H heads, Q queries, L keys, D head size, C rows of an expanded table, W
columns of a bias matrix.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds.model.attention.dropout import DIGITS, WORD_KEYS, drop_threshold
from deberta_ds.model.attention.geometry import GROUP_COLUMNS, Band, make_band, padded
from deberta_ds.model.kernels.attention import backward, blocks, forward, position_bias
from deberta_ds.model.kernels.attention.blocks import Bounds, Term, Vectors
from deberta_ds.model.kernels.attention.tiles import (
    COLUMN_TILES,
    Tile,
    capability_of,
    choose_tile,
    rows_tile,
)
from deberta_ds.model.kernels.operators import ceil_div, operator

# query_facts int32 [4,B,Q]: segment, row column, first and last + 1 key column of the segment.
# key_facts int32 [7,B,L]: segment, first and last + 1 query column of the segment; the same of all
# segments that enclose the column, and of neighbors of one segment.

_DROPPED_ROWS, _DROPPED_WORDS, _ROW_DOT_ROWS = 64, 16, 64  # of a program
_RESIDUES = 8  # of rows, see `position_bias`
LOG2_E = backward.LOG2_E.value
_PROGRAMS = 1024  # wanted for a table's gradient: enough to fill any card


class FusedAttention(torch.autograd.Function):
    """The context [B,Q,H,D]; the arguments are those of `attention_forward`."""

    @staticmethod
    def forward(ctx, *inputs):
        results = attention_forward(*inputs)
        ctx.save_for_backward(*results, *inputs[:9])
        ctx.numbers = inputs[9:]
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *results, q, k, v, c2p_table, p2c_table, p2c, query_facts, key_facts, seed = \
            ctx.saved_tensors
        given = (c2p_table, p2c_table, p2c)
        found = attention_backward(
            grad, results, q, k, v, *given, query_facts, key_facts, seed, *ctx.numbers)
        rest = [None if t is None else g for t, g in zip(given, found[3:], strict=True)]
        return *found[:3], *rest, *[None] * 7


def _fake_forward(q, k, v, c2p_table, p2c_table, p2c, query_facts, key_facts, seed, reach, _scale,
                  dropout, keep):
    results, band, gathered = _empty_results(q), make_band(reach, k.shape[2]), p2c is not None
    if keep or gathered:
        kinds = zip((q, k), _has(c2p_table, p2c_table, p2c), strict=True)
        edges = [_empty_edges(x, band, one and not gathered) for x, one in kinds]
        sums = _empty_sums(q, k, band, gathered)
        results[2:] = [sums, *edges, _empty_words(q, k.shape[2], dropout)]
    return results


@operator("fused_attention", _fake_forward)
def attention_forward(q: Tensor, k: Tensor, v: Tensor, c2p_table: Tensor | None,
                      p2c_table: Tensor | None, p2c: Tensor | None, query_facts: Tensor,
                      key_facts: Tensor, seed: Tensor | None, reach: int, scale: float,
                      dropout: float, keep: bool) -> list[Tensor]:
    """Return the context [B,Q,H,D], the base-2 logsumexp [B,H,Q] in fp32, and what backward keeps:
    the sum of the bias matrices by key, both edge terms and the dropped pairs.

    c2p_table, p2c_table: expanded tables [C,H,D], contiguous. p2c: of gathered queries, at the
    columns in query_facts: `gathered_bias` in place of p2c_table; otherwise query i is at column i.
    seed: int64 [1], of dropout. reach: distance from which the relative table is constant. keep:
    return what backward keeps, as gathered queries always do; otherwise it is empty, and backward
    recomputes it.
    """
    results, band = _empty_results(q), make_band(reach, k.shape[2])
    dropped = _dropped(q, k.shape[2], query_facts, seed, dropout)
    if p2c is None:
        terms = _terms(q, k, c2p_table, p2c_table, query_facts, key_facts, band, scale)
    else:
        terms = _gathered_terms(q, c2p_table, p2c, scale)
    sums = _sums(q, k, terms, band, p2c is not None) if keep or p2c is not None else results[2]
    _forward(q, k, v, terms, sums, results, query_facts, key_facts, dropped, band, scale, dropout,
             p2c is not None, sums.numel() > 0, False)
    kept = [sums, *(x.edges for x in terms), dropped] if sums.numel() else results[2:]
    return [*results[:2], *kept]


def _forward(q, k, v, terms, sums, results, query_facts, key_facts, dropped, band, scale, dropout,
             gathered: bool, keep: bool, only_sums: bool) -> None:
    tile, far = _tile(q, k, "forward", gathered, band), band.far and not gathered
    has = [term.bias.numel() > 0 for term in terms]
    forward.forward_kernel[(ceil_div(q.shape[2], tile.block_m), q.shape[0] * q.shape[1])](
        *map(_vectors, (q, k, v)), *terms, sums, *results[:2], *query_facts[:2],
        Bounds(*query_facts[2:]), key_facts[0], Bounds(*key_facts[3:5]), Bounds(*key_facts[5:]),
        dropped, *_numbers(q, k, band.span, scale * LOG2_E, dropout), KEEP=keep,
        ONLY_SUMS=only_sums, GATHERED=gathered, **_constants(q, has, dropout, far, tile))


def _has(c2p_table: Tensor | None, p2c_table: Tensor | None, p2c: Tensor | None = None
         ) -> tuple[bool, bool]:
    """Return which matrices there are: without terms one of zeros, which carries the masks."""
    return (c2p_table is not None or (p2c_table is None and p2c is None),
            p2c_table is not None or p2c is not None)


def _sums(q: Tensor, k: Tensor, terms, band: Band, gathered: bool) -> Tensor:
    """Return where the sum of both terms goes: over the second one, if nobody else reads that."""
    in_place = terms[1].bias.numel() and not gathered
    return terms[1].bias if in_place else _empty_sums(q, k, band, gathered)


def _empty_sums(q: Tensor, k: Tensor, band: Band, gathered: bool) -> Tensor:
    queries = padded(q.shape[2]) if gathered else band.width(k.shape[2])
    return q.new_empty(*k.shape[:2], padded(k.shape[2]), queries)


def _empty_results(q: Tensor) -> list[Tensor]:
    """Return what `attention_forward` returns, not yet filled; without what backward keeps."""
    batch, heads, queries, size = q.shape
    single = dict(dtype=torch.float32)
    return [q.new_empty(batch, queries, heads, size), q.new_empty(batch, heads, queries, **single),
            q.new_empty(0), q.new_empty(0, **single), q.new_empty(0, **single),
            q.new_empty(0, dtype=torch.int32)]


def _fake_backward(grad, results, q, k, v, c2p_table, p2c_table, p2c, *_rest):
    rows = [x.transpose(1, 2) for x in _row_gradients(q, k, v)]
    given = (c2p_table, p2c_table, p2c)
    return *rows, *(q.new_empty(0) if t is None else torch.empty_like(t) for t in given)


@operator("fused_attention_backward", _fake_backward)
def attention_backward(grad: Tensor, results: list[Tensor], q: Tensor, k: Tensor, v: Tensor,
                       c2p_table: Tensor | None, p2c_table: Tensor | None, p2c: Tensor | None,
                       query_facts: Tensor, key_facts: Tensor, seed: Tensor | None, reach: int,
                       scale: float, dropout: float, keep: bool
                      ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v (laid out [B,L,H,D], as views [B,H,L,D]), of both tables, and of
    `p2c` as `gathered_bias_backward` takes it.
    """
    grad, gathered = grad.contiguous(), p2c is not None
    (batch, heads, queries, size), keys, band = q.shape, k.shape[2], make_band(reach, k.shape[2])
    out, lse, sums, *edges, dropped = results
    row_dot = torch.empty_like(lse)
    dq, dk, dv = _row_gradients(q, k, v)
    if not (keep or gathered):
        terms = _terms(q, k, c2p_table, p2c_table, query_facts, key_facts, band, scale)
        dropped = _dropped(q, keys, query_facts, seed, dropout)
        sums, edges = _sums(q, k, terms, band, False), [x.edges for x in terms]
        _forward(q, k, v, terms, sums, (out, lse), query_facts, key_facts, dropped, band, scale,
                 dropout, False, True, True)
    far, has = band.far and not gathered, _has(c2p_table, p2c_table, p2c)
    span = max(padded(queries), padded(keys)) // GROUP_COLUMNS if gathered else band.span
    d_c2p = Term(q.new_empty(batch, heads, padded(queries), padded(keys) if gathered else
                              band.width(keys)), _empty_edges(q, band, not gathered))
    d_p2c = _empty_term(k, p2c_table is not None, keys, band)
    numbers, seen = _numbers(q, k, span, scale, dropout), Bounds(*query_facts[2:])
    vectors = [_vectors(x) for x in (q, k, v)]
    if far:  # first: it also fills row_dot
        tile = _tile(q, k, "query", False, band)
        backward.query_kernel[(ceil_div(queries, tile.block_m), batch * heads)](
            *vectors, *edges, grad, lse, row_dot, out, dq, d_c2p.edges, query_facts[0], seen,
            key_facts[0], dropped, *numbers,
            **_constants(q, has, dropout, None, tile))
    else:
        backward.row_dot_kernel[(ceil_div(queries, _ROW_DOT_ROWS), batch * heads)](
            grad, out, row_dot, queries, heads, D=size, BM=_ROW_DOT_ROWS)
    tile = _tile(q, k, "key", gathered, band)
    backward.key_kernel[(ceil_div(keys, tile.block_n), batch * heads)](
        *vectors, sums, *edges, grad, lse, row_dot, dk, dv, d_c2p.bias, d_p2c, query_facts[0],
        Bounds(*key_facts[3:5]), key_facts[0], dropped, *numbers, GATHERED=gathered,
        **_constants(q, (has[0], p2c_table is not None), dropout, far, tile))
    tile = choose_tile(capability_of(q.device), size, "content")
    backward.content_kernel[(ceil_div(queries, tile.block_m), batch * heads)](
        d_c2p.bias, vectors[1], dq, seen, queries, keys, heads, span, FAR=far,
        **_product_constants(q, tile))
    d_tables = [q.new_empty(0), q.new_empty(0)]
    if c2p_table is not None:
        d_tables[0] = (_collect_gathered if gathered else _collect)(
            d_c2p, q, c2p_table, dq, query_facts[1:], keys, band)
    if p2c_table is not None:
        d_tables[1] = _collect(d_p2c, k, p2c_table, dk, key_facts[:3], keys, band)
    rows = [x.transpose(1, 2) for x in (dq, dk, dv)]
    return *rows, *d_tables, d_c2p.bias if gathered else q.new_empty(0)


def _dropped(q: Tensor, keys: int, query_facts: Tensor, seed: Tensor | None, dropout: float
             ) -> Tensor:
    """Return the words of dropped pairs, see `blocks.dropped_kernel`; without dropout nothing."""
    words, (batch, heads, queries, _) = _empty_words(q, keys, dropout), q.shape
    if dropout:
        blocks.dropped_kernel[(ceil_div(queries, _DROPPED_ROWS), batch * heads)](
            words, Bounds(*query_facts[2:]), seed, drop_threshold(dropout), queries, keys, heads,
            DIGITS=DIGITS, BR=_DROPPED_ROWS, BW=_DROPPED_WORDS)
    return words


def _empty_words(q: Tensor, keys: int, dropout: float) -> Tensor:
    shape = (padded(keys) // WORD_KEYS, padded(q.shape[2])) if dropout else (0, 0)
    return q.new_empty(*q.shape[:2], *shape, dtype=torch.int32)


def _row_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return new tensors [B,rows,H,D] for the gradients of q, k and v."""
    return [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
            for x in (q, k, v)]


class GatheredBias(torch.autograd.Function):
    """The result of `gathered_bias`, with its arguments."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs[:4])
        ctx.reach = inputs[4]
        return gathered_bias(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # once: a checkpointed tensor is there for one reading
        found = gathered_bias_backward(grad, *saved, ctx.reach)
        return *found, *[None] * 4


def _empty_bias(k: Tensor, _p2c_table, query_facts: Tensor, *_rest) -> Tensor:
    return k.new_empty(*k.shape[:2], padded(query_facts.shape[2]), padded(k.shape[2]))


@operator("gathered_bias", _empty_bias)
def gathered_bias(k: Tensor, p2c_table: Tensor | None, query_facts: Tensor, key_facts: Tensor,
                  reach: int, scale: float) -> Tensor:
    """Return position to content of gathered queries, [B,H,Q,L] in whole groups; -inf where a query
    does not see a key. Without a table the rest is 0.
    """
    (batch, heads, keys, _), band = k.shape, make_band(reach, k.shape[2])
    term = _term(k, p2c_table, key_facts[1:3], band, scale)
    bias = _empty_bias(k, p2c_table, query_facts)
    tile = COLUMN_TILES["far columns" if band.far else "columns"]
    position_bias.columns_kernel[(bias.shape[2] // tile.block_m, batch * heads)](
        term, bias, *query_facts[:2], key_facts[0], query_facts.shape[2], keys, heads, band.span,
        HAS_BIAS=p2c_table is not None, FAR=band.far, BR=tile.block_m, BC=tile.block_n,
        num_warps=tile.warps)
    return bias


def _fake_bias_backward(_grad, k: Tensor, p2c_table: Tensor, *_rest) -> tuple[Tensor, Tensor]:
    return _row_gradients(k, k, k)[0].transpose(1, 2), torch.empty_like(p2c_table)


@operator("gathered_bias_backward", _fake_bias_backward)
def gathered_bias_backward(grad: Tensor, k: Tensor, p2c_table: Tensor, query_facts: Tensor,
                           key_facts: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of k, as a view of [B,L,H,D], and of the table.

    grad: of the unscaled term, as `attention_backward` returns it.
    """
    (batch, heads, keys, _), band = k.shape, make_band(reach, k.shape[2])
    d_term = _empty_term(k, True, keys, band)
    tile = choose_tile(capability_of(k.device), 64, "spread")
    position_bias.spread_kernel[(ceil_div(keys, tile.block_m), batch * heads)](
        grad.contiguous(), d_term, query_facts[1], query_facts.shape[2], keys, heads, band.span,
        FAR=band.far, BR=tile.block_m, BC=tile.block_n, PRECISION=_precision(k),
        num_warps=tile.warps, num_stages=tile.stages)
    dk = _row_gradients(k, k, k)[0].zero_()
    d_table = _collect(d_term, k, p2c_table, dk, key_facts[:3], keys, band)
    return dk.transpose(1, 2), d_table


def _terms(q, k, c2p_table, p2c_table, query_facts, key_facts, band, scale) -> tuple[Term, Term]:
    """Return the content-to-position and the position-to-content term."""
    c2p = _term(q, c2p_table, query_facts[2:], band, scale)
    if c2p_table is None and p2c_table is None:  # for the masks
        c2p = Term(*(x.zero_() for x in _empty_term(q, True, k.shape[2], band)))
    return c2p, _term(k, p2c_table, key_facts[1:3], band, scale)


def _term(x: Tensor, table: Tensor | None, facts, band: Band, scale: float) -> Term:
    """Return scale x . T in powers of two; placeholders for an absent term. facts: START, STOP."""
    batch, heads, rows, size = x.shape
    term = _empty_term(x, table is not None, rows, band)
    if table is not None:
        tile = rows_tile(x, "bias")
        position_bias.bias_kernel[_rows_grid(x, tile)](
            _vectors(x), table, term, Bounds(*facts), rows, heads, band.span, scale * LOG2_E,
            FAR=band.far, **_product_constants(x, tile))
    return term


def _empty_term(x: Tensor, wanted: bool, keys: int, band: Band) -> Term:
    """Return a term, or its gradient, that is not yet filled; placeholders where there is none."""
    shape = (*x.shape[:2], padded(x.shape[2]), band.width(keys)) if wanted else (0,)
    return Term(x.new_empty(shape), _empty_edges(x, band, wanted))


def _empty_edges(x: Tensor, band: Band, wanted: bool) -> Tensor:
    batch, heads, rows, _ = x.shape
    shape = (2, batch, heads, rows if band.far else 0) if wanted else (0,)
    return x.new_empty(shape, dtype=torch.float32)


def _gathered_terms(q: Tensor, c2p_table: Tensor | None, p2c: Tensor, scale: float
                    ) -> tuple[Term, Term]:
    """Return the terms of gathered queries; content to position as [H,B x Q,C], by table row."""
    products, edges = q.new_empty(0), [q.new_empty(0, dtype=torch.float32) for _ in range(2)]
    if c2p_table is not None:
        rows = q.transpose(0, 1).flatten(1, 2)
        products = q.new_empty(*rows.shape[:2], len(c2p_table))
        torch.baddbmm(products, rows, c2p_table.permute(1, 2, 0), beta=0, alpha=scale * LOG2_E,
                      out=products)
    return Term(products, edges[0]), Term(p2c, edges[1])


def _collect(d_term: Term, x, table: Tensor, dx, facts, keys: int, band: Band) -> Tensor:
    """Add the term's part to dx [B,rows,H,D], and return the table's gradient [C,H,D]."""
    (batch, heads, rows, _), bounds = x.shape, Bounds(*facts[1:])
    tile = rows_tile(x, "rows")
    position_bias.row_gradient_kernel[_rows_grid(x, tile)](
        d_term, table, dx, bounds, rows, heads, band.span, FAR=band.far,
        **_product_constants(x, tile))
    tile = rows_tile(x, "table")
    blocks = _RESIDUES * ceil_div(len(table), tile.block_n)
    splits = min(batch, ceil_div(_PROGRAMS, blocks * heads))
    parts = torch.empty(_RESIDUES * splits, *table.shape, dtype=torch.float32, device=x.device)
    position_bias.table_gradient_kernel[(blocks, heads, splits)](
        d_term.bias, _vectors(x), parts, bounds, batch, rows, heads, band.span,
        **_product_constants(x, tile))
    d_table = parts.sum(0)
    if band.far:
        d_table[:: len(table) - 1] += torch.einsum("ebhr,bhrd->ehd", d_term.edges.to(x.dtype), x)
    return d_table.to(x.dtype)


def _collect_gathered(d_term: Term, q, table: Tensor, dq, facts, keys: int, band: Band) -> Tensor:
    """Do as `_collect` for content to position of gathered queries."""
    batch, heads, queries, _ = q.shape
    by_row = q.new_empty(heads, batch * queries, len(table))
    tile = COLUMN_TILES["skew"]
    position_bias.skew_kernel[(ceil_div(queries, tile.block_m), batch * heads)](
        d_term.bias, by_row, facts[0], queries, keys, heads, band.span, FAR=band.far,
        BR=tile.block_m, BC=tile.block_n)
    dq.permute(2, 0, 1, 3).add_((by_row @ table.transpose(0, 1)).view(heads, batch, queries, -1))
    return (by_row.transpose(1, 2) @ q.transpose(0, 1).flatten(1, 2)).transpose(0, 1).contiguous()


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _tile(q: Tensor, k: Tensor, direction: str, gathered: bool, band: Band) -> Tile:
    longest = max(q.shape[2], k.shape[2])
    return choose_tile(capability_of(q.device), q.shape[-1], direction, longest, gathered, band.far)


def _vectors(x: Tensor) -> Vectors:
    return Vectors(x, *x.stride()[:3])


def _numbers(q, k, span: int, scale: float, dropout: float) -> tuple:
    """Return the scalar arguments that the flash kernels share, in order."""
    return q.shape[2], k.shape[2], q.shape[1], span, scale, 1 / (1 - dropout)


def _constants(q, has, dropout, far: bool | None, tile: Tile) -> dict:
    found = {"HAS_C2P": has[0], "HAS_P2C": has[1], "DROPOUT": dropout > 0, "D": q.shape[-1],
             "BM": tile.block_m, "BN": tile.block_n, "PRECISION": _precision(q),
             "num_warps": tile.warps, "num_stages": tile.stages}
    return found if far is None else found | {"FAR": far}


def _product_constants(x: Tensor, tile: Tile) -> dict:
    return {"D": x.shape[-1], "BR": tile.block_m, "BC": tile.block_n, "PRECISION": _precision(x),
            "num_warps": tile.warps, "num_stages": tile.stages}


def _rows_grid(x: Tensor, tile: Tile) -> tuple[int, int]:
    return _RESIDUES * ceil_div(x.shape[2], _RESIDUES * tile.block_m), x.shape[0] * x.shape[1]
