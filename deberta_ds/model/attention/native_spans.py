"""Attention of short spans on a CPU, in C: `deberta_ds/native/attention.c`.

torch's operators would pass over a tile of scores some twenty-five times each way and copy every
operand of a product; here a strip of scores stays in the nearest cache from its products to the
context, in fp32 until it is probabilities. bf16 needs AMX or AVX-512-BF16, fp32 AVX-512 or AVX2.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table, U
units of work, C distances: c is that of the pair of row x and column y with y - x = c - (C / 2 -
1), rows being queries for the content-to-position term and keys for the other; T rows of a table.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deberta_ds import native
from deberta_ds.model.attention.dropout import drop_threshold, dropout_words
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.attention.spans import KeySpan

LONGEST = 512  # keys of a span: the probabilities are kept for backward
_SHARED = 0.7  # rows a distance below which distances share rows; from 0.75 on nothing is gained
_UNITS = 24  # at least so many of work, so that a table's gradient is the same from any threads

_Strides = ctypes.c_int64 * 3


class _Span(ctypes.Structure):
    _fields_ = [("first_row", ctypes.c_int64), ("last_row", ctypes.c_int64),
                ("start", ctypes.c_int64), ("keys", ctypes.c_int64), ("queries", ctypes.c_int64),
                ("chosen", ctypes.c_void_p), ("columns", ctypes.c_void_p),
                ("forbidden", ctypes.c_void_p), ("masks", ctypes.c_int64),
                ("kept", ctypes.c_int64)]


class _Table(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_void_p), ("row_at", ctypes.c_void_p), ("count", ctypes.c_int64)]


class _Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("query", "key", "value")]
    _fields_ += [(f"{name}_strides", _Strides) for name in ("query", "key", "value")]
    _fields_ += [(name, _Table) for name in ("to_key", "to_query")]
    _fields_ += [(name, ctypes.c_int64) for name in ("rows", "heads", "size", "longest", "most")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("query_words", "key_words")]
    _fields_ += [("query_tokens", ctypes.c_int64), ("tokens", ctypes.c_int64),
                 ("threshold", ctypes.c_int32),
                 ("scale", ctypes.c_float), ("grown", ctypes.c_float)]


class _Gradients(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("out_strides", _Strides)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("query", "key", "value", "to_key",
                                                      "to_query")]


def fits(spans: list[KeySpan], *tensors: Tensor) -> bool:
    """Return whether the kernels can work on these spans of queries, keys and values."""
    short = all(span.stop - span.start <= LONGEST for span in spans)
    dtypes = {tensor.dtype for tensor in tensors}
    if not short or len(dtypes) > 1 or not native.takes(*tensors):
        return False
    return native.multiplies(*dtypes)


def attend_in_c(
    q_BHQD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    pos_key_HSD: Tensor | None,
    pos_query_HSD: Tensor | None,
    geometry: Geometry,
    spans: list[KeySpan],
    dropout: float,
    seed: int | None,
) -> Tensor:
    """Return the context [B,Q,H,D]; queries of no span are 0."""
    return _NativeAttention.apply(q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, geometry,
                                  spans, dropout, seed)


class _Call:
    """One call's arguments as C takes them, and the tensors that they point into.

    seed: of the pairs to drop; None in backward, where the probabilities tell them.
    """

    def __init__(self, q, k, v, pos_key, pos_query, geometry, spans, dropout, seed):
        batch, self.heads, queries, self.size = q.shape
        length = k.shape[2]
        self.longest = native.padded(max((span.stop - span.start for span in spans), default=1))
        chosen = [len(span.queries_X) for span in spans if span.queries_X is not None]
        most = native.padded(max(chosen, default=self.longest))
        self.chunks = min(batch, -(-_UNITS // self.heads))
        self.units = self.heads * self.chunks
        self.scale = score_scale(self.size, pos_key, pos_query)
        self.kind = "bf16" if q.dtype == torch.bfloat16 else "fp32"
        # Sums rounded to bf16 would be less exact.
        share = _SHARED if self.kind == "fp32" and native.followed() > 4 else 0.0
        sides = _rows_at(geometry, self.longest, share)
        self.slots = [slots_T for slots_T, _ in sides]
        tables = [None if table is None else table.index_select(1, slots).mul_(self.scale)
                  for table, slots in zip((pos_key, pos_query), self.slots, strict=True)]
        words = (None, None)
        if dropout > 0 and seed is not None:
            words = dropout_words(seed, batch, self.heads, queries, length, q.device)
        flat = [_flat(x) for x in (q, k, v)]
        self._alive = [*flat, *tables, *words, *(row_at_C for _, row_at_C in sides)]
        self.problem = _Problem(
            *map(_address, flat), *(_Strides(*x.stride()[:3]) for x in flat),
            *(_Table(_address(table), _address(row_at_C), len(slots_T))
              for table, (slots_T, row_at_C) in zip(tables, sides, strict=True)),
            batch, self.heads, self.size, self.longest, most, *map(_address, words), queries,
            length, drop_threshold(dropout), self.scale, 1 / (1 - dropout))
        self.spans, self.kept = (_Span * len(spans))(), 0
        for number, span in enumerate(spans):
            self.spans[number] = self._span(span)

    def _span(self, span: KeySpan) -> _Span:
        forbidden, masks, keys, queries = None, 0, span.stop - span.start, span.stop - span.start
        chosen, columns = span.queries_X, span.positions_X
        if chosen is not None:
            queries, chosen, columns = len(chosen), chosen.contiguous(), columns.contiguous()
            self._alive += [chosen, columns]
        if span.allowed_RXY is not None:
            forbidden, masks = ~span.allowed_RXY, len(span.allowed_RXY)
            forbidden = forbidden.contiguous()
            self._alive.append(forbidden)
        before = self.kept
        self.kept += (span.rows.stop - span.rows.start) * self.heads * queries * keys
        return _Span(span.rows.start, span.rows.stop, span.start, keys, queries, _address(chosen),
                     _address(columns), _address(forbidden), masks, before)

    def run(self, name: str, *arguments) -> None:
        """Call a kernel for all units of work, in as many threads as torch has."""
        native.run_units(f"{name}_{self.kind}", self.units, ctypes.byref(self.problem), self.spans,
                         ctypes.c_long(len(self.spans)), ctypes.c_long(self.chunks), *arguments)

    def new_flat(self, like_BHRD: Tensor, held: str) -> Tensor:
        """Return a new [B,R,H,D]; zeros unless the spans hold all its "queries" or "keys"."""
        batch, heads, rows, size = like_BHRD.shape
        written = sum((span.last_row - span.first_row) * getattr(span, held)
                      for span in self.spans)
        new = torch.empty if written == batch * rows else torch.zeros
        return new(batch, rows, heads, size, dtype=like_BHRD.dtype)

    def table_gradient(self, side: int, sum_UDC: Tensor | None, like_HSD: Tensor) -> Tensor | None:
        """Return the gradient [H,S,D] of a relative table from the units' sums."""
        if sum_UDC is None:
            return None
        sum_HDC = sum_UDC.unflatten(0, (self.heads, self.chunks)).sum(1).mul_(self.scale)
        grad_HSD = like_HSD.new_zeros(like_HSD.shape, dtype=torch.float32)
        native.run_units(f"attend_table_{self.kind}", self.heads,
                         *map(native.address, (sum_HDC, self.slots[side], grad_HSD)),
                         *map(ctypes.c_long, (*sum_HDC.shape[1:], *like_HSD.shape[1:])))
        return grad_HSD.to(like_HSD.dtype)


@lru_cache(maxsize=64)
def _rows_at(geometry: Geometry, longest: int, share: float
             ) -> list[tuple[Tensor, Tensor | None]]:
    """Return the slots of each term's rows, and each distance's row; None: a row a distance.

    Distances share rows where there are less than `share` rows a distance.
    """
    offsets_C, sides = torch.arange(2 * longest) - (longest - 1), []
    for slots_C in (geometry.slots(offsets_C.neg()), geometry.slots(offsets_C)):
        slots_T, row_at_C = torch.unique_consecutive(slots_C, return_inverse=True)
        if len(slots_T) >= share * len(slots_C):
            sides.append((slots_C, None))
            continue
        spare = native.padded(len(slots_T)) + 2 * native.STRIP - len(slots_T)
        sides.append((torch.cat([slots_T, slots_T[-1:].expand(spare)]), row_at_C.int()))
    return sides


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        leaves = arguments[:5]
        call = _Call(*arguments)
        context_BQHD = call.new_flat(leaves[0], "queries")
        probs = leaves[0].new_empty(call.kept) if any(ctx.needs_input_grad) else None
        call.run("attend_forward", native.address(context_BQHD),
                 None if probs is None else native.address(probs))
        ctx.save_for_backward(*leaves, probs)
        ctx.rest = arguments[5:-1]  # all but the seed
        return context_BQHD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BQHD):
        *leaves, probs = ctx.saved_tensors
        call = _Call(*leaves, *ctx.rest, seed=None)
        grad_BHQD = _flat(grad_BQHD.to(leaves[0].dtype).transpose(1, 2))
        held = ("queries", "keys", "keys")
        grads = [call.new_flat(x, name) for x, name in zip(leaves[:3], held, strict=True)]
        width = native.padded(call.size)
        sums = [None if table is None else torch.empty(call.units, width, len(slots_T))
                for table, slots_T in zip(leaves[3:], call.slots, strict=True)]
        places = _Gradients(_address(grad_BHQD), _Strides(*grad_BHQD.stride()[:3]),
                            *map(_address, (*grads, *sums)))
        call.run("attend_backward", ctypes.byref(places), native.address(probs))
        tables = [call.table_gradient(side, sums[side], leaves[3 + side]) for side in (0, 1)]
        return (*(x.transpose(1, 2) for x in grads), *tables, None, None, None, None)


def _flat(tensor_BHLD: Tensor) -> Tensor:
    return tensor_BHLD if tensor_BHLD.stride(-1) == 1 else tensor_BHLD.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
