"""Passes over tensors that torch makes one by one on a CPU, fused in C.

The sources need nothing but a C compiler and take five seconds; the library lies in the user's
cache under a name made of the source, the compiler's flags and the processor. Where it cannot be
built, `library()` is None, the log says why once, and callers compute the same with torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from deberta_ds.errors import UserError, first_line

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
# NaN and infinity must stay what they are, so -ffast-math is only taken in part.
_FLAGS = ("-std=c11", "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno",
          "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast",
          "-shared", "-fPIC")
_OFF = "DEBERTA_DS_NATIVE"  # "0": do without
_LOG = logging.getLogger("deberta_ds")
STRIP = 32  # of products.h: rows, columns and inner sizes of products are multiples of it
# Of a CPU's step; 1: torch's operators, as in version 0.1.0; 2: no attention in fp32; 3: attention
# in bf16 by AMX alone; 4: in fp32 by AVX-512 alone, with a row of a table for every distance.
RULES = 5
_followed = RULES
_pool: ThreadPoolExecutor | None = None


@lru_cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where there is no compiler or it fails."""
    if not wanted():
        _LOG.info("CPU kernels: torch's, because %s=0", _OFF)
        return None
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.info("CPU kernels: torch's, because the fused ones could not be built (%s)",
                  first_line(error))
        return None


def wanted() -> bool:
    """Return whether kernels of the project may take the place of torch's operators."""
    return os.environ.get(_OFF) != "0"


def _build() -> Path:
    """Return the library's path; several processes may build it at once."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("no C compiler: install gcc, or set CC")
    made_of = "\0".join([*(path.read_text() for path in _SOURCES), *_FLAGS, compiler, _processor()])
    name = hashlib.sha256(made_of.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deberta_ds"
    built = cache / f"kernels-{name.hexdigest()[:16]}.so"
    if built.exists():
        return built
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "kernels.so"
        sources = [str(path) for path in _SOURCES if path.suffix == ".c"]
        done = subprocess.run([compiler, *_FLAGS, *sources, "-o", str(made), "-lm"],
                              capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise OSError(f"{compiler}: {done.stderr.strip() or done.returncode}")
        made.replace(built)
    return built


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def follow(rules: int) -> None:
    """Compute as these rules say from now on, in this process: a run keeps those it began with."""
    global _followed
    if rules not in range(1, RULES + 1):
        raise UserError(f"CPU rules {rules}: this program knows 1 to {RULES}; go on with the "
                        "version that began the run")
    _followed = rules


def followed() -> int:
    """Return the rules in use."""
    return _followed


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is this processor's to work on: fake ones stand for a GPU's."""
    return (_followed > 1 and tensor.is_cpu
            and type(tensor) in (torch.Tensor, torch.nn.Parameter))


def takes(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels can work on these tensors."""
    return (all(is_here(t) and t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
            and not torch.jit.is_tracing() and not torch.compiler.is_compiling()
            and library() is not None)


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether the kernels may multiply numbers of this type: fp32 by AVX-512 or AVX2, bf16
    by AMX or AVX-512-BF16. Ask only where `takes` is true.
    """
    if dtype == torch.bfloat16:
        return has("amx") or _followed > 3 and has("avx512_bf16")
    return _followed > 2 and has("avx512") or _followed > 4 and has("avx2")


@lru_cache
def has(feature: str) -> bool:
    """Return whether the kernels may use "amx", "avx512", "avx512_bf16" or "avx2".

    Ask where `takes` is true.
    """
    return bool(getattr(library(), f"has_{feature}")())


def over_rows(rows: int, work, least: int = 64) -> None:
    """Call work(first, last, number of the part) for all rows, in as many threads as torch has.

    least: rows that are worth a thread.
    """
    global _pool
    parts = parts_of(rows, least)
    if parts == 1:
        work(0, rows, 0)
        return
    if _pool is None or _pool._max_workers < parts:
        _pool = ThreadPoolExecutor(parts, "kernels")
    edges = [rows * number // parts for number in range(parts + 1)]
    list(_pool.map(work, edges[:-1], edges[1:], range(parts)))


def _without_threads() -> None:
    """A forked process has none of the pool's."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_without_threads)


def run_units(name: str, units: int, *arguments) -> None:
    """Call a kernel (first unit, last, *arguments) for all units, in torch's number of threads.

    It returns 0, or 1 where a thread had no memory: MemoryError.
    """
    kernel, failed = getattr(library(), name), []

    def work(first: int, last: int, _part: int) -> None:
        failed.append(kernel(ctypes.c_long(first), ctypes.c_long(last), *arguments))

    over_rows(units, work, least=1)
    if any(failed):
        raise MemoryError(f"no memory for a thread of {name}")


def padded(count: int) -> int:
    """Return a size of products rounded up to whole strips."""
    return -(-count // STRIP) * STRIP


def parts_of(rows: int, least: int = 64) -> int:
    """Return how many parts `over_rows` makes of so many rows."""
    return min(torch.get_num_threads(), max(1, rows // least))


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return where a contiguous tensor's elements lie."""
    return ctypes.c_void_p(tensor.data_ptr())
