"""Entry point of disentangled attention: check the arguments and call an implementation.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

import math
from typing import Any

import torch
from torch import Tensor

from deberta_ds.model.attention.dropout import keep_pairs
from deberta_ds.model.attention.geometry import Geometry, make_band, padded
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.choose import LONGEST_SHORT, MOST_ELEMENTS, MOST_PROGRAMS, find

_TOO_LARGE = (f"more than {MOST_PROGRAMS:,} sequences times heads, or bias matrices "
              "of more than 2^31 elements")


def attend(q_BHQD: torch.Tensor, k_BHLD: torch.Tensor, v_BHLD: torch.Tensor,
           pos_key_HSD: torch.Tensor | None, pos_query_HSD: torch.Tensor | None, *,
           geometry: Geometry, segments: torch.Tensor,
           query_positions_BQ: torch.Tensor | None = None, dropout: float = 0.0,
           seed: Tensor | None = None, mode: str = "auto", keep_terms: bool = False) -> Tensor:
    """Return the attention context [B,Q,H,D] in the one dtype of queries, keys and values.

    segments: integers [B,L]; a query sees the keys of its own segment, and 0 means padding. A
      query that sees no key gives 0.
    query_positions_BQ: row columns of the queries; None means Q == L, query i at column i. The
      relative distance is query column minus key column.
    pos_key_HSD, pos_query_HSD: projected relative tables, or None to leave that term out;
      pos_query_HSD may be what `gathered_term` returned.
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
    name, run = _find(k_BHLD, q_BHQD.shape[2], pos_key_HSD, pos_query_HSD, geometry, mode)
    kept = {"keep_terms": keep_terms} if name == "fused" else {}
    return run(q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, geometry=geometry,
               segments_BL=segments, query_positions_BQ=query_positions_BQ, dropout=dropout,
               seed=seed, **kept)


def gathered_term(k_BHLD: Tensor, pos_key_HSD: Tensor | None, pos_query_HSD: Tensor, *,
                  geometry: Geometry, segments: Tensor, query_positions_BQ: Tensor,
                  mode: str = "auto") -> Tensor:
    """Return what calls of `attend` with these keys and query positions take as pos_query_HSD.

    "fused" computes the term for all of them; the others take the table itself.
    """
    queries = query_positions_BQ.shape[1]
    name, _ = _find(k_BHLD, queries, pos_key_HSD, pos_query_HSD, geometry, mode)
    if name != "fused":
        return pos_query_HSD
    from deberta_ds.model.kernels import attention

    return attention.gathered_term(
        k_BHLD, pos_key_HSD, pos_query_HSD, geometry=geometry, segments_BL=segments,
        query_positions_BQ=query_positions_BQ)


def _find(k_BHLD: Tensor, queries: int, pos_key_HSD: Tensor | None, pos_query_HSD: Tensor | None,
          geometry: Geometry, mode: str) -> tuple[str, Any]:
    (batch, heads, keys, size), band = k_BHLD.shape, make_band(geometry.reach, k_BHLD.shape[2])
    # Bias matrices and the score gradients of gathered queries are indexed with 32 bits.
    elements = max(2 * padded(keys) * band.radius(keys), padded(keys) * padded(queries))
    too_large = batch * heads > MOST_PROGRAMS or elements >= MOST_ELEMENTS
    return find(
        "attention", mode, k_BHLD.device, k_BHLD.dtype, size, None,
        keys > LONGEST_SHORT or band.far,
        (pos_key_HSD is not None, pos_query_HSD is not None), _TOO_LARGE if too_large else "")


def attend_cls(q_BH1D: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, pos_key_HSD: Tensor | None,
               pos_query_HSD: Tensor | None, *, geometry: Geometry, segments_BL: Tensor,
               dropout: float = 0.0, seed: Tensor | None = None) -> Tensor:
    """Return the context [B,1,H,D] of the [CLS] query alone, in the dtype of `v`; scores and
    softmax are fp32.

    For the last layer below a head that reads only [CLS]: scores are matrix-vector products and
    need no tiles. The query is at column 0, so the relative distance to key j is -j. The other
    arguments are those of `attend`. A row that begins with padding gives 0.
    """
    batch, heads, keys, size = k_BHLD.shape
    compute = torch.promote_types(q_BH1D.dtype, torch.float32)
    # By indexing: index_select adds up gradients of repeated slots in any order on a GPU.
    slots_L = geometry.slots(-torch.arange(keys, device=k_BHLD.device))
    with torch.autocast(k_BHLD.device.type, enabled=False):
        q, k = q_BH1D.to(compute), k_BHLD.to(compute)
        sum_BHLD = q  # (q + pos_query) . k + q . pos_key, in two products
        if pos_query_HSD is not None:
            sum_BHLD = q + pos_query_HSD.to(compute)[:, slots_L]
        scores_BHL = (sum_BHLD * k).sum(-1)
        if pos_key_HSD is not None:
            table_HLD = pos_key_HSD.to(compute)[:, slots_L]
            scores_BHL = scores_BHL + (q @ table_HLD.transpose(1, 2)).squeeze(2)
        scores_BHL = scores_BHL * score_scale(size, pos_key_HSD, pos_query_HSD)
        allowed_BL = (segments_BL == segments_BL[:, :1]) & (segments_BL != 0)
        masked_B1L = ~allowed_BL[:, None]
        probs_BHL = scores_BHL.masked_fill(masked_B1L, -math.inf).softmax(-1)
        probs_BH1L = probs_BHL.masked_fill(masked_B1L, 0.0).unsqueeze(2)
        if dropout > 0:
            assert seed is not None
            kept_BH1L = keep_pairs(seed, batch, heads, 1, keys, dropout)
            probs_BH1L = probs_BH1L * kept_BH1L / (1 - dropout)
        return (probs_BH1L.to(v_BHLD.dtype) @ v_BHLD).transpose(1, 2)
