"""Disentangled attention in Triton: flash forward and backward, packed, with dropout.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots, C rows of an
expanded table.
"""

import torch
from torch import Tensor

from deberta_ds.model.attention.dropout import dropout_words
from deberta_ds.model.attention.fused import ops
from deberta_ds.model.attention.fused.bands import make_band
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.kernel_check import on_device_of


def fused_path(
    q_BHQD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    pos_key_HSD: Tensor | None,
    pos_query_HSD: Tensor | None,
    *,
    geometry: Geometry,
    segments_BL: Tensor,
    query_positions_BQ: Tensor | None,
    dropout: float,
    seed: int | None,
) -> Tensor:
    """Return the context [B,Q,H,D] in the dtype of `q`; see `reference_attention`."""
    batch, heads, queries, size = q_BHQD.shape
    keys, dtype, device = k_BHLD.shape[2], q_BHQD.dtype, q_BHQD.device
    radius = make_band(geometry.reach, keys).radius(keys)
    scale = score_scale(size, pos_key_HSD, pos_query_HSD)
    facts = _facts(segments_BL, query_positions_BQ)
    if dropout > 0:
        words = dropout_words(seed, batch, heads, queries, keys, device)
    else:
        words = (torch.empty(0, dtype=torch.int32, device=device),) * 2
    with torch.autocast(device.type, enabled=False), on_device_of(q_BHQD):
        key_table = _expand(pos_key_HSD, geometry, radius, True, dtype)
        query_table = _expand(pos_query_HSD, geometry, radius, False, dtype)
        planes = [_rows_contiguous(x.to(dtype)) for x in (q_BHQD, k_BHLD, v_BHLD)]
        picked = query_positions_BQ is not None
        context_BQHD, _ = ops.fused_attention(
            *planes, key_table, query_table, *facts, *words,
            geometry.reach, scale, dropout, picked,
        )  # fmt: skip
    return context_BQHD


def _rows_contiguous(x_BHLD: Tensor) -> Tensor:
    return x_BHLD if x_BHLD.stride(-1) == 1 else x_BHLD.contiguous()


def _expand(
    table_HSD: Tensor | None, geometry: Geometry, radius: int, rows_are_queries: bool, dtype
) -> Tensor | None:
    """Return [H,C,D], C = 2 radius: row c serves column minus row of a plane = c - radius.

    A product with a one-hot matrix, not an index: exact, and its backward has no atomics.
    """
    if table_HSD is None:
        return None
    device = table_HSD.device
    distances_C = torch.arange(2 * radius, device=device) - radius
    slots_C = geometry.slots(-distances_C if rows_are_queries else distances_C)
    one_hot_CS = slots_C[:, None] == torch.arange(geometry.num_slots, device=device)
    return one_hot_CS.to(dtype) @ table_HSD.to(dtype)


def _facts(segments_BL: Tensor, query_positions_BQ: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return query_facts [4,B,Q] and key_facts [3,B,L] (see `ops`), without reading the device."""
    batch, length = segments_BL.shape
    segments = segments_BL.long()
    columns = torch.arange(length, device=segments.device).expand(batch, length)
    # Piece numbers beyond the length share an entry: a wider range, and the kernels still compare.
    entry = segments.clamp(0, length)
    shape = (batch, length + 1)
    starts = columns.new_full(shape, length).scatter_reduce_(1, entry, columns, "amin")
    stops = columns.new_zeros(shape).scatter_reduce_(1, entry, columns + 1, "amax")
    real = segments != 0
    starts, stops = (x.gather(1, entry) * real for x in (starts, stops))
    if query_positions_BQ is None:
        facts = torch.stack([segments, columns, starts, stops])
    else:
        picked = query_positions_BQ.long()
        facts = torch.stack([x.gather(1, picked) for x in (segments, columns, starts, stops)])
    return facts.int(), torch.stack([segments, starts, stops]).int()
