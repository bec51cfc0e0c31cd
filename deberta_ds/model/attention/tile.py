"""One tile of the PyTorch implementation: its softmax probabilities, context and gradients.

A tile is some queries, of some heads and sequences, against all keys of one span (`segments`).

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots; within a tile G heads of
its sequences (all of one head, then of the next), X queries, Y keys; C rows of an expanded table.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds.model.attention import skew
from deberta_ds.model.attention.dense import scaled_product
from deberta_ds.model.attention.dropout import (
    WORD_KEYS,
    clear_dropped,
    dropped_words,
    mark_dropped,
)
from deberta_ds.model.attention.segments import KeySpan

ROWS_ARE_KEYS = (False, True)  # of the position terms: content to position, position to content
_KEY_ROWS = 512  # of gathered queries at once
_TILE_BYTES = 1 << 21  # of scores, per thread


@dataclass(frozen=True)
class Inputs:
    """What every tile reads. The position tables carry the score scale."""

    q_BHQD: Tensor
    k_BHLD: Tensor
    v_BHLD: Tensor
    terms: list[skew.PositionTerm | None]  # scaled
    scale: float
    dropout: float
    bits: tuple[Tensor, Tensor] | None  # for dropout, of queries and of blocks of keys
    scratch: skew.Scratch


@dataclass(frozen=True)
class Group:
    """Some rows and heads of a span, and the query blocks that its tiles cover."""

    span: KeySpan
    rows: slice
    heads: slice
    blocks: list[tuple[int, int]]

    @property
    def num_rows(self) -> int:
        """Number of rows (sequences)."""
        return self.rows.stop - self.rows.start

    def part(self, tensor: Tensor) -> Tensor:
        """Return the rows and heads of a tensor [B,H,...] as a view, heads first."""
        return tensor[self.rows, self.heads].transpose(0, 1)

    def keys_of(self, tensor: Tensor) -> Tensor:
        """Return this group's part [G,Y,...] of a tensor [B,H,L,...]; a view of a single row."""
        return self.part(tensor)[:, :, self.span.start : self.span.stop].flatten(0, 1)

    def store_keys(self, tensor: Tensor, value: Tensor) -> None:
        """Write this group's part of a tensor [B,H,L,...]."""
        part = self.part(tensor)[:, :, self.span.start : self.span.stop]
        part.copy_(value.view_as(part))

    def tiles(self) -> list["Tile"]:
        """Return the tiles of queries."""
        return [Tile(self, first, last) for first, last in self.blocks]


@dataclass(frozen=True)
class Tile:
    """Queries [first, last) of a group, against all its keys."""

    group: Group
    first: int
    last: int

    def queries_of(self, tensor: Tensor) -> Tensor:
        """Return this tile's part [G,X,...] of a tensor [B,H,Q,...]."""
        part, span = self.group.part(tensor), self.group.span
        if span.queries_X is None:
            part = part[:, :, span.start + self.first : span.start + self.last]
            return part.flatten(0, 1)
        return part.flatten(0, 1).index_select(1, span.queries_X[self.first : self.last])

    def store_queries(self, tensor: Tensor, value: Tensor) -> None:
        """Write this tile's part of a tensor [B,H,Q,...]."""
        part, span = self.group.part(tensor), self.group.span
        if span.queries_X is None:
            part = part[:, :, span.start + self.first : span.start + self.last]
            part.copy_(value.view_as(part))
        else:
            part[:, 0].index_copy_(1, span.queries_X[self.first : self.last], value)

    @property
    def positions(self) -> Tensor | None:
        """The queries' columns [X] relative to the span, when they are not simply in order."""
        positions_X = self.group.span.positions_X
        return None if positions_X is None else positions_X[self.first : self.last]

    @property
    def masked(self) -> Tensor | None:
        """Bool [R,X,Y] for the group's rows, or for all of them; None: every pair is allowed."""
        rows, span = self.group.rows, self.group.span
        if span.allowed_RXY is None:
            return None
        allowed_RXY = span.allowed_RXY
        if len(allowed_RXY) > 1:
            allowed_RXY = allowed_RXY[rows.start - span.rows.start : rows.stop - span.rows.start]
        return ~allowed_RXY[:, self.first : self.last]


def groups(spans: list[KeySpan], q_BHQD: Tensor) -> Iterator[Group]:
    """Yield the groups of all spans, in the fixed order that forward and backward share."""
    heads = q_BHQD.shape[1]
    budget = _TILE_BYTES // q_BHQD.dtype.itemsize * torch.get_num_threads()
    for span in spans:
        keys = span.stop - span.start
        queries = keys if span.queries_X is None else len(span.queries_X)
        at_once = max(1, budget // (queries * keys))  # score matrices, one per sequence and head
        rows = min(span.rows.stop - span.rows.start, at_once)
        parts = -(-heads // (at_once // rows))
        size = -(-heads // parts)  # all parts alike
        unit = skew.block_rows(q_BHQD.dtype, keys)
        block = max(unit, budget // keys // unit * unit)
        blocks = [(first, min(first + block, queries)) for first in range(0, queries, block)]
        for row in range(span.rows.start, span.rows.stop, rows):
            for head in range(0, heads, size):
                few = slice(row, min(row + rows, span.rows.stop))
                yield Group(span, few, slice(head, min(head + size, heads)), blocks)


def operands(inputs: Inputs, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return queries [G,X,D] and keys [G,Y,D] of a tile."""
    queries, keys = tile.queries_of(inputs.q_BHQD), tile.group.keys_of(inputs.k_BHLD)
    return queries.contiguous(), keys.contiguous()  # oneDNN copies strided ones on every call


def probabilities(inputs: Inputs, tile: Tile) -> Tensor:
    """Return the softmax [G,X,Y] of a tile; dropped pairs carry a minus sign."""
    q, k = operands(inputs, tile)
    scores = scaled_product(q, k.transpose(1, 2), inputs.scale)  # fresh: backward may keep it
    for term, of_keys in zip(inputs.terms, ROWS_ARE_KEYS, strict=True):
        if term:
            _add(inputs, term, scores, k if of_keys else q, tile, of_keys)
    masked_RXY = tile.masked
    by_rows = scores.unflatten(0, (-1, tile.group.num_rows))
    if masked_RXY is not None:  # adding -inf is 10 x faster than a fill broadcast over heads
        by_rows.add_(scores.new_zeros(masked_RXY.shape).masked_fill_(masked_RXY, -math.inf))
    probs = torch.softmax(scores, -1, out=scores)
    if tile.group.span.fully_masked:  # softmax gives NaN where all keys are masked; it must be 0
        by_rows.masked_fill_(masked_RXY, 0.0)
    if inputs.bits is not None:
        rows, span = tile.queries_of(inputs.bits[0]), tile.group.span
        blocks = slice(span.start // WORD_KEYS, -(-span.stop // WORD_KEYS))
        columns = tile.group.part(inputs.bits[1])[:, :, blocks].flatten(0, 1)
        words = dropped_words(rows, columns, inputs.dropout)
        wide = (*words.shape[:-1], WORD_KEYS * words.shape[-1])
        buffer = inputs.scratch.take("marks", wide, words)
        mark_dropped(probs, words, span.start % WORD_KEYS, buffer)
    return probs


def context(inputs: Inputs, tile: Tile, probs: Tensor) -> Tensor:
    """Return the tile's context [G,X,D]."""
    v = tile.group.keys_of(inputs.v_BHLD).contiguous()
    if inputs.bits is None:
        return torch.bmm(probs, v)
    kept = torch.clamp(probs, min=0, out=inputs.scratch.take("kept", probs.shape, probs))
    return torch.bmm(kept, v).mul_(1 / (1 - inputs.dropout))


@dataclass(frozen=True)
class Gradients:
    """Where the gradients of one group go: sums over its tiles."""

    k_GYD: Tensor
    v_GYD: Tensor
    tables_GCD: list[Tensor | None]  # of the scaled tables


def add_gradients(inputs: Inputs, tile: Tile, probs: Tensor, out_grad: Tensor, total: Gradients
                 ) -> Tensor:
    """Add one tile's gradients to `total`, and return that of its queries [G,X,D].

    probs: as `probabilities` returned them; out_grad [G,X,D]: the gradient of the context.
    """
    q, k = operands(inputs, tile)
    v = tile.group.keys_of(inputs.v_BHLD).contiguous()
    take = inputs.scratch.take
    kept, grad = probs, take("grad", probs.shape, probs)
    if inputs.bits is not None:
        kept = torch.clamp(probs, min=0, out=take("kept", probs.shape, probs))
        out_grad = out_grad * (1 / (1 - inputs.dropout))
    total.v_GYD.baddbmm_(kept.transpose(1, 2), out_grad)
    torch.bmm(out_grad, v.transpose(1, 2), out=grad)
    if inputs.bits is not None:
        clear_dropped(grad, probs, kept)
        probs = torch.abs(probs, out=kept)
    torch.ops.aten._softmax_backward_data.out(grad, probs, -1, probs.dtype, grad_input=grad)
    q_grad = scaled_product(grad, k, inputs.scale)
    total.k_GYD.baddbmm_(grad.transpose(1, 2), q, alpha=inputs.scale)
    for term, of_keys, table in zip(inputs.terms, ROWS_ARE_KEYS, total.tables_GCD, strict=True):
        if term:
            x, x_grad = (k, total.k_GYD) if of_keys else (q, q_grad)
            _collect(inputs, term, grad, x, tile, of_keys, x_grad, table)
    return q_grad


def _add(inputs, term: skew.PositionTerm, scores: Tensor, x: Tensor, tile: Tile, transposed: bool
        ) -> None:
    term = term.of_heads(tile.group.heads)
    if tile.positions is None:
        offset = -tile.first if transposed else tile.first
        skew.add_term(scores, x, term, offset, transposed, inputs.scratch)
    elif transposed:
        add_key_rows(scores, x, term, tile.positions, inputs.scratch)
    else:
        add_query_rows(scores, x, term, tile.positions)


def _collect(inputs, term, grad, x, tile, transposed, x_grad, table_grad) -> None:
    term = term.of_heads(tile.group.heads)
    if tile.positions is None:
        offset = -tile.first if transposed else tile.first
        skew.collect_term(grad, x, term, offset, transposed, x_grad, table_grad, inputs.scratch)
    elif transposed:
        collect_key_rows(grad, x, term, tile.positions, x_grad, table_grad, inputs.scratch)
    else:
        collect_query_rows(grad, x, term, tile.positions, x_grad, table_grad)


def _columns(term: skew.PositionTerm, positions_X: Tensor, keys: int) -> Tensor:
    """Return the expanded table's row [X,Y] of each pair of a gathered query (those of the enhanced
    mask decoder) and a key.

    It has one row per distance here, so each pair has an element of its own in queries x table: one
    writer per element, no atomics.
    """
    keys_Y = torch.arange(keys, device=positions_X.device)
    return keys_Y - positions_X[:, None] + term.radius


def add_query_rows(scores_GXY: Tensor, q_GXD: Tensor, term: skew.PositionTerm, positions_X: Tensor
                  ) -> None:
    """Add the content-to-position term."""
    products_GXC = torch.bmm(q_GXD, term.table_HDC)
    columns_XY = _columns(term, positions_X, scores_GXY.shape[2])
    scores_GXY.add_(products_GXC.gather(2, columns_XY.expand_as(scores_GXY)))


def collect_query_rows(grad_GXY: Tensor, q_GXD: Tensor, term: skew.PositionTerm,
                       positions_X: Tensor, grad_q_GXD: Tensor, grad_table_GCD: Tensor) -> None:
    """Accumulate the gradients of `add_query_rows`."""
    columns_XY = _columns(term, positions_X, grad_GXY.shape[2])
    products_GXC = grad_GXY.new_zeros(*grad_GXY.shape[:2], term.table_HCD.shape[1])
    products_GXC.scatter_(2, columns_XY.expand_as(grad_GXY), grad_GXY)
    grad_q_GXD.add_(torch.bmm(products_GXC, term.table_HCD))
    grad_table_GCD.add_(torch.bmm(products_GXC.transpose(1, 2), q_GXD))


def add_key_rows(scores_GXY: Tensor, k_GYD: Tensor, term: skew.PositionTerm, positions_X: Tensor,
                 scratch: skew.Scratch) -> None:
    """Add the position-to-content term: computed for all columns, then gathered at the queries'."""
    groups, _, keys = scores_GXY.shape
    for start in range(0, keys, _KEY_ROWS):
        rows = k_GYD[:, start : start + _KEY_ROWS]
        all_columns = scores_GXY.new_zeros(groups, rows.shape[1], keys)
        skew.add_term(all_columns, rows, term, start, False, scratch)
        taken = all_columns.index_select(2, positions_X).transpose(1, 2)
        scores_GXY[:, :, start : start + _KEY_ROWS].add_(taken)


def collect_key_rows(grad_GXY: Tensor, k_GYD: Tensor, term: skew.PositionTerm, positions_X: Tensor,
                     grad_k_GYD: Tensor, grad_table_GCD: Tensor, scratch: skew.Scratch) -> None:
    """Accumulate the gradients of `add_key_rows`.

    Queries may share a column (padding of the decoder does), so their gradients are scattered by a
    matmul with a one-hot matrix, which adds them in a fixed order.
    """
    keys = grad_GXY.shape[2]
    one_hot_XL = positions_X[:, None] == torch.arange(keys, device=positions_X.device)
    one_hot_XL = one_hot_XL.to(grad_GXY.dtype)
    for start in range(0, keys, _KEY_ROWS):
        stop = start + _KEY_ROWS
        all_columns = grad_GXY[:, :, start:stop].transpose(1, 2) @ one_hot_XL
        rows, grad_rows = k_GYD[:, start:stop], grad_k_GYD[:, start:stop]
        skew.collect_term(all_columns, rows, term, start, False, grad_rows, grad_table_GCD, scratch)
