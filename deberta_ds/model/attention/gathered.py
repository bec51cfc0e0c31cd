"""Position terms of gathered queries: those of the enhanced mask decoder, at masked tokens only.

The expanded table has one row per distance here, so each (query, key) pair has an element of its
own in queries x table: one writer per element, no atomics.

Shape legend: G heads of a tile, X queries, Y keys, C rows of the expanded table, D head size.
"""

import torch
from torch import Tensor

from deberta_ds.model.attention.skew import (
    Expansion,
    Frame,
    PositionTerm,
    Scratch,
    add_term,
    collect_term,
)

_KEY_ROWS = 512


def _columns(expanded: Expansion, positions_X: Tensor, keys: int) -> Tensor:
    """Return the expanded table's row [X,Y] of each pair."""
    keys_Y = torch.arange(keys, device=positions_X.device)
    return keys_Y - positions_X[:, None] + expanded.radius


def add_query_rows(
    scores_GXY: Tensor, q_GXD: Tensor, term: PositionTerm, positions_X: Tensor
) -> None:
    """Add the content-to-position term."""
    products_GXC = torch.bmm(q_GXD, term.table_HDC)
    columns_XY = _columns(term.expansion, positions_X, scores_GXY.shape[2])
    scores_GXY.add_(products_GXC.gather(2, columns_XY.expand_as(scores_GXY)))


def collect_query_rows(
    grad_GXY: Tensor,
    q_GXD: Tensor,
    term: PositionTerm,
    positions_X: Tensor,
    grad_q_GXD: Tensor,
    grad_table_GCD: Tensor,
) -> None:
    """Accumulate the gradients of `add_query_rows`."""
    columns_XY = _columns(term.expansion, positions_X, grad_GXY.shape[2])
    products_GXC = grad_GXY.new_zeros(*grad_GXY.shape[:2], term.table_HCD.shape[1])
    products_GXC.scatter_(2, columns_XY.expand_as(grad_GXY), grad_GXY)
    grad_q_GXD.add_(torch.bmm(products_GXC, term.table_HCD))
    grad_table_GCD.add_(torch.bmm(products_GXC.transpose(1, 2), q_GXD))


def add_key_rows(
    scores_GXY: Tensor, k_GYD: Tensor, term: PositionTerm, positions_X: Tensor, scratch: Scratch
) -> None:
    """Add the position-to-content term: computed for all columns, then gathered at the queries'."""
    groups, _, keys = scores_GXY.shape
    for start in range(0, keys, _KEY_ROWS):
        rows = k_GYD[:, start : start + _KEY_ROWS]
        all_columns = scores_GXY.new_zeros(groups, rows.shape[1], keys)
        add_term(all_columns, rows, term, Frame(start, 0), False, scratch)
        taken = all_columns.index_select(2, positions_X).transpose(1, 2)
        scores_GXY[:, :, start : start + _KEY_ROWS].add_(taken)


def collect_key_rows(
    grad_GXY: Tensor,
    k_GYD: Tensor,
    term: PositionTerm,
    positions_X: Tensor,
    grad_k_GYD: Tensor,
    grad_table_GCD: Tensor,
    scratch: Scratch,
) -> None:
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
        frame = Frame(start, 0)
        collect_term(all_columns, rows, term, frame, False, grad_rows, grad_table_GCD, scratch)
