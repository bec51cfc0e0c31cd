"""Disentangled attention: one function, `attend`, over interchangeable implementations.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

from typing import Any

import torch
from torch import Tensor

from deberta_ds.model.attention.dense import attend_cls
from deberta_ds.model.attention.geometry import Geometry, make_band, padded
from deberta_ds.model.choose import MOST_ELEMENTS, find

__all__ = ["Geometry", "attend", "attend_cls", "gathered_term"]
_MOST_PROGRAMS = 65_535  # along the second axis of a launch: one for each sequence and head
_TOO_LARGE = (f"more than {_MOST_PROGRAMS:,} sequences times heads, or bias matrices "
              "of more than 2^31 elements")


def attend(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *tables: Tensor | None,
           geometry: Geometry, segments: Tensor, query_positions_BQ: Tensor | None = None,
           dropout: float = 0.0, seed: Tensor | None = None, mode: str = "auto",
           keep_terms: bool = False) -> Tensor:
    """Return the attention context [B,Q,H,D] in the one dtype of queries, keys and values.

    segments: integers [B,L]; a query sees the keys of its own segment, and 0 means padding. A
      query that sees no key gives 0.
    query_positions_BQ: row columns of the queries; None means Q == L, query i at column i. The
      relative distance is query column minus key column.
    tables: projected relative tables [H,S,D] in the order of TERMS, None to leave a term out; the
      one of position to content may be what `gathered_term` returned.
    dropout, seed: pairs to drop are a function of `seed` alone, int64 [1] on the device, so a
      recomputation under activation checkpointing sees the same mask. Required if `dropout` > 0.
    mode: "auto" or one implementation by name. Raises UserError for one that cannot run here.
    keep_terms: "fused" keeps its position terms for backward instead of computing them again.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), not {dropout}")
    if dropout > 0 and seed is None:
        raise ValueError("attention dropout needs a seed")
    if query_positions_BQ is None and q_BHQD.shape[2] != k_BHLD.shape[2]:
        raise ValueError("fewer queries than keys need query_positions_BQ")
    assert q_BHQD.dtype == k_BHLD.dtype == v_BHLD.dtype
    name, run = _find(k_BHLD, q_BHQD.shape[2], tables, geometry, mode)
    kept = {"keep_terms": keep_terms} if name == "fused" else {}
    with torch.autocast(q_BHQD.device.type, enabled=False):  # all compute in the operands' dtype
        return run(q_BHQD, k_BHLD, v_BHLD, *tables, geometry=geometry, segments_BL=segments,
                   query_positions_BQ=query_positions_BQ, dropout=dropout, seed=seed, **kept)


def gathered_term(k_BHLD: Tensor, *tables: Tensor | None, geometry: Geometry, segments: Tensor,
                  query_positions_BQ: Tensor, mode: str = "auto") -> Tensor | None:
    """Return the table of position to content for calls of `attend` with these keys and columns.

    "fused" computes the term for all of them; the others take the table itself.
    """
    name, _ = _find(k_BHLD, query_positions_BQ.shape[1], tables, geometry, mode)
    if name != "fused":
        return tables[1]
    from deberta_ds.model.kernels import attention

    with torch.autocast(k_BHLD.device.type, enabled=False):
        return attention.gathered_term(k_BHLD, *tables, geometry=geometry, segments_BL=segments,
                                       query_positions_BQ=query_positions_BQ)


def _find(k_BHLD: Tensor, queries: int, tables: tuple[Tensor | None, ...], geometry: Geometry,
          mode: str) -> tuple[str, Any]:
    (batch, heads, keys, size), band = k_BHLD.shape, make_band(geometry.reach, k_BHLD.shape[2])
    # Bias matrices and the score gradients of gathered queries are indexed with 32 bits.
    elements = max(2 * padded(keys) * band.radius(keys), padded(keys) * padded(queries))
    too_large = batch * heads > _MOST_PROGRAMS or elements >= MOST_ELEMENTS
    return find("attention", mode, k_BHLD.device, (k_BHLD.dtype,), size,
                tuple(x is not None for x in tables), _TOO_LARGE if too_large else "")
