"""Triton helpers: the band of a row (see `attention.band`), and tiles of the planes that hold it.

Both planes share the band's rule, and it is symmetric: key j is in the band of query i exactly
when i is in the band of j. A tile of a flash kernel lies within one group on either side, hence it
is dense in both planes or in neither.
"""

import triton
import triton.language as tl

from deberta_ds.model.attention.band import GROUP_COLUMNS

GROUP = tl.constexpr(GROUP_COLUMNS)


@triton.jit
def band_edges(position, SPAN, NK):
    """Return the first column of the band of rows at `position`, and the first one after it."""
    group = position // GROUP
    groups = (NK + GROUP - 1) // GROUP
    return tl.maximum(group - SPAN, 0) * GROUP, tl.minimum(group + SPAN + 1, groups) * GROUP


@triton.jit
def plane_shape(rows, SPAN, NK):
    """Return the width of a plane and its elements a head."""
    groups = (NK + GROUP - 1) // GROUP
    width = tl.minimum(2 * SPAN + 1, groups) * GROUP
    return width, ((rows + GROUP - 1) // GROUP * GROUP).to(tl.int64) * width


@triton.jit
def table_radius(SPAN, NK):
    """Return the table row of distance 0; the table has twice as many rows."""
    return tl.minimum(SPAN + 1, (NK + GROUP - 1) // GROUP) * GROUP


@triton.jit
def skewed_shape(rows, SPAN, NK):
    """Return the columns of a plane's gradient, one for each table row, and its elements a head.

    Row r holds column y of the plane at y - p_r + radius: so it is the gradient of the product
    x T^T itself, whose rows begin at whole vectors, while a tile of columns moves by one a row.
    """
    columns = 2 * table_radius(SPAN, NK)
    return columns, ((rows + GROUP - 1) // GROUP * GROUP).to(tl.int64) * columns


@triton.jit
def _key_tile(PLANE, i, j, base, end, width, PICKED: tl.constexpr):
    """Return the content-to-position terms of queries i and keys j, [i, j]."""
    column = j[None, :]
    if PICKED:  # every query has a band of its own; beyond it the term is that of its edge
        base = base[:, None]
        column = tl.minimum(tl.maximum(column, base), end[:, None] - 1)
    return tl.load(PLANE + (i[:, None] * width + (column - base)))


@triton.jit
def _query_tile(PLANE, j, position, base, end, width, PICKED: tl.constexpr):
    """Return the position-to-content terms of keys j and queries at `position`, [j, i]."""
    column = position[None, :]
    if PICKED:
        column = tl.minimum(tl.maximum(column, base), end - 1)
    return tl.load(PLANE + (j[:, None] * width + (column - base)))


@triton.jit
def near_bias(
    KEY_PLANE, QUERY_PLANE, i, position_i, base_i, end_i, j, base_j, end_j, width,
    HAS_KEY_TERM: tl.constexpr, HAS_QUERY_TERM: tl.constexpr, PICKED: tl.constexpr,
    ROWS_ARE_KEYS: tl.constexpr,
):
    """Return the sum of the terms that exist, [i, j] or [j, i]; each tile is loaded as stored."""
    if HAS_KEY_TERM:
        key_term = _key_tile(KEY_PLANE, i, j, base_i, end_i, width, PICKED)
        if ROWS_ARE_KEYS:
            key_term = tl.trans(key_term)
        bias = key_term.to(tl.float32)
    if HAS_QUERY_TERM:
        query_term = _query_tile(QUERY_PLANE, j, position_i, base_j, end_j, width, PICKED)
        if not ROWS_ARE_KEYS:
            query_term = tl.trans(query_term)
        query_term = query_term.to(tl.float32)
        bias = bias + query_term if HAS_KEY_TERM else query_term
    if not (HAS_KEY_TERM or HAS_QUERY_TERM):
        bias = 0.0
    return bias


@triton.jit
def far_bias(
    OWN_ENDS, OTHER_ENDS, is_low, own, own_count, other, other_count, planes,
    HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr,
):
    """Return the bias [own, other] of a block of columns before (is_low) or behind the band.

    ENDS: terms with the table's first row, then `planes` x count further those with its last row.
    The rows lie behind a block that lies before them, hence the other end of the columns' terms.
    """
    bias = tl.zeros([own.shape[0], other.shape[0]], tl.float32)
    if HAS_OWN:
        ends = OWN_ENDS + tl.where(is_low, 0, planes) * own_count
        bias += tl.load(ends + own, mask=own < own_count, other=0.0)[:, None]
    if HAS_OTHER:
        ends = OTHER_ENDS + tl.where(is_low, planes, 0) * other_count
        bias += tl.load(ends + other, mask=other < other_count, other=0.0)[None, :]
    return bias
