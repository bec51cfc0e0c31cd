"""Attention of the [CLS] query alone, for the last layer below a head that reads only [CLS].

With one query per sequence, scores are matrix-vector products and need no tiles. The query is at
column 0, so the relative distance to key j is -j.

Shape legend: B batch, H heads, L keys, D head size, S slots of the relative table.
"""

import math

import torch
from torch import Tensor

from deberta_ds.model.attention.dropout import drop_threshold, dropout_bits, keep_pairs
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import score_scale


def attend_cls(
    q_BH1D: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    pos_key_HSD: Tensor | None,
    pos_query_HSD: Tensor | None,
    *,
    geometry: Geometry,
    segments_BL: Tensor,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Return the context [B,1,H,D] of column 0 in the dtype of `v`; scores and softmax are fp32.

    The other arguments are those of `attend`. A row that begins with padding gives 0.
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
            bits = dropout_bits(seed, batch, heads, 1, keys, k_BHLD.device)
            kept_BH1L = keep_pairs(*bits, drop_threshold(dropout))
            probs_BH1L = probs_BH1L * kept_BH1L / (1 - dropout)
        return (probs_BH1L.to(v_BHLD.dtype) @ v_BHLD).transpose(1, 2)
