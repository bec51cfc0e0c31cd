"""Triton helpers: tiles of the position bias, inside of the band around the diagonal and outside.

See `attention.band` for the band. It is symmetric: key j is in the band of query i exactly when i
is in the band of j. A tile of a flash kernel covers at most one group of rows and one of columns,
so it is dense in both bias matrices or in neither.
"""

import triton
import triton.language as tl

from deberta_ds.model.attention.geometry import GROUP_COLUMNS

GROUP = tl.constexpr(GROUP_COLUMNS)


@triton.jit
def band_edges(position, SPAN, NK):
    """Return the first column of the band of rows at `position`, and the first one after it."""
    group = position // GROUP
    groups = (NK + GROUP - 1) // GROUP
    return tl.maximum(group - SPAN, 0) * GROUP, tl.minimum(group + SPAN + 1, groups) * GROUP


@triton.jit
def bias_shape(rows, SPAN, NK):
    """Return the width of a bias and its elements a head."""
    groups = (NK + GROUP - 1) // GROUP
    width = tl.minimum(2 * SPAN + 1, groups) * GROUP
    return width, ((rows + GROUP - 1) // GROUP * GROUP).to(tl.int64) * width


@triton.jit
def table_radius(SPAN, NK):
    """Return the table row of distance 0; the table has twice as many rows."""
    return tl.minimum(SPAN + 1, (NK + GROUP - 1) // GROUP) * GROUP


@triton.jit
def skewed_shape(rows, SPAN, NK):
    """Return the columns of a bias's gradient, one for each table row, and its elements a head.

    It is stored by distance, not by column: element (r, y) lies at y - pos(r) + radius. So
    dX = G @ T and dT = G^T @ X are plain GEMMs with aligned loads; the price is an unaligned store.
    """
    columns = 2 * table_radius(SPAN, NK)
    return columns, ((rows + GROUP - 1) // GROUP * GROUP).to(tl.int64) * columns


@triton.jit
def _c2p_tile(BIAS, i, j, base, end, width, GATHERED: tl.constexpr):
    """Return the content-to-position terms of queries i and keys j, [i, j]."""
    column = j[None, :]
    if GATHERED:  # every query has its own band; beyond it the term is that of its edge
        base = base[:, None]
        column = tl.minimum(tl.maximum(column, base), end[:, None] - 1)
    return tl.load(BIAS + (i[:, None] * width + (column - base)))


@triton.jit
def _p2c_tile(BIAS, j, position, base, end, width, GATHERED: tl.constexpr):
    """Return the position-to-content terms of keys j and queries at `position`, [j, i]."""
    column = position[None, :]
    if GATHERED:
        column = tl.minimum(tl.maximum(column, base), end - 1)
    return tl.load(BIAS + (j[:, None] * width + (column - base)))


@triton.jit
def near_bias(
    C2P_BIAS, P2C_BIAS, i, position_i, base_i, end_i, j, base_j, end_j, width,
    HAS_C2P: tl.constexpr, HAS_P2C: tl.constexpr, GATHERED: tl.constexpr,
    ROWS_ARE_KEYS: tl.constexpr,
):
    """Return the sum of the terms that exist, [i, j] or [j, i]; each tile is loaded as stored."""
    if HAS_C2P:
        c2p = _c2p_tile(C2P_BIAS, i, j, base_i, end_i, width, GATHERED)
        if ROWS_ARE_KEYS:
            c2p = tl.trans(c2p)
        bias = c2p.to(tl.float32)
    if HAS_P2C:
        p2c = _p2c_tile(P2C_BIAS, j, position_i, base_j, end_j, width, GATHERED)
        if not ROWS_ARE_KEYS:
            p2c = tl.trans(p2c)
        p2c = p2c.to(tl.float32)
        bias = bias + p2c if HAS_C2P else p2c
    if not (HAS_C2P or HAS_P2C):
        bias = 0.0
    return bias


@triton.jit
def far_bias(
    OWN_EDGES, OTHER_EDGES, is_low, own, own_count, other, other_count, batch_heads,
    HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr,
):
    """Return the bias [own, other] of a block of columns before (is_low) or behind the band.

    EDGES: terms with the table's first row, then (`batch_heads` x count elements on) with its last.
    For keys before the band, c2p takes the table's first row and p2c its last; behind the band it
    is the other way round.
    """
    bias = tl.zeros([own.shape[0], other.shape[0]], tl.float32)
    if HAS_OWN:
        edges = OWN_EDGES + tl.where(is_low, 0, batch_heads) * own_count
        bias += tl.load(edges + own, mask=own < own_count, other=0.0)[:, None]
    if HAS_OTHER:
        edges = OTHER_EDGES + tl.where(is_low, batch_heads, 0) * other_count
        bias += tl.load(edges + other, mask=other < other_count, other=0.0)[None, :]
    return bias
