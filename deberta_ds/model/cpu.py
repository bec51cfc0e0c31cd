"""Process settings for training on a CPU: the library for fp32 matmuls, and malloc.

torch asks MKL, which stops at AVX2 on processors that are not Intel's. oneDNN, in torch too, uses
AVX-512 on all of them: 2.2 x as fast on Zen 5. torch asks it only when matmuls may be less exact
("medium"), for which oneDNN has no code where there is no AMX: it computes in fp32. That is tried
here, not assumed.

oneDNN compiles code for every new shape, 0.3 ms and half a MiB that stays: good for the shapes of
every step of pretraining, bad for document segments of any length, which go back to MKL
(`mkl_matmuls`), and for batches of fine-tuning, which are as wide as their longest sequence.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOG = logging.getLogger("deberta_ds")
_NEEDED, _HARMFUL = ("avx512_bw", "avx512_dq", "avx512_vl"), "amx_tile"
# (batch, rows, inner, columns): a weight, a block of attention, a head, odd sizes.
_TRIED = ((1, 256, 384, 1536), (8, 32, 64, 144), (8, 128, 64, 128), (1, 5, 999, 77))
# malloc.h's names for mallopt: when to give back memory, and how many blocks to map by themselves.
_TRIM_THRESHOLD, _MMAP_MAX, _NEVER, _NONE = -1, -4, -1, 0
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_",
                     "GLIBC_TUNABLES")

_chosen = False  # whether this process's precision is our choice


def use_onednn() -> bool:
    """Let oneDNN compute fp32 matmuls where MKL is slow; return whether it does from now on.

    A setting of the whole process, so it belongs to the start of a pretraining run. A precision
    that the caller chose is left alone. The answer depends on processor and torch alone, so a
    resumed run computes the same bits.
    """
    global _chosen
    if not _chosen and _is_default() and _mkl_is_slow():
        torch.set_float32_matmul_precision("medium")
        _chosen = _computes_in_fp32()
        if _chosen:
            _LOG.info("fp32 matmuls: oneDNN, because MKL has no AVX-512 for this processor")
        else:
            torch.set_float32_matmul_precision("highest")
    return _chosen


def keep_heap() -> bool:
    """Let this process keep the memory of freed tensors; return whether it does.

    glibc gives freed tensors back to the kernel, those above 32 MiB (an embedding's gradient) each
    by itself, and the next step maps and clears them again: a tenth of a step of an xsmall model.
    Settings of the user are left alone.
    """
    if any(os.environ.get(name) for name in _MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, _NONE) and mallopt(_TRIM_THRESHOLD, _NEVER))


@contextmanager
def mkl_matmuls() -> Iterator[None]:
    """Let MKL compute the fp32 matmuls of this block, whose shapes may never come again."""
    if not _chosen:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def capabilities() -> dict:
    """Return what torch knows of the processor; nothing in a torch that cannot tell."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def has_bf16() -> bool:
    """Return whether this processor has units for bf16 matmuls (AVX512-BF16, AMX)."""
    found = capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def deepspeed_json() -> str:
    """Return which of ds_configs/ suits this processor."""
    return f"zero1_{'autocast_cpu' if has_bf16() else 'fp32'}"


def _is_default() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by torch.backends.mkldnn.matmul, which cannot be read this way
        return False


def _mkl_is_slow() -> bool:
    """Return whether this is an AMD processor with AVX-512 and without AMX."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    found = capabilities()
    able = all(found.get(name) for name in _NEEDED) and not found.get(_HARMFUL)
    return able and str(found.get("cpu_name")).startswith("AMD")


def _computes_in_fp32() -> bool:
    """Return whether products keep all 24 bits of their factors, in shapes of every kind."""
    generator = torch.Generator().manual_seed(0)
    for batch, rows, inner, columns in _TRIED:
        left = torch.randn(batch, rows, inner, generator=generator)
        right = torch.randn(batch, inner, columns, generator=generator)
        for product in (torch.bmm, lambda left, right: left[0] @ right[0], _of_transposed):
            exact = product(left.double(), right.double())
            error = (product(left, right) - exact).norm() / exact.norm()
            if error > 1e-6:  # fp32 has up to 4e-7; tf32 has 3e-4 and bf16 2e-3
                return False
    return True


def _of_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of the same numbers, both factors stored transposed."""
    stored = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (left, right))
    return torch.bmm(*stored)
