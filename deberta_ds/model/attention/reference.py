"""Reference implementation of disentangled attention, as the papers write it.

score[i,j] = (q_i . k_j + q_i . pos_key[t(i-j)] + pos_query[t(i-j)] . k_j) / sqrt(D * (1 + terms))

Both position terms use one index t(i-j), as the official and the Hugging Face code do; the v1
paper's delta(j,i) for the second term is not what any released model was trained with.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

import math

import torch
from torch import Tensor

from deberta_ds.model.attention.dropout import keep_pairs
from deberta_ds.model.attention.geometry import Geometry


def reference_attention(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *tables: Tensor | None,
                        geometry: Geometry, segments_BL: Tensor,
                        query_positions_BQ: Tensor | None, dropout: float, seed: Tensor | None
                        ) -> Tensor:
    """Return the context [B,Q,H,D] in the dtype of `v`; scores and softmax are fp32 (or fp64).

    Gathers from [.., Q, S] matrices: slow, much memory, but each line is one line of the paper.
    """
    batch, heads, queries, size = q_BHQD.shape
    keys = k_BHLD.shape[2]
    device = q_BHQD.device
    compute = torch.float64 if q_BHQD.dtype == torch.float64 else torch.float32
    if query_positions_BQ is None:
        query_positions_BQ = torch.arange(queries, device=device).expand(batch, queries)
    q, k = q_BHQD.to(compute), k_BHLD.to(compute)
    key_columns = torch.arange(keys, device=device)
    slots_BQL = geometry.slots(query_positions_BQ[:, :, None] - key_columns)
    index_BHQL = slots_BQL[:, None].expand(batch, heads, queries, keys)
    content_BHQL, *terms = score_parts(q, k, index_BHQL, *tables).values()
    scores_BHQL = sum(terms, content_BHQL) * score_scale(size, *tables)
    allowed_B1QL = allowed_pairs(segments_BL, query_positions_BQ)[:, None]
    scores_BHQL = scores_BHQL.masked_fill(~allowed_B1QL, -math.inf)
    # A row without keys is all -inf: softmax gives NaN there, and the rule is 0.
    probs_BHQL = scores_BHQL.softmax(-1).masked_fill(~allowed_B1QL, 0.0)
    if dropout > 0:
        assert seed is not None
        keep_BHQL = keep_pairs(seed, batch, heads, queries, keys, dropout)
        probs_BHQL = probs_BHQL * keep_BHQL / (1 - dropout)
    context_BHQD = probs_BHQL.to(v_BHLD.dtype) @ v_BHLD
    return context_BHQD.transpose(1, 2)


def score_parts(q_BHQD: Tensor, k_BHLD: Tensor, index_BHQL: Tensor, pos_key_HSD: Tensor | None,
                pos_query_HSD: Tensor | None) -> dict[str, Tensor]:
    """Return what the unscaled scores [B,H,Q,L] are the sum of: "content", and the position terms.

    index_BHQL: the row of the relative table for each pair.
    """
    parts = {"content": q_BHQD @ k_BHLD.transpose(-1, -2)}
    if pos_key_HSD is not None:
        content_to_position = q_BHQD @ pos_key_HSD.to(q_BHQD.dtype).transpose(-1, -2)
        parts["c2p"] = content_to_position.gather(-1, index_BHQL)
    if pos_query_HSD is not None:
        position_to_content = pos_query_HSD.to(k_BHLD.dtype) @ k_BHLD.transpose(-1, -2)
        parts["p2c"] = position_to_content.gather(-2, index_BHQL)
    return parts


def score_scale(size: int, *tables: Tensor | None) -> float:
    """Return 1 / sqrt(D * (1 + number of position terms present))."""
    return 1.0 / math.sqrt(size * (1 + sum(table is not None for table in tables)))


def allowed_pairs(segments_BL: Tensor, query_positions_BQ: Tensor) -> Tensor:
    """Return bool [B,Q,L]: key j is in the segment of query i, and that segment is not padding."""
    query_segments_BQ = segments_BL.gather(1, query_positions_BQ.long())
    same_BQL = query_segments_BQ[:, :, None] == segments_BL[:, None, :]
    return same_BQL & (segments_BL != 0)[:, None, :]
