"""What a run depends on at this machine, as a block of text that a stranger can paste.

Speeds are of one process: a large matmul, a copy, and one layer of DeBERTa-v3-base forward and
backward, whose share of the matmul's speed is what the planner's share of the peak stands for.
"""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from importlib import metadata

import psutil
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.version import __version__
from deberta_ds.cluster import dist
from deberta_ds.config.model import MODELS
from deberta_ds.config.options import validate
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.engine.engine import init_distributed
from deberta_ds.engine.gpus import peak_flops
from deberta_ds.model import choose, cpu, flops
from deberta_ds.model.backbone import init_parameters
from deberta_ds.model.encoder import Trunk
from deberta_ds.model.kernels import checks
from deberta_ds.training.meters import hardware
from deberta_ds.training.rehearsal import fastest, preflight

_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "numpy", "mpi4py")
_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "TORCH_", "TRITON_", "DS_", "PYTORCH_", "FI_")
_GPU_FIELDS = ("name,driver_version,temperature.gpu,clocks_throttle_reasons.active,"
               "ecc.errors.uncorrected.volatile.total,memory.used,memory.total")
_LAYER = {"cuda": (64, 512), "cpu": (4, 128)}  # sequences, tokens
_MATMUL = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def examine() -> list[str]:
    """Print the report on the first rank; return what would stop a run. Call on every rank."""
    problems: list[str] = []
    lines = list(_machine())
    try:
        device = init_distributed()
        lines += _speeds(device, problems)
        lines += preflight(device, socket.gethostname())
    except UserError as error:
        problems.append(str(error))
    if dist.is_main():
        print("\n".join([*lines, *(f"PROBLEM: {text}" for text in problems)] + (
            [] if problems else ["nothing here would stop a run"])), flush=True)
    return problems


def _machine() -> Iterator[str]:
    """Yield lines on software, processor, memory, file systems and environment."""
    yield f"deberta_ds {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "packages: " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    has = [name for name, found in cpu.capabilities().items()
           if found and name in ("avx2", "avx512_bf16", "amx_bf16")]
    memory = psutil.virtual_memory()
    yield (f"processor: {hardware(torch.device('cpu'))}, {len(os.sched_getaffinity(0))} of "
           f"{os.cpu_count()} cores, {', '.join(has) or 'no AVX2'}; memory "
           f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")
    for what, path in (("shared memory", "/dev/shm"), ("here", "."),
                       ("TRITON_CACHE_DIR", checks.keep_on_this_node())):
        while not os.path.exists(path):
            path = os.path.dirname(path) or "."
        yield (f"{what}: {os.path.abspath(path)}, {_file_system(path)}, "
               f"{shutil.disk_usage(path).free / 2**30:.1f} GiB free")
    try:
        yield f"C compiler: {checks.c_compiler()}; Triton has what it needs"
    except UserError as error:
        yield str(error)
    names = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    yield "environment: " + (" ".join(f"{name}={os.environ[name]}" for name in names) or "-")
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "--format=csv", f"--query-gpu={_GPU_FIELDS}"],
                               capture_output=True, text=True, timeout=60)
        yield from (asked.stdout or asked.stderr).strip().splitlines()


def _speeds(device: torch.device, problems: list[str]) -> Iterator[str]:
    """Yield lines on what is fast here; `problems` gets kernels that fail their check."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    if device.type == "cpu":
        cpu.use_onednn()
    size = _MATMUL[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rate = 2 * size**3 / fastest(lambda: left @ right, device)
    peak = peak_flops(device, name) if device.type == "cuda" else None
    share = f", {rate / peak:.0%} of the card's peak" if peak else ""
    yield f"matmul {name}, {size} x {size}: {rate / 1e12:,.2f} TFLOP/s{share}"
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = 2 * len(source) / fastest(lambda: target.copy_(source), device)
    yield f"copy: {moved / 1e9:,.0f} GB/s read and written"
    sequences, length = _LAYER[device.type]
    config = validate(ModelConfig, MODELS["deberta-v3-base"] | {
        "num_layers": 1, "vocab_size": 64}, "layer")
    try:
        chosen = choose.choices(config, device, dtype, dtype, without=("cross-entropy",))
    except UserError as error:
        problems.append(str(error))
        return
    yield f"kernels: {choose.in_a_line(chosen)}"
    layer = Trunk(config).to(device, dtype).train()
    init_parameters(layer, 0.02, 0)
    states = torch.randn(sequences, length, config.hidden_size, device=device, dtype=dtype)
    segments = torch.ones(sequences, length, dtype=torch.int32, device=device)
    seconds = fastest(lambda: layer(states, segments, None).sum().backward(), device)
    reached = 3 * flops.encoder(config, length) * sequences * length / seconds
    yield (f"one layer of base, {sequences} x {length}, forward and backward: "
           f"{1000 * seconds:,.1f} ms, {reached / rate:.0%} of the matmul's speed")


def _version(package: str) -> str:
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
    return f"{found} (CUDA {torch.version.cuda or '-'})" if package == "torch" else found


def _file_system(path: str) -> str:
    """Return the kind of file system that a path lies on, such as ext4 or nfs4."""
    place = os.path.realpath(path)
    mounts = [part for part in psutil.disk_partitions(all=True)
              if os.path.commonpath([place, part.mountpoint]) == part.mountpoint]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "?"
