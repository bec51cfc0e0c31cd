"""Memory that steps on a CPU keep, which they would else ask the kernel for anew, page by page.

glibc gives the top of its heap back when tensors are freed, and blocks above 32 MiB always; the
kernel takes 0.3 to 0.5 ns a byte to map and clear them again, a tenth of a step of an xsmall model.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_NEVER = -1
_LARGE = 32 << 20  # bytes; where glibc's own moving threshold stops
_OWN_WORDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_MOST = 4  # kept at once: two tables' gradients, and two more where gradients are accumulated

_lock = Lock()


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


@dataclass
class _Kept:
    """Memory of a gradient: `storage` and the references to it where nobody uses it."""

    memory: Tensor
    storage: torch.UntypedStorage
    idle: tuple[int, int] = (0, 0)

    def references(self) -> tuple[int, int]:
        """Return those of tensors, and of Python's variables."""
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)

    def is_whole(self) -> bool:
        """Return whether it is still this process's alone, and was not freed in its place."""
        return not self.storage.is_shared() and self.storage.nbytes() == self.memory.nbytes


_kept: list[_Kept] = []


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new numbers of a tensor's shape, undefined, for its gradient.

    Large ones take the memory of an earlier one to which nothing refers any more. Where too many
    are kept, those that are idle are freed for a new one.
    """
    dtype = dtype or tensor.dtype
    plain = tensor.is_cpu and type(tensor) in (Tensor, torch.nn.Parameter)
    countable = hasattr(torch._C, "_storage_Use_Count")  # a private part, of torch 2.0 to 2.13
    if not (plain and countable) or tensor.numel() * dtype.itemsize < _LARGE:
        return torch.empty_like(tensor, dtype=dtype)
    with _lock:
        for one in _kept:
            same = one.memory.shape == tensor.shape and one.memory.dtype == dtype
            if same and one.references() == one.idle and one.is_whole():
                return one.memory.detach()
        if len(_kept) == _MOST:
            _kept[:] = [one for one in _kept if one.references() != one.idle]
        memory = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        if type(memory) is not Tensor or memory.is_inference() or len(_kept) == _MOST:
            return memory
        one = _Kept(memory, memory.untyped_storage())
        one.idle = one.references()
        _kept.append(one)
        return memory.detach()


def forget() -> None:
    """Keep no gradients' memory any longer: their model has been trained."""
    with _lock:
        _kept.clear()


def _begin_anew() -> None:
    """In a forked process nobody is left to release a lock that another thread held."""
    global _lock
    _lock = Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_begin_anew)
