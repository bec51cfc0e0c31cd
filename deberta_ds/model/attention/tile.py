"""One tile of gather-free attention: its probabilities, and its share of the gradients.

A tile is some heads and some queries of one span against all keys of the span.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots; within a tile G heads,
X queries, Y keys; C rows of an expanded table.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deberta_ds.model.attention import picked
from deberta_ds.model.attention.dropout import drop_threshold, keep_pairs
from deberta_ds.model.attention.skew import (
    BLOCK_ROWS,
    Frame,
    Scratch,
    Side,
    add_term,
    collect_term,
)
from deberta_ds.model.attention.spans import Span

_TILE_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # on the CPU per thread: 4 MiB of fp32


@dataclass(frozen=True)
class Inputs:
    """What every tile reads. The position-query table carries the score scale."""

    q_BHQD: Tensor
    k_BHLD: Tensor
    v_BHLD: Tensor
    key_side: Side | None  # content to position: rows are queries
    query_side: Side | None  # position to content: rows are keys; scaled
    scale: float
    dropout: float
    words: tuple[Tensor, Tensor] | None  # dropout words of queries [B,H,Q] and keys [B,H,L]
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(frozen=True)
class Group:
    """Some heads of a span, and the query blocks that its tiles cover."""

    span: Span
    heads: slice
    blocks: list[tuple[int, int]]

    def keys_of(self, tensor: Tensor) -> Tensor:
        """Return this group's part of a tensor [B,H,L,...], a view."""
        return tensor[self.span.row, self.heads, self.span.start : self.span.stop]

    def tiles(self) -> list["Tile"]:
        return [Tile(self, first, last) for first, last in self.blocks]


@dataclass(frozen=True)
class Tile:
    """Queries [first, last) of a group, against all its keys."""

    group: Group
    first: int
    last: int

    def queries_of(self, tensor: Tensor) -> Tensor:
        """Return this tile's part of a tensor [B,H,Q,...]."""
        span = self.group.span
        row = tensor[span.row, self.group.heads]
        if span.queries_X is None:
            return row[:, span.start + self.first : span.start + self.last]
        return row.index_select(1, span.queries_X[self.first : self.last])

    def store_queries(self, tensor: Tensor, value: Tensor) -> None:
        """Write this tile's part of a tensor [B,H,Q,...]."""
        span = self.group.span
        row = tensor[span.row, self.group.heads]
        if span.queries_X is None:
            row[:, span.start + self.first : span.start + self.last] = value
        else:
            row.index_copy_(1, span.queries_X[self.first : self.last], value)

    @property
    def positions(self) -> Tensor | None:
        """The queries' columns [X] relative to the span, when they are not simply in order."""
        positions_X = self.group.span.positions_X
        return None if positions_X is None else positions_X[self.first : self.last]

    @property
    def forbidden(self) -> Tensor | None:
        """Bool [X,Y], or None where every pair is allowed."""
        allowed_XY = self.group.span.allowed_XY
        return None if allowed_XY is None else ~allowed_XY[self.first : self.last]


def groups(spans: list[Span], heads: int, device: torch.device) -> Iterator[Group]:
    """Yield the groups of all spans, in the fixed order that forward and backward share."""
    budget = _TILE_SCORES[device.type]
    if device.type == "cpu":
        budget *= torch.get_num_threads()
    for span in spans:
        keys = span.stop - span.start
        queries = keys if span.queries_X is None else len(span.queries_X)
        size = min(heads, max(1, budget // (queries * keys)))
        block = max(BLOCK_ROWS, budget // keys // BLOCK_ROWS * BLOCK_ROWS)
        blocks = [(first, min(first + block, queries)) for first in range(0, queries, block)]
        for head in range(0, heads, size):
            yield Group(span, slice(head, min(head + size, heads)), blocks)


def operands(inputs: Inputs, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries [G,X,D], and keys and values [G,Y,D] of a tile."""
    q = tile.queries_of(inputs.q_BHQD) * inputs.scale
    k, v = tile.group.keys_of(inputs.k_BHLD), tile.group.keys_of(inputs.v_BHLD)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        # oneDNN reorders strided operands at every product; fp32 products take them as they are.
        return q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v


def probabilities(inputs: Inputs, tile: Tile) -> Tensor:
    """Return the softmax [G,X,Y] of a tile; dropped pairs carry a minus sign."""
    q, k, _ = operands(inputs, tile)
    scores = torch.bmm(q, k.transpose(1, 2))  # fresh: backward may keep it
    if inputs.key_side:
        _add(inputs, inputs.key_side, scores, q, tile, transposed=False)
    if inputs.query_side:
        _add(inputs, inputs.query_side, scores, k, tile, transposed=True)
    forbidden_XY = tile.forbidden
    if forbidden_XY is not None:
        scores.masked_fill_(forbidden_XY, -math.inf)
    probs = torch.softmax(scores, -1, out=scores)
    if forbidden_XY is not None:  # a query without keys is NaN here, and the rule is 0
        probs.masked_fill_(forbidden_XY, 0.0)
    if inputs.words is not None:
        rows, columns = tile.queries_of(inputs.words[0]), tile.group.keys_of(inputs.words[1])
        take = inputs.scratch.take
        buffers = take("mixed", probs.shape, rows), take("shifted", probs.shape, rows)
        keep = keep_pairs(rows, columns, drop_threshold(inputs.dropout), buffers)
        negative = torch.neg(probs, out=take("negative", probs.shape, probs))
        torch.where(keep, probs, negative, out=probs)
    return probs


def context(inputs: Inputs, tile: Tile, probs: Tensor) -> Tensor:
    """Return the tile's context [G,X,D]."""
    v = tile.group.keys_of(inputs.v_BHLD)
    if inputs.words is None:
        return torch.bmm(probs, v)
    kept = torch.clamp(probs, min=0, out=inputs.scratch.take("kept", probs.shape, probs))
    return torch.bmm(kept, v).mul_(1 / (1 - inputs.dropout))


@dataclass(frozen=True)
class Gradients:
    """Where the gradients of one group go: sums over its tiles."""

    k_GYD: Tensor
    v_GYD: Tensor
    key_table_GCD: Tensor | None
    query_table_GCD: Tensor | None  # of the scaled table


def add_gradients(
    inputs: Inputs, tile: Tile, probs: Tensor, out_grad: Tensor, total: Gradients
) -> Tensor:
    """Add one tile's gradients to `total`, and return that of its queries [G,X,D].

    probs: as `probabilities` returned them; out_grad [G,X,D]: the gradient of the context.
    """
    q, k, v = operands(inputs, tile)
    grad = inputs.scratch.take("grad", probs.shape, probs)
    kept = probs
    if inputs.words is not None:
        kept = torch.clamp(probs, min=0, out=inputs.scratch.take("kept", probs.shape, probs))
        out_grad = out_grad * (1 / (1 - inputs.dropout))
    total.v_GYD.add_(torch.bmm(kept.transpose(1, 2), out_grad))
    torch.bmm(out_grad, v.transpose(1, 2), out=grad)
    if inputs.words is not None:
        grad.masked_fill_(probs.signbit(), 0)
        probs = torch.abs(probs, out=kept)
    torch.ops.aten._softmax_backward_data.out(grad, probs, -1, probs.dtype, grad_input=grad)
    q_grad = torch.bmm(grad, k)
    total.k_GYD.add_(torch.bmm(grad.transpose(1, 2), q))
    if inputs.key_side:
        _collect(inputs, inputs.key_side, grad, q, tile, False, q_grad, total.key_table_GCD)
    if inputs.query_side:
        _collect(inputs, inputs.query_side, grad, k, tile, True, total.k_GYD, total.query_table_GCD)
    return q_grad.mul_(inputs.scale)


def _add(inputs, side: Side, scores: Tensor, x: Tensor, tile: Tile, transposed: bool) -> None:
    side = side.of_heads(tile.group.heads)
    if tile.positions is None:
        frame = Frame(0, tile.first) if transposed else Frame(tile.first, 0)
        add_term(scores, x, side, frame, transposed, inputs.scratch)
    elif transposed:
        picked.add_key_rows(scores, x, side, tile.positions, inputs.scratch)
    else:
        picked.add_query_rows(scores, x, side, tile.positions)


def _collect(inputs, side, grad, x, tile, transposed, x_grad, table_grad) -> None:
    side = side.of_heads(tile.group.heads)
    if tile.positions is None:
        frame = Frame(0, tile.first) if transposed else Frame(tile.first, 0)
        collect_term(grad, x, side, frame, transposed, x_grad, table_grad, inputs.scratch)
    elif transposed:
        picked.collect_key_rows(
            grad, x, side, tile.positions, x_grad, table_grad, inputs.scratch
        )
    else:
        picked.collect_query_rows(grad, x, side, tile.positions, x_grad, table_grad)
