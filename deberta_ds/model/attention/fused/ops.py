"""The kernels as torch operators: opaque to torch.compile, with fake kernels and autograd.

Shape legend: B batch, H heads, Q queries, L keys, D head size, C rows of an expanded table.
"""

import torch
import triton
from torch import Tensor

from deberta_ds.model.attention.dropout import drop_threshold
from deberta_ds.model.attention.fused import kernels, tiles

# query_facts int32 [4,B,Q]: segment, row column, first and last + 1 key column of the piece.
# key_facts int32 [3,B,L]: segment, first and last + 1 query of the piece.


@torch.library.custom_op("deberta_ds::fused_attention", mutates_args=())
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor | None,
    query_table: Tensor | None,
    query_facts: Tensor,
    key_facts: Tensor,
    query_words: Tensor,
    key_words: Tensor,
    reach: int,
    scale: float,
    dropout: float,
    picked: bool,
) -> tuple[Tensor, Tensor]:
    """Return the context [B,Q,H,D] and the base-2 logsumexp [B,H,Q] in fp32.

    key_table, query_table: expanded tables [H,C,D]; words: dropout words (empty without dropout).
    """
    batch, heads, queries, size = q.shape
    out = torch.empty(batch, queries, heads, size, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    tile = _tile(q, k, "forward")
    grid = (triton.cdiv(queries, tile.block_m), batch * heads)
    kernels.forward_kernel[grid](
        q, k, v, *_planes(q, k, key_table, query_table), out, lse,
        *query_facts, key_facts[0], query_words, key_words,
        *_common(q, k, v, key_table, query_table, reach, scale, dropout),
        **_constants(q, key_table, query_table, dropout, tile),
    )  # fmt: skip
    return out, lse


@fused_attention.register_fake
def _(q, k, v, key_table, query_table, query_facts, key_facts, query_words, key_words, *_rest):
    batch, heads, queries, size = q.shape
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    return q.new_empty(batch, queries, heads, size), lse


@torch.library.custom_op("deberta_ds::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor | None,
    query_table: Tensor | None,
    query_facts: Tensor,
    key_facts: Tensor,
    query_words: Tensor,
    key_words: Tensor,
    reach: int,
    scale: float,
    dropout: float,
    picked: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v (laid out [B,L,H,D], as views [B,H,L,D]) and of both tables."""
    grad = grad.contiguous()
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    delta = (grad.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
                  for x in (q, k, v))  # fmt: skip
    columns = 1 if key_table is None else key_table.shape[1]
    d_key_term = q.new_zeros(batch, heads, queries, columns)
    columns = queries if picked else (1 if query_table is None else query_table.shape[1])
    d_query_term = q.new_zeros(batch, heads, keys, columns)
    planes = _planes(q, k, key_table, query_table)
    common = _common(q, k, v, key_table, query_table, reach, scale, dropout)
    words = (key_facts[0], query_words, key_words)
    tile = _tile(q, k, "query")
    kernels.backward_query_kernel[(triton.cdiv(queries, tile.block_m), batch * heads)](
        q, k, v, *planes, grad, lse, delta, dq, d_key_term, *query_facts, *words, *common,
        **_constants(q, key_table, query_table, dropout, tile),
    )  # fmt: skip
    tile = _tile(q, k, "key")
    kernels.backward_key_kernel[(triton.cdiv(keys, tile.block_n), batch * heads)](
        q, k, v, *planes, grad, lse, delta, dk, dv, d_query_term,
        *query_facts[:2], *key_facts[1:], *words, *common, PICKED=picked,
        **_constants(q, key_table, query_table, dropout, tile),
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    d_tables = [q.new_empty(0), q.new_empty(0)]
    if key_table is not None:
        dq += d_key_term @ key_table
        d_tables[0] = _table_gradient(d_key_term, q)
    if query_table is not None:
        if picked:
            d_query_term = _spread(d_query_term, query_facts[1], reach, query_table.shape[1])
        dk += d_query_term @ query_table
        d_tables[1] = _table_gradient(d_query_term, k)
    return dq, dk, dv, *d_tables


@fused_attention_backward.register_fake
def _(grad, out, lse, q, k, v, key_table, query_table, *_rest):
    planes = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
    tables = (key_table, query_table)
    return *planes, *(q.new_empty(0) if t is None else torch.empty_like(t) for t in tables)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.numbers = inputs[9:]


def _backward(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    grads = fused_attention_backward(grad, out, lse, *tensors, *ctx.numbers)
    d_tables = [None if t is None else g for t, g in zip(tensors[3:5], grads[3:], strict=True)]
    return *grads[:3], *d_tables, *[None] * 8


fused_attention.register_autograd(_backward, setup_context=_save)


def _planes(q, k, key_table, query_table) -> tuple[Tensor, Tensor]:
    """Return q . Tk [B,H,Q,C] and k . Tq [B,H,L,C]; a placeholder for an absent term."""
    key_term = q if key_table is None else q @ key_table.transpose(1, 2)
    query_term = k if query_table is None else k @ query_table.transpose(1, 2)
    return key_term, query_term


def _table_gradient(d_term: Tensor, x: Tensor) -> Tensor:
    """Return [H,C,D]: the batch is summed in a fixed order, in fp32."""
    return (d_term.transpose(2, 3) @ x).sum(0, dtype=torch.float32).to(x.dtype)


def _spread(d_scores: Tensor, positions: Tensor, reach: int, columns: int) -> Tensor:
    """Return plane gradients [B,H,L,C] from score gradients [B,H,L,Q] of picked queries."""
    keys = torch.arange(d_scores.shape[2], device=d_scores.device)
    column = (positions[:, None, :] - keys[:, None] + reach).long()[:, None]
    low, high = column <= 0, column >= 2 * reach
    plane = d_scores.new_zeros(*d_scores.shape[:3], columns)
    index = column.clamp(0, 2 * reach).expand_as(d_scores)
    # Queries share a column only in the decoder's unused slots, whose gradients are zeros: adding
    # those in any order gives the same bits.
    plane.scatter_add_(3, index, d_scores.masked_fill(low | high, 0))
    for end, far in ((0, low), (2 * reach, high)):
        plane[..., end] += (d_scores * far).sum(-1, dtype=torch.float32).to(plane.dtype)
    return plane


def _tile(q: Tensor, k: Tensor, direction: str) -> tiles.Tile:
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    return tiles.choose(capability, q.shape[-1], max(q.shape[2], k.shape[2]), direction)


def _common(q, k, v, key_table, query_table, reach, scale, dropout) -> tuple:
    """Return the scalar arguments that all kernels share, in order."""
    tables = [t for t in (key_table, query_table) if t is not None]
    columns = tables[0].shape[1] if tables else 1
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = (q.shape[2], k.shape[2], q.shape[1], columns, reach)
    return *strides, *sizes, scale, 1 / (1 - dropout), drop_threshold(dropout)


def _constants(q, key_table, query_table, dropout, tile: tiles.Tile) -> dict:
    return {
        "HAS_KEY_TERM": key_table is not None,
        "HAS_QUERY_TERM": query_table is not None,
        "DROPOUT": dropout > 0,
        "D": q.shape[-1],
        "BM": tile.block_m,
        "BN": tile.block_n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
