"""Checkpointed layers that keep what their linear layers returned and recompute all else.

torch's selective checkpointing compares every operator of the two forward passes. Under ZeRO-3
those that gather weights run inside of a layer and are not the same ones twice: after a resume,
small weights are there in the first forward pass and gathered in the second. Only what is kept is
compared here.
"""

from collections import deque

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LINEAR_OPERATORS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def keep_linear_outputs() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its recomputation, for `checkpoint`."""
    kept: deque[Tensor] = deque()
    return _Keep(kept), _GiveBack(kept)


class _Keep(TorchDispatchMode):
    def __init__(self, kept: deque[Tensor]):
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator in _LINEAR_OPERATORS:
            self._kept.append(out.detach())  # `out` itself will refer to the graph, and that to it
        return out


class _GiveBack(TorchDispatchMode):
    def __init__(self, kept: deque[Tensor]):
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        if operator in _LINEAR_OPERATORS:
            return self._kept.popleft()
        return operator(*args, **(kwargs or {}))
