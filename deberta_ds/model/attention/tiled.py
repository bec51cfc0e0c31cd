"""Disentangled attention on a CPU without gather or scatter, in tiles, with its own backward.

Works on one tile at a time (see `tile`), small enough to stay in cache. Tiles of short spans keep
their probabilities for backward; those of long ones are computed again there, so memory does not
grow with length x length x heads x layers. Gathered queries (of the enhanced mask decoder) are a
tile per sequence, which costs more than it saves while sequences are short: they go to `dense`.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds.model.attention.dense import dense_attention
from deberta_ds.model.attention.dropout import random_bits
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.attention.segments import SHORT_ROWS, KeySpan, split_into_spans
from deberta_ds.model.attention.skew import PositionTerm, make_term, own_scratch
from deberta_ds.model.attention.tile import (
    ROWS_ARE_KEYS,
    Gradients,
    Inputs,
    add_gradients,
    context,
    groups,
    probabilities,
)
from deberta_ds.model.cpu import mkl_matmuls

KEEP_LENGTH = 512  # spans up to this long keep their probabilities for backward


def tiled_attention(q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *tables: Tensor | None,
                    geometry: Geometry, segments_BL: Tensor, query_positions_BQ: Tensor | None,
                    dropout: float, seed: Tensor | None) -> Tensor:
    """Return the context [B,Q,H,D] in the dtype of `q`; see `reference_attention`."""
    if query_positions_BQ is not None and k_BHLD.shape[2] <= SHORT_ROWS:
        return dense_attention(q_BHQD, k_BHLD, v_BHLD, *tables, geometry=geometry,
                               segments_BL=segments_BL, query_positions_BQ=query_positions_BQ,
                               dropout=dropout, seed=seed)
    dtype = q_BHQD.dtype
    spans = split_into_spans(segments_BL, query_positions_BQ)
    clip = query_positions_BQ is None
    tensors = [None if x is None else x.to(dtype)
               for x in (q_BHQD, k_BHLD, v_BHLD, *tables)]
    context_BHQD = _TiledAttention.apply(
        _Setting(geometry, spans, clip, dropout, seed), *tensors)
    return context_BHQD.transpose(1, 2)


@dataclass(frozen=True)
class _Setting:
    """What forward and backward share besides tensors."""

    geometry: Geometry
    spans: list[KeySpan]
    clip: bool  # treat columns beyond the table's reach as one
    dropout: float
    seed: Tensor | None


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, setting, q_BHQD, k_BHLD, v_BHLD, *tables):
        inputs = _prepare(setting, q_BHQD, k_BHLD, v_BHLD, *tables)
        context_BHQD = _zeros_flat(q_BHQD)
        kept = []
        training = any(ctx.needs_input_grad)
        for group in groups(setting.spans, q_BHQD):
            with _matmuls_of(group.span, k_BHLD.shape[2]):
                for tile in group.tiles():
                    probs = probabilities(inputs, tile)
                    tile.store_queries(context_BHQD, context(inputs, tile, probs))
                    if training and _is_kept(group.span):
                        kept.append(probs)
        ctx.save_for_backward(q_BHQD, k_BHLD, v_BHLD, *tables, *kept)
        ctx.setting, ctx.leaves = setting, 3 + len(tables)
        return context_BHQD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHQD):
        saved = ctx.saved_tensors  # read once: checkpointing recomputes at each read
        q_BHQD, k_BHLD, v_BHLD, *tables = saved[:ctx.leaves]
        kept = iter(saved[ctx.leaves:])
        setting = ctx.setting
        inputs = _prepare(setting, q_BHQD, k_BHLD, v_BHLD, *tables)
        q_grad, k_grad, v_grad = map(_zeros_flat, (q_BHQD, k_BHLD, v_BHLD))
        wide = q_BHQD.new_empty(0, dtype=torch.promote_types(q_BHQD.dtype, torch.float32))
        sums = [None if term is None else inputs.scratch.take(
            f"table {number}", term.table_HCD.shape, wide).zero_()
            for number, term in enumerate(inputs.terms)]
        for group in groups(setting.spans, q_BHQD):
            total = Gradients(
                k_BHLD.new_zeros(group.keys_of(k_BHLD).shape),
                v_BHLD.new_zeros(group.keys_of(v_BHLD).shape),
                [None if x is None else x[group.heads] for x in sums])
            with _matmuls_of(group.span, k_BHLD.shape[2]):
                for tile in group.tiles():
                    probs = next(kept) if _is_kept(group.span) else probabilities(inputs, tile)
                    part = add_gradients(inputs, tile, probs, tile.queries_of(grad_BHQD), total)
                    tile.store_queries(q_grad, part)
            group.store_keys(k_grad, total.k_GYD)
            group.store_keys(v_grad, total.v_GYD)
        grads = [None if term is None or x is None else
                 _table_gradient(term, x.mul_(inputs.scale), table)
                 for term, x, table in zip(inputs.terms, sums, tables, strict=True)]
        return None, q_grad, k_grad, v_grad, *grads


def _is_kept(span: KeySpan) -> bool:
    return span.stop - span.start <= KEEP_LENGTH


def _matmuls_of(span: KeySpan, keys: int) -> AbstractContextManager:
    """Return the context manager for matmuls of a span; those of whole sequences have one shape."""
    whole = span.queries_X is None and span.stop - span.start == keys
    return nullcontext() if whole else mkl_matmuls()


def _prepare(setting: _Setting, q_BHQD, k_BHLD, v_BHLD, *tables) -> Inputs:
    """Expand the position tables and compute the random bits of dropout."""
    batch, heads, queries, size = q_BHQD.shape
    keys = k_BHLD.shape[2]
    scale = score_scale(size, *tables)
    longest = max((span.stop - span.start for span in setting.spans), default=1)
    terms = [None if table_HSD is None else make_term(
        setting.geometry, table_HSD, longest, not of_keys, setting.clip, scale)
        for table_HSD, of_keys in zip(tables, ROWS_ARE_KEYS, strict=True)]
    bits = random_bits(setting.seed, batch, heads, queries, keys) if setting.dropout else None
    return Inputs(q_BHQD, k_BHLD, v_BHLD, terms, scale, setting.dropout, bits, own_scratch())


def _zeros_flat(tensor_BHRD: Tensor) -> Tensor:
    """Return zeros [B,H,R,D] laid out [B,R,H,D]."""
    return torch.zeros_like(tensor_BHRD.transpose(1, 2), memory_format=torch.contiguous_format
                            ).transpose(1, 2)


def _table_gradient(term: PositionTerm, sum_HCD: Tensor, table_HSD: Tensor) -> Tensor:
    """Return the gradient of a relative table from that of its expansion, in a fixed order."""
    grad_HSD = sum_HCD.new_zeros(table_HSD.shape)
    return grad_HSD.index_add_(1, term.slots_C, sum_HCD).to(table_HSD.dtype)
