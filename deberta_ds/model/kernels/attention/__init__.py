"""Disentangled attention in Triton: flash forward and backward, packed, with dropout.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots, C rows of an
expanded table.
"""

from collections import deque
from operator import is_

import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.model.attention.geometry import Geometry, kept_tensors, make_band
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.kernels.attention import ops
from deberta_ds.model.kernels.operators import is_captured

_LEAST_SIZE = 16  # of a head: what a product on tensor cores takes


def fused_path(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, pos_key_HSD: Tensor | None,
               pos_query_HSD: Tensor | None, *, geometry: Geometry, segments_BL: Tensor,
               query_positions_BQ: Tensor | None, dropout: float, seed: Tensor | None,
               keep_terms: bool = False) -> Tensor:
    """Return the context [B,Q,H,D] in the dtype of `q`; see `reference_attention`.

    pos_query_HSD: or, of gathered queries, what `gathered_term` returned.
    keep_terms: keep the sum of the position terms, and which pairs dropout drops, for backward
      instead of computing them again; those of gathered queries always stay.
    """
    dtype, size = q_BHQD.dtype, q_BHQD.shape[-1]
    scale = score_scale(size, pos_key_HSD, pos_query_HSD)
    facts, p2c, p2c_table = _facts_once(segments_BL, query_positions_BQ), None, None
    qkv = [_rows_contiguous(_widened(x.to(dtype))) for x in (q_BHQD, k_BHLD, v_BHLD)]
    c2p_table = _expand(pos_key_HSD, geometry, k_BHLD, True)
    if query_positions_BQ is None:
        p2c_table = _expand(pos_query_HSD, geometry, k_BHLD, False)
    elif pos_query_HSD is not None and pos_query_HSD.dim() == 4:
        p2c = pos_query_HSD
    else:
        p2c = gathered_term(k_BHLD, pos_key_HSD, pos_query_HSD, geometry=geometry,
                            segments_BL=segments_BL, query_positions_BQ=query_positions_BQ)
    context_BQHD = ops.FusedAttention.apply(
        *qkv, c2p_table, p2c_table, p2c, *facts, seed, geometry.reach, scale, float(dropout),
        keep_terms)
    return context_BQHD[..., :size]


def gathered_term(k_BHLD: Tensor, pos_key_HSD: Tensor | None, pos_query_HSD: Tensor | None, *,
                  geometry: Geometry, segments_BL: Tensor, query_positions_BQ: Tensor) -> Tensor:
    """Return the position-to-content term of gathered queries, for several calls of `fused_path`
    with the same keys.
    """
    scale = score_scale(k_BHLD.shape[-1], pos_key_HSD, pos_query_HSD)
    keys = _rows_contiguous(_widened(k_BHLD))
    return ops.GatheredBias.apply(
        keys.detach() if pos_query_HSD is None else keys,  # without a table only a mask
        _expand(pos_query_HSD, geometry, k_BHLD, False),
        *_facts_once(segments_BL, query_positions_BQ), geometry.reach, scale)


def _widened(x: Tensor) -> Tensor:
    """Return vectors of a size that the kernels have; zeros behind them change no product."""
    wide = max(_LEAST_SIZE, 1 << (x.shape[-1] - 1).bit_length())
    return x if wide == x.shape[-1] else F.pad(x, (0, wide - x.shape[-1]))


def _rows_contiguous(x_BHLD: Tensor) -> Tensor:
    return x_BHLD if x_BHLD.stride(-1) == 1 else x_BHLD.contiguous()


def _expand(table_HSD: Tensor | None, geometry: Geometry, k_BHLD: Tensor, rows_are_queries: bool
            ) -> Tensor | None:
    """Return [C,H,D], C = 2 radius: row c is the relative row for (column - row) = c - radius.

    A product with a one-hot matrix, not an index: exact, and its backward has no atomics.
    """
    if table_HSD is None:
        return None
    keys, dtype = k_BHLD.shape[2], k_BHLD.dtype
    radius = make_band(geometry.reach, keys).radius(keys)
    one_hot_CS = _one_hot(geometry, radius, rows_are_queries, dtype, table_HSD.device)
    table_SHD = _widened(table_HSD).transpose(0, 1)
    # Contiguous after the projection, so no copy.
    return (one_hot_CS @ table_SHD.flatten(1).to(dtype)).view(-1, *table_SHD.shape[1:])


@kept_tensors(maxsize=None)  # for ever: CUDA graphs have its address; 1 MB at 512 tokens
def _one_hot(geometry: Geometry, radius: int, rows_are_queries: bool, dtype, device) -> Tensor:
    """Return [C,S]: the row of the relative table for each row of the expanded one."""
    distances_C = torch.arange(2 * radius, device=device) - radius
    slots_C = geometry.slots(-distances_C if rows_are_queries else distances_C)
    one_hot_CS = slots_C[:, None] == torch.arange(geometry.num_slots, device=device)
    return one_hot_CS.to(dtype)


def _facts_once(segments_BL: Tensor, query_positions_BQ: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `_facts`, which all layers of a step share: kept while the tensors are the same."""
    named = [x for x in (segments_BL, query_positions_BQ) if x is not None]
    if torch.compiler.is_compiling() or any(x.is_inference() for x in named):
        return _facts(segments_BL, query_positions_BQ)
    # A CUDA graph must compute its own, or replays would see the segments of a pass before it.
    seen = [x._version for x in named], is_captured(segments_BL)
    for tensors, known, facts in recent_facts:
        if len(tensors) == len(named) and known == seen and all(map(is_, tensors, named)):
            return facts
    with torch.inference_mode(False):
        facts = _facts(segments_BL, query_positions_BQ)
    recent_facts.append((named, seen, facts))
    return facts


# Holding the tensors keeps others from taking their place in memory.
recent_facts: deque = deque(maxlen=4)


def _facts(segments_BL: Tensor, query_positions_BQ: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return query_facts [4,B,Q] and key_facts [7,B,L] (see `ops`), without reading the device."""
    batch, length = segments_BL.shape
    segments = segments_BL.long()
    columns = torch.arange(length, device=segments.device).expand(batch, length)
    # Numbers beyond the length share an entry: a wider range, and the kernels still compare.
    entry = segments.clamp(0, length)
    shape = (batch, length + 1)
    starts = columns.new_full(shape, length).scatter_reduce_(1, entry, columns, "amin")
    stops = columns.new_zeros(shape).scatter_reduce_(1, entry, columns + 1, "amax")
    real = segments != 0
    starts, stops = (x.gather(1, entry) * real for x in (starts, stops))
    rows = [segments, columns, starts, stops]
    if query_positions_BQ is not None:
        gathered = query_positions_BQ.long()
        rows = [x.gather(1, gathered) for x in rows]
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    runs = (x * real for x in _ranges(columns, begins))
    keys = (segments, starts, stops, *_covers(columns, stops), *runs)
    return _aligned(torch.stack(rows).int()), _aligned(torch.stack(keys).int())


def _aligned(facts_KBL: Tensor) -> Tensor:
    """Return facts of which each begins at 16 bytes: for others Triton compiles other binaries."""
    count = facts_KBL[0].numel()
    if count % 4 == 0:
        return facts_KBL
    wide_KN = F.pad(facts_KBL.flatten(1), (0, -count % 4))
    return wide_KN[:, :count].unflatten(1, facts_KBL.shape[1:])


def _covers(columns: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each column, the range of the segments that enclose it; the column for none.

    For packed documents that is the column's own segment. A segment may have holes; segments that
    overlap count as one. Ranges do not overlap: a row of tiles and a column of tiles that follow
    them, in whole groups, have the same tiles.
    """
    reach = stops.cummax(1).values
    start, stop = _ranges(columns, columns >= F.pad(reach[:, :-1], (1, 0)))
    covered = reach > columns
    return torch.where(covered, start, columns), torch.where(covered, stop, columns + 1)


def _ranges(columns: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each column, the first and the last + 1 column of its range."""
    start = torch.where(begins, columns, 0).cummax(1).values
    ends = F.pad(begins[:, 1:], (0, 1), value=True)
    stop = torch.where(ends, columns + 1, columns.shape[1]).flip(1).cummin(1).values.flip(1)
    return start, stop
