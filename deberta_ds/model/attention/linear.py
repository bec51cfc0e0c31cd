"""Gather-free disentangled attention in PyTorch, with its own backward.

Works on one tile at a time (see `tile`), small enough to stay in cache. Tiles of short spans keep
their probabilities for backward; those of long ones are computed again there, so memory does not
grow with length x length x heads x layers.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds.model.attention.dropout import dropout_words
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.attention.skew import expansion
from deberta_ds.model.attention.spans import Span, cut_into_spans
from deberta_ds.model.attention.tile import (
    Gradients,
    Inputs,
    Side,
    add_gradients,
    context,
    probabilities,
    tiles,
)

KEEP_LENGTH = 512  # spans up to this long keep their probabilities for backward


def linear_attention(
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
    dtype = q_BHQD.dtype
    spans = cut_into_spans(segments_BL, query_positions_BQ)
    clip = query_positions_BQ is None
    with torch.autocast(q_BHQD.device.type, enabled=False):
        context_BHQD = _LinearAttention.apply(
            q_BHQD,
            k_BHLD.to(dtype),
            v_BHLD.to(dtype),
            None if pos_key_HSD is None else pos_key_HSD.to(dtype),
            None if pos_query_HSD is None else pos_query_HSD.to(dtype),
            (geometry, spans, clip, dropout, seed),
        )
    return context_BHQD.transpose(1, 2)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, plan):
        inputs = _prepare(q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, plan)
        batch, heads, queries, size = q_BHQD.shape
        context_BHQD = q_BHQD.new_zeros(batch, queries, heads, size).transpose(1, 2)
        kept = []
        training = any(ctx.needs_input_grad)
        for tile in tiles(plan[1], heads, q_BHQD.device):
            probs = probabilities(inputs, tile)
            tile.store_queries(context_BHQD, context(inputs, tile, probs))
            if training and _is_kept(tile.span):
                kept.append(probs)
        leaves = (q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD)
        ctx.save_for_backward(*leaves, context_BHQD, *kept)
        ctx.plan = plan
        return context_BHQD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHQD):
        saved = ctx.saved_tensors  # read once: checkpointing recomputes at each read
        leaves, context_BHQD, kept = saved[:5], saved[5], iter(saved[6:])
        inputs = _prepare(*leaves, ctx.plan)
        total = _zero_gradients(inputs)
        delta_BHQ1 = (grad_BHQD * context_BHQD).sum(-1, keepdim=True)
        for tile in tiles(ctx.plan[1], grad_BHQD.shape[1], grad_BHQD.device):
            probs = next(kept) if _is_kept(tile.span) else probabilities(inputs, tile)
            out_grad, delta = tile.queries_of(grad_BHQD), tile.queries_of(delta_BHQ1)
            add_gradients(inputs, tile, probs, out_grad, delta, total)
        scale = score_scale(grad_BHQD.shape[-1], leaves[3], leaves[4])
        key_side, query_side = inputs.key_side, inputs.query_side
        grad_key = grad_query = None
        if key_side:
            grad_key = key_side.expansion.collapse(total.key_table_HCD, leaves[3].shape[1])
        if query_side:
            table = total.query_table_HCD.mul_(scale)
            grad_query = query_side.expansion.collapse(table, leaves[4].shape[1])
        gradients = (total.q_BHQD.mul_(scale), total.k_BHLD, total.v_BHLD, grad_key, grad_query)
        dtype = grad_BHQD.dtype
        return *(None if g is None else g.to(dtype) for g in gradients), None


def _is_kept(span: Span) -> bool:
    return span.stop - span.start <= KEEP_LENGTH


def _prepare(q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, plan) -> Inputs:
    """Scale the queries, expand the position tables and draw the dropout words."""
    geometry, spans, clip, dropout, seed = plan
    batch, heads, queries, size = q_BHQD.shape
    keys, device = k_BHLD.shape[2], q_BHQD.device
    scale = score_scale(size, pos_key_HSD, pos_query_HSD)
    longest = max((span.stop - span.start for span in spans), default=1)
    key_side = query_side = words = None
    if pos_key_HSD is not None:
        expanded = expansion(geometry, longest, True, clip, device)
        key_side = Side(expanded, expanded.expand(pos_key_HSD))
    if pos_query_HSD is not None:
        expanded = expansion(geometry, longest, False, clip, device)
        query_side = Side(expanded, expanded.expand(pos_query_HSD).mul_(scale))
    if dropout > 0:
        words = dropout_words(seed, batch, heads, queries, keys, device)
    return Inputs(q_BHQD * scale, k_BHLD, v_BHLD, key_side, query_side, dropout, words)


def _zero_gradients(inputs: Inputs) -> Gradients:
    """Return zeros laid out [B,L,H,D] behind [B,H,L,D]; sums over tiles are fp32 or wider."""

    def zeros(tensor):
        batch, heads, rows, size = tensor.shape
        return tensor.new_zeros(batch, rows, heads, size).transpose(1, 2)

    def table_zeros(side):
        wide = torch.promote_types(inputs.q_BHQD.dtype, torch.float32)
        return None if side is None else torch.zeros_like(side.table_HCD, dtype=wide)

    return Gradients(
        zeros(inputs.q_BHQD),
        zeros(inputs.k_BHLD),
        zeros(inputs.v_BHLD),
        table_zeros(inputs.key_side),
        table_zeros(inputs.query_side),
    )
