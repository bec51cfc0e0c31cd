"""Memory that steps on a CPU keep, which they would else ask the kernel for anew, page by page.

glibc gives the top of its heap back when tensors are freed, and blocks above 32 MiB always; the
kernel takes 0.3 to 0.5 ns a byte to map and clear them again, a tenth of a step of an xsmall model.
"""

import ctypes
import os

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_NEVER = -1
_LARGE = 32 << 20  # bytes; where glibc's own moving threshold stops
_OWN_WORDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_kept: list[tuple[Tensor, int]] = []  # and the references to its storage where nobody uses it


def keep_heap() -> bool:
    """Let this process keep its heap; return whether it does. What the user set is left alone.

    Its peak stays what it was: blocks that may move into the heap are those that glibc's own moving
    threshold lets in.
    """
    if any(os.environ.get(name) for name in _OWN_WORDS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new numbers of a tensor's shape, undefined, for its gradient.

    Large ones take the memory of an earlier one to which nothing refers any more; idle memory of
    other shapes is freed when a shape is new.
    """
    dtype = dtype or tensor.dtype
    plain = tensor.is_cpu and type(tensor) in (Tensor, torch.nn.Parameter)
    countable = hasattr(torch._C, "_storage_Use_Count")  # a private part, of torch 2.0 to 2.13
    if not (plain and countable) or tensor.numel() * dtype.itemsize < _LARGE:
        return torch.empty_like(tensor, dtype=dtype)
    for memory, idle in _kept:
        same = memory.shape == tensor.shape and memory.dtype == dtype
        if same and _references(memory) == idle:
            return memory.detach()
    _kept[:] = [(memory, idle) for memory, idle in _kept if _references(memory) != idle]
    memory = torch.empty(tensor.shape, dtype=dtype)
    _kept.append((memory, _references(memory)))
    return memory.detach()


def _references(memory: Tensor) -> int:
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
