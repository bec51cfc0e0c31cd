"""Disentangled attention by matmuls over the whole batch: on a GPU, where no fused kernel runs.

No loop over sequences and no Triton: a position term is a view of one product per head, whose rows
move by a column (see `skew`), and the backward pass is autograd's. The scores of all pairs are in
memory; backward keeps the probabilities, with dropout twice and the mask. Scores have the dtype of
the operands, sums of products and softmax are fp32. Every sum has a fixed order.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots; G heads x batch (all
sequences of one head, then of the next), X rows and Y columns of a term, C rows of an expanded
table.
"""

import math

import torch
from torch import Tensor

from deberta_ds.model.attention.dropout import keep_pairs
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.attention.skew import ALIGNED, skewed_view


def dense_attention(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *tables: Tensor | None,
                    geometry: Geometry, segments_BL: Tensor, query_positions_BQ: Tensor | None,
                    dropout: float, seed: Tensor | None) -> Tensor:
    """Return the context [B,Q,H,D] in the dtype of `q`; see `reference_attention`."""
    batch, heads, queries, size = q_BHQD.shape
    keys, columns_BQ, query_segments_BQ = k_BHLD.shape[2], None, segments_BL
    if query_positions_BQ is not None:
        columns_BQ = query_positions_BQ.long()
        query_segments_BQ = segments_BL.gather(1, columns_BQ)
    padding_BQ = query_segments_BQ == 0
    # Every query sees a key, or softmax would be NaN; what padding sees is set to 0 below.
    masked_BQL = (query_segments_BQ[:, :, None] != segments_BL[:, None]) & ~padding_BQ[:, :, None]
    q_GQD, k_GLD, v_GLD = (x.transpose(0, 1).reshape(heads * batch, -1, size)
                           for x in (q_BHQD, k_BHLD, v_BHLD))
    scores_GQL = _scores(q_GQD, k_GLD, *tables, geometry=geometry, columns_BQ=columns_BQ)
    scores_HBQL = scores_GQL.view(heads, batch, queries, keys)
    probs_HBQL = scores_HBQL.masked_fill_(masked_BQL, -math.inf).softmax(-1)
    if dropout > 0:
        assert seed is not None
        kept_BHQL = keep_pairs(seed, batch, heads, queries, keys, dropout)
        probs_HBQL = probs_HBQL * kept_BHQL.transpose(0, 1)
    context_GQD = torch.bmm(probs_HBQL.flatten(0, 1), v_GLD) * (1 / (1 - dropout))
    context_BQHD = context_GQD.view(heads, batch, queries, size).permute(1, 2, 0, 3)
    return context_BQHD.masked_fill(padding_BQ[:, :, None, None], 0.0)


def _scores(q_GQD: Tensor, k_GLD: Tensor, pos_key_HSD: Tensor | None,
            pos_query_HSD: Tensor | None, *, geometry: Geometry, columns_BQ: Tensor | None
            ) -> Tensor:
    """Return the scaled scores [G,Q,L]; columns_BQ None: query i is at column i."""
    keys = k_GLD.shape[1]
    scale = score_scale(q_GQD.shape[2], pos_key_HSD, pos_query_HSD)
    scores_GQL = scaled_product(q_GQD, k_GLD.transpose(1, 2), scale)
    if pos_key_HSD is not None:
        products_GQC = _products(q_GQD, pos_key_HSD, keys, geometry, -1, scale)
        if columns_BQ is None:
            scores_GQL += skewed_view(products_GQC, keys)
        else:  # each pair has an element of its own, so backward has one writer per element
            columns_L = torch.arange(keys - 1, 2 * keys - 1, device=q_GQD.device)
            index_GQL = (columns_L - columns_BQ[:, :, None]).repeat(len(pos_key_HSD), 1, 1)
            scores_GQL += products_GQC.gather(2, index_GQL)
    if pos_query_HSD is not None:
        term_GLL = skewed_view(_products(k_GLD, pos_query_HSD, keys, geometry, 1, scale), keys)
        if columns_BQ is not None:  # by a product: several queries may share a column
            one_hot_BQL = columns_BQ[:, :, None] == torch.arange(keys, device=q_GQD.device)
            one_hot_GQL = one_hot_BQL.to(term_GLL.dtype).repeat(len(pos_query_HSD), 1, 1)
            scores_GQL += one_hot_GQL @ term_GLL.transpose(1, 2)
        else:
            scores_GQL += term_GLL.transpose(1, 2)
    return scores_GQL


def _products(x_GXD: Tensor, table_HSD: Tensor, keys: int, geometry: Geometry, sign: int,
              scale: float) -> Tensor:
    """Return x . T[c] for all rows [G,X,C], where T[c] is the row of distance sign * (c - L + 1).
    """
    # A multiple of ALIGNED: at least the 2 L - 1 distances there are.
    distances_C = torch.arange(2 * keys + -2 * keys % ALIGNED, device=x_GXD.device) - (keys - 1)
    slots_C1 = geometry.slots(sign * distances_C)[:, None]
    # Expanded by a product: backward of an index adds in any order on a GPU.
    one_hot_CS = slots_C1 == torch.arange(table_HSD.shape[1], device=x_GXD.device)
    table_HCD = one_hot_CS.to(x_GXD.dtype) @ table_HSD.to(x_GXD.dtype)
    rows = x_GXD.view(len(table_HSD), -1, x_GXD.shape[2])
    return scaled_product(rows, table_HCD.transpose(1, 2), scale).view(*x_GXD.shape[:2], -1)


def scaled_product(left_GXD: Tensor, right_GDY: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right, rounded once."""
    return torch.baddbmm(left_GXD.new_zeros(()), left_GXD, right_GDY, beta=0, alpha=scale)


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
