"""Position terms of queries at arbitrary columns (the enhanced mask decoder's masked tokens).

The expanded table has one row for every distance here, so a query's products land in columns of
their own: one writer per element, and no atomics anywhere.

Shape legend: G heads of a tile, X queries, Y keys, C rows of the expanded table, D head size.
"""

import torch
from torch import Tensor

from deberta_ds.model.attention.skew import (
    Expansion,
    Frame,
    Scratch,
    Side,
    add_term,
    collect_term,
)

_KEY_ROWS = 512


def _columns(expanded: Expansion, positions_X: Tensor, keys: int) -> Tensor:
    """Return the expanded table's row [X,Y] of each pair."""
    keys_Y = torch.arange(keys, device=positions_X.device)
    return keys_Y - positions_X[:, None] + expanded.radius


def add_query_rows(scores_GXY: Tensor, q_GXD: Tensor, side: Side, positions_X: Tensor) -> None:
    """Add the content-to-position term."""
    products_GXC = torch.bmm(q_GXD, side.table_HDC)
    columns_XY = _columns(side.expansion, positions_X, scores_GXY.shape[2])
    scores_GXY.add_(products_GXC.gather(2, columns_XY.expand_as(scores_GXY)))


def collect_query_rows(
    grad_GXY: Tensor,
    q_GXD: Tensor,
    side: Side,
    positions_X: Tensor,
    grad_q_GXD: Tensor,
    grad_table_GCD: Tensor,
) -> None:
    """Accumulate the gradients of `add_query_rows`."""
    columns_XY = _columns(side.expansion, positions_X, grad_GXY.shape[2])
    products_GXC = grad_GXY.new_zeros(*grad_GXY.shape[:2], side.table_HCD.shape[1])
    products_GXC.scatter_(2, columns_XY.expand_as(grad_GXY), grad_GXY)
    grad_q_GXD.add_(torch.bmm(products_GXC, side.table_HCD))
    grad_table_GCD.add_(torch.bmm(products_GXC.transpose(1, 2), q_GXD))


def add_key_rows(
    scores_GXY: Tensor, k_GYD: Tensor, side: Side, positions_X: Tensor, scratch: Scratch
) -> None:
    """Add the position-to-content term: all query columns, of which the asked ones are taken."""
    groups, _, keys = scores_GXY.shape
    for start in range(0, keys, _KEY_ROWS):
        rows = k_GYD[:, start : start + _KEY_ROWS]
        plane = scores_GXY.new_zeros(groups, rows.shape[1], keys)
        add_term(plane, rows, side, Frame(start, 0), False, scratch)
        taken = plane.index_select(2, positions_X).transpose(1, 2)
        scores_GXY[:, :, start : start + _KEY_ROWS].add_(taken)


def collect_key_rows(
    grad_GXY: Tensor,
    k_GYD: Tensor,
    side: Side,
    positions_X: Tensor,
    grad_k_GYD: Tensor,
    grad_table_GCD: Tensor,
    scratch: Scratch,
) -> None:
    """Accumulate the gradients of `add_key_rows`.

    Queries may share a column (unused slots of the decoder do), so columns are spread by a product
    with a one-hot matrix, which adds them in a fixed order.
    """
    keys = grad_GXY.shape[2]
    one_hot_XL = positions_X[:, None] == torch.arange(keys, device=positions_X.device)
    one_hot_XL = one_hot_XL.to(grad_GXY.dtype)
    for start in range(0, keys, _KEY_ROWS):
        stop = start + _KEY_ROWS
        plane = grad_GXY[:, :, start:stop].transpose(1, 2) @ one_hot_XL
        rows, grad_rows = k_GYD[:, start:stop], grad_k_GYD[:, start:stop]
        frame = Frame(start, 0)
        collect_term(plane, rows, side, frame, False, grad_rows, grad_table_GCD, scratch)
