"""One tile of gather-free attention: its probabilities, and its share of the gradients.

A tile is some heads and some queries of one span against all keys of the span.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots; within a tile G heads,
X queries, Y keys; C rows of an expanded table.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds.model.attention import picked
from deberta_ds.model.attention.dropout import drop_threshold, keep_pairs
from deberta_ds.model.attention.skew import BLOCK_ROWS, Expansion, Frame, add_term, collect_term
from deberta_ds.model.attention.spans import Span

_TILE_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # on the CPU per thread: 4 MiB of fp32


@dataclass(frozen=True)
class Side:
    """One position term: its expanded table, and how that was expanded."""

    expansion: Expansion
    table_HCD: Tensor


@dataclass(frozen=True)
class Inputs:
    """What every tile reads. Queries and the position-query table carry the score scale."""

    q_BHQD: Tensor  # scaled
    k_BHLD: Tensor
    v_BHLD: Tensor
    key_side: Side | None  # content to position: rows are queries
    query_side: Side | None  # position to content: rows are keys; scaled
    dropout: float
    words: tuple[Tensor, Tensor] | None  # dropout words of queries [B,H,Q] and keys [B,H,L]


@dataclass(frozen=True)
class Tile:
    """Some heads, and queries [first, last) of a span."""

    span: Span
    heads: slice
    first: int
    last: int

    def keys_of(self, tensor: Tensor) -> Tensor:
        """Return this tile's part of a tensor [B,H,L,...]."""
        return tensor[self.span.row, self.heads, self.span.start : self.span.stop]

    def queries_of(self, tensor: Tensor) -> Tensor:
        """Return this tile's part of a tensor [B,H,Q,...]."""
        row = tensor[self.span.row, self.heads]
        if self.span.queries_X is None:
            start = self.span.start
            return row[:, start + self.first : start + self.last]
        return row.index_select(1, self.span.queries_X[self.first : self.last])

    def store_queries(self, tensor: Tensor, value: Tensor) -> None:
        """Write this tile's part of a tensor [B,H,Q,...]."""
        row = tensor[self.span.row, self.heads]
        if self.span.queries_X is None:
            start = self.span.start
            row[:, start + self.first : start + self.last] = value
        else:
            row.index_copy_(1, self.span.queries_X[self.first : self.last], value)

    @property
    def positions(self) -> Tensor | None:
        """The queries' columns [X] relative to the span, when they are not simply in order."""
        positions_X = self.span.positions_X
        return None if positions_X is None else positions_X[self.first : self.last]


def tiles(spans: list[Span], heads: int, device: torch.device) -> Iterator[Tile]:
    """Yield the tiles of all spans, in the fixed order that forward and backward share."""
    budget = _TILE_SCORES[device.type]
    if device.type == "cpu":
        budget *= torch.get_num_threads()
    for span in spans:
        keys = span.stop - span.start
        queries = keys if span.queries_X is None else len(span.queries_X)
        group = min(heads, max(1, budget // (queries * keys)))
        block = max(BLOCK_ROWS, budget // keys // BLOCK_ROWS * BLOCK_ROWS)
        for head in range(0, heads, group):
            for first in range(0, queries, block):
                last = min(first + block, queries)
                yield Tile(span, slice(head, min(head + group, heads)), first, last)


def probabilities(inputs: Inputs, tile: Tile) -> Tensor:
    """Return the softmax [G,X,Y] of a tile; dropped pairs carry a minus sign."""
    q, k = tile.queries_of(inputs.q_BHQD), tile.keys_of(inputs.k_BHLD)
    scores = torch.bmm(q, k.transpose(1, 2))
    if inputs.key_side:
        _add(inputs.key_side, scores, q, tile, transposed=False)
    if inputs.query_side:
        _add(inputs.query_side, scores, k, tile, transposed=True)
    allowed_XY = tile.span.allowed_XY
    if allowed_XY is not None:
        forbidden_XY = ~allowed_XY[tile.first : tile.last]
        scores.masked_fill_(forbidden_XY, -math.inf)
    probs = torch.softmax(scores, -1, out=scores)
    if allowed_XY is not None:  # a query without keys is NaN here, and the rule is 0
        probs.masked_fill_(forbidden_XY, 0.0)
    if inputs.words is not None:
        rows, columns = tile.queries_of(inputs.words[0]), tile.keys_of(inputs.words[1])
        keep = keep_pairs(rows, columns, drop_threshold(inputs.dropout))
        probs = torch.where(keep, probs, -probs)
    return probs


def context(inputs: Inputs, tile: Tile, probs: Tensor) -> Tensor:
    """Return the tile's context [G,X,D]."""
    v = tile.keys_of(inputs.v_BHLD)
    if inputs.words is None:
        return torch.bmm(probs, v)
    return torch.bmm(probs.relu(), v).mul_(1 / (1 - inputs.dropout))


@dataclass(frozen=True)
class Gradients:
    """Sums over tiles, in the inputs' layouts. Those of scaled inputs are of the scaled ones."""

    q_BHQD: Tensor
    k_BHLD: Tensor
    v_BHLD: Tensor
    key_table_HCD: Tensor | None
    query_table_HCD: Tensor | None


def add_gradients(
    inputs: Inputs, tile: Tile, probs: Tensor, out_grad: Tensor, delta: Tensor, total: Gradients
) -> None:
    """Add one tile's gradients to `total`.

    probs: as `probabilities` returned them; out_grad [G,X,D]: gradient of the context; delta
      [G,X,1]: its row sums with the context (Dao et al. 2022, the D_i of FlashAttention).
    """
    q, k, v = (
        tile.queries_of(inputs.q_BHQD), tile.keys_of(inputs.k_BHLD), tile.keys_of(inputs.v_BHLD)
    )
    if inputs.words is None:
        tile.keys_of(total.v_BHLD).add_(torch.bmm(probs.transpose(1, 2), out_grad))
        grad = torch.bmm(out_grad, v.transpose(1, 2)).sub_(delta).mul_(probs)
    else:
        kept = probs.relu()
        out_grad = out_grad * (1 / (1 - inputs.dropout))
        tile.keys_of(total.v_BHLD).add_(torch.bmm(kept.transpose(1, 2), out_grad))
        grad = torch.bmm(out_grad, v.transpose(1, 2)).mul_(kept)
        grad.addcmul_(probs.abs(), delta, value=-1)
    q_grad = torch.bmm(grad, k)
    k_grad = torch.bmm(grad.transpose(1, 2), q)
    if inputs.key_side:
        table_grad = total.key_table_HCD[tile.heads]
        _collect(inputs.key_side, grad, q, tile, False, q_grad, table_grad)
    if inputs.query_side:
        table_grad = total.query_table_HCD[tile.heads]
        _collect(inputs.query_side, grad, k, tile, True, k_grad, table_grad)
    tile.store_queries(total.q_BHQD, q_grad)
    tile.keys_of(total.k_BHLD).add_(k_grad)


def _add(side: Side, scores: Tensor, x: Tensor, tile: Tile, transposed: bool) -> None:
    table = side.table_HCD[tile.heads]
    if tile.positions is not None:
        term = picked.add_query_rows if not transposed else picked.add_key_rows
        term(scores, x, table, side.expansion, tile.positions)
    else:
        frame = Frame(0, tile.first) if transposed else Frame(tile.first, 0)
        add_term(scores, x, table, side.expansion, frame, transposed)


def _collect(
    side: Side, grad: Tensor, x: Tensor, tile: Tile, transposed: bool, x_grad: Tensor,
    table_grad: Tensor,
) -> None:
    table = side.table_HCD[tile.heads]
    if tile.positions is not None:
        term = picked.collect_query_rows if not transposed else picked.collect_key_rows
        term(grad, x, table, side.expansion, tile.positions, x_grad, table_grad)
    else:
        frame = Frame(0, tile.first) if transposed else Frame(tile.first, 0)
        collect_term(grad, x, table, side.expansion, frame, transposed, x_grad, table_grad)
