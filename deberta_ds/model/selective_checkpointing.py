"""Selective activation checkpointing: save the outputs of linear layers, recompute the rest.

torch's selective checkpointing compares every operator of the two forward passes. Under ZeRO-3
those that gather weights run inside of a layer and are not the same ones twice: after a resume,
small weights are there in the first forward pass and gathered in the second. Only what is saved is
compared here.
"""

from collections import deque

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LINEAR_OPERATORS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def save_linear_outputs() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its recomputation, for `checkpoint`."""
    saved: deque[Tensor] = deque()
    return _SaveOutputs(saved), _ReuseOutputs(saved)


class _SaveOutputs(TorchDispatchMode):
    def __init__(self, saved: deque[Tensor]):
        super().__init__()
        self._saved = saved

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator in _LINEAR_OPERATORS:
            self._saved.append(out.detach())  # `out` itself will refer to the graph, and that to it
        return out


class _ReuseOutputs(TorchDispatchMode):
    def __init__(self, saved: deque[Tensor]):
        super().__init__()
        self._saved = saved

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        if operator in _LINEAR_OPERATORS:
            return self._saved.popleft()
        return operator(*args, **(kwargs or {}))
