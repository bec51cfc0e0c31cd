"""A stand-in for CUDA graphs on a CPU: records operators, and replays them on the same memory.

As in a real graph, no Python of the captured function runs in a replay: whatever it had read on the
host stays what it was.
"""

from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from deberta_ds.model.kernels import attention


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise AssertionError(f"{function} reads the device in a capture")
        out = function(*args, **(kwargs or {}))
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs or {}))}
        made = [tensor.detach() for tensor in _tensors(out)]
        fresh = [tensor.untyped_storage()._cdata not in before for tensor in made]
        self.calls.append((function, args, kwargs or {}, made, fresh))
        return out

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, made, fresh in self.calls:
            if function.is_view:
                continue
            new = function(*args, **kwargs)
            for kept, tensor, is_fresh in zip(made, _tensors(new), fresh, strict=True):
                if is_fresh:
                    kept.copy_(tensor)


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def capture(function):
    """Return the results of a function and what fills them again, as `engine.passes.capture`."""
    for _ in range(3):
        function()
    recorder = _Recorder()
    with patch.object(attention, "is_captured", lambda _: True), recorder:
        results = function()
    return results, recorder.replay
