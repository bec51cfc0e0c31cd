"""Bytes of activations of one micro-batch, by running the model without memory.

Forward and backward run on fake tensors (shapes without data), so every tensor that the real pass
would allocate is seen, at any size, and no formula has to follow the code. A GPU is assumed to run
the fused attention, which keeps queries, keys, values, projected tables, its output, one fp32
number a row and, if asked to, the position terms; their bias matrices exist while it runs.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.rows import Batch
from deberta_ds.model import encoder, linear_cross_entropy
from deberta_ds.model.attention.dropout import WORD_KEYS
from deberta_ds.model.attention.geometry import make_band, padded
from deberta_ds.model.dropout import DropoutMask
from deberta_ds.objectives.build import build_model


@dataclass(frozen=True)
class Activations:
    """Bytes of a forward and backward pass as its gradients come in."""

    points: dict[int, int]  # {bytes of finished gradients: most other bytes by then}

    def peak(self, share: float) -> int:
        """Return the most bytes held at once if `share` of each finished gradient is kept."""
        return round(max(live + share * done for done, live in self.points.items()))


def trace(run: RunConfig, dtype: torch.dtype, fused: bool) -> Activations:
    """Return the activations of one micro-batch of `run` on one GPU; parameters are not counted.

    `dtype` is that of the weights; `fused` counts the fused attention, otherwise the reference one.
    Every layer is traced: bytes extended from a few layers were up to 76 % too low.
    """
    # The reference attention stands for all that are not fused: it keeps the most.
    run = replace(run, model=replace(run.model, attention_dropout=0.0, attention="reference"))
    with ExitStack() as stack:  # of shape-only stand-ins for what reads numbers or needs a GPU
        if fused:
            chunk_for = linear_cross_entropy.chunk_for  # tens of chunks, where a CPU has hundreds
            stack.enter_context(patch.object(linear_cross_entropy, "chunk_for",
                                             lambda rows, _device: chunk_for(rows, "cuda")))
            stack.enter_context(patch.object(encoder, "attend", _fused_attend))
            stack.enter_context(patch.object(encoder, "gathered_term", _own_term))
        stack.enter_context(patch.object(linear_cross_entropy, "_sample", first_ids))
        stack.enter_context(patch.object(DropoutMask, "apply", _dropped))
        stack.enter_context(FakeTensorMode())
        return _run_counted(run, dtype)


def _dropped(mask: DropoutMask, hidden: Tensor) -> Tensor:
    """Return dropout by one operator, which keeps a byte an element: a hash makes many on a CPU."""
    return F.dropout(hidden, mask.threshold / 2**32)


def first_ids(uniforms_T: Tensor, *_arguments) -> Tensor:
    """Stand in for sampling: token 0 everywhere."""
    return torch.zeros_like(uniforms_T, dtype=torch.int64)


def _run_counted(run: RunConfig, dtype: torch.dtype) -> Activations:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build_model(run)
    finally:
        torch.set_default_dtype(default)
    batch = full_batch(run)
    normalizers = {"targets": torch.ones(()), "tokens": torch.ones(())}
    parameters = list(model.parameters())
    with _LiveBytes(parameters) as live:
        for parameter in parameters:  # each is reduced and freed as soon as it is there
            parameter.register_post_accumulate_grad_hook(live.finish_gradient)
        loss, *_ = model(batch, normalizers)
        loss.backward()  # and what is recomputed
    return Activations(live.points)


def full_batch(run: RunConfig) -> Batch:
    """Return a micro-batch of full rows with the expected number of targets."""
    rows, length, mask = run.train.micro_batch_size, run.data.seq_len, run.objective.mask
    per_row = max(1, round(max(mask.rate, mask.rate_at(1.0)) * length))
    plane = torch.zeros((rows, length), dtype=torch.int64)
    return Batch(rows=torch.zeros(rows, dtype=torch.int64), input_ids=plane, labels=plane,
                 segments=plane.to(torch.int32), positions=plane,
                 target_positions=torch.zeros((rows, per_row), dtype=torch.int64),
                 num_targets=rows * per_row, num_tokens=rows * length)


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still held, at their highest."""

    def __init__(self, parameters: list[Tensor]):
        super().__init__()
        self.points: dict[int, int] = {}
        self._live = self._finished = 0
        self._parameters = [p.untyped_storage() for p in parameters]  # operators return views
        self._known = {storage._cdata for storage in self._parameters}

    def finish_gradient(self, parameter: Tensor) -> None:
        self._finished += parameter.grad.nbytes
        parameter.grad = None

    def __torch_dispatch__(self, function: Callable, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        self.points[self._finished] = max(self.points.get(self._finished, 0), self._live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


class _FusedAttention(torch.autograd.Function):
    """What the fused kernels keep between forward and backward, without the arithmetic.

    Also their temporary memory: both bias matrices (their sum takes the place of one) and the words
    of dropped pairs, in backward also the score gradients by query and by key.
    """

    @staticmethod
    def forward(ctx, q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, band, keep, gathered,
                dropout):
        context_BQHD = torch.empty_like(q_BHQD.transpose(1, 2).contiguous())
        lse_BHQ = torch.empty(q_BHQD.shape[:3], dtype=torch.float32)
        queries, keys = padded(q_BHQD.shape[2]), k_BHLD.shape[2]
        ctx.matrix = (*q_BHQD.shape[:2], queries, padded(keys) if gathered else band.width(keys))
        ctx.dropped = (*q_BHQD.shape[:2], padded(keys) // WORD_KEYS, queries) if dropout else ()
        ctx.biases = 1 + (pos_key_HSD is not None or pos_query_HSD is None)
        ctx.keep, ctx.twice = keep or gathered, pos_query_HSD is not None and not gathered
        biases, words = _matrices(ctx, q_BHQD)
        ctx.save_for_backward(q_BHQD, k_BHLD, v_BHLD, pos_key_HSD, pos_query_HSD, context_BQHD,
                              lse_BHQ, *([*biases[:1], *words] if ctx.keep else ()))
        return context_BQHD

    @staticmethod
    def backward(ctx, grad_BQHD):
        inputs = ctx.saved_tensors[:5]
        held = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
        recomputed = [] if ctx.keep else _matrices(ctx, inputs[0])
        gradients = [inputs[0].new_empty(ctx.matrix) for _ in range(1 + ctx.twice)]
        del recomputed, gradients  # which were there at once
        return *held, None, None, None, None


def _matrices(ctx, q_BHQD: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the bias matrices, and the words of dropped pairs."""
    return ([q_BHQD.new_empty(ctx.matrix) for _ in range(ctx.biases)],
            [q_BHQD.new_empty(ctx.dropped, dtype=torch.int32)] if ctx.dropped else [])


def _fused_attend(*tensors, geometry, keep_terms, dropout=0.0, query_positions_BQ=None, **_options):
    band = make_band(geometry.reach, tensors[1].shape[2])
    return _FusedAttention.apply(*tensors, band, keep_terms, query_positions_BQ is not None,
                                 dropout)


def _own_term(_k_BHLD, _pos_key_HSD, pos_query_HSD: Tensor, **_options) -> Tensor:
    """Return the table: `_FusedAttention` counts the matrix of each pass of the decoder."""
    return pos_query_HSD
