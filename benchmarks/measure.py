"""Fair timing: variants interleaved in one run, so that load on the machine hits all alike."""

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from deberta_ds.base.files import write_atomic
from deberta_ds.model import cpu

RESULTS = Path(__file__).parent / "results"
_EVENT_SECONDS = 0.01
_PACKAGES = ("torch", "transformers", "deepspeed", "triton", "flashdeberta", "disentangled-flash",
             "onnxruntime")


def interleaved_minimum(variants: dict[str, Callable[[], object]], rounds: int, device: str = "cpu"
                       ) -> dict[str, float]:
    """Return the least seconds of each variant over `rounds` rounds, after warming up.

    CPU: process time, which other processes on the machine do not add to. CUDA: event time of as
    many calls as take some milliseconds, so that the GPU is timed and not the launches.
    """
    if device != "cuda":
        return _least(variants, rounds, cpu_seconds)
    _least(variants, 1, _cuda_seconds)
    calls = {name: max(1, int(_EVENT_SECONDS / seconds))
             for name, seconds in _least(variants, 1, _cuda_seconds).items()}
    repeated = {name: _repeated(call, calls[name]) for name, call in variants.items()}
    return {name: seconds / calls[name]
            for name, seconds in _least(repeated, rounds, _cuda_seconds).items()}


def _least(variants, rounds: int, seconds_of) -> dict[str, float]:
    best = dict.fromkeys(variants, float("inf"))
    for number in range(rounds + 1):
        for name, call in variants.items():
            seconds = seconds_of(call)
            if number:
                best[name] = min(best[name], seconds)
    return best


def _repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    def run():
        for _ in range(times):
            call()

    return run


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the process time of a call, or what it says if it ran in another process: a float."""
    start = time.process_time()
    said = call()
    return said if isinstance(said, float) else time.process_time() - start


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000


def as_torch_comes(call: Callable[[], object]) -> Callable[[], object]:
    """Return `call` with fp32 products by MKL, also after `deberta_ds.model.cpu.use_onednn`."""

    def run():
        with cpu.mkl_matmuls():
            return call()

    return run


def as_it_is(call: Callable[[], object]) -> Callable[[], object]:
    """Return `call`: fp32 products by whom the process has chosen."""
    return call


def environment(device: str = "cpu") -> dict[str, object]:
    """Return what a reader needs to place a number: processor, threads, versions."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    processor = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return {"device": device, "processor": processor, "threads": torch.get_num_threads(),
            "python": platform.python_version(), "packages": versions}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = "".join(line for line in lines[:40] if line.startswith("flags"))
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{names[0] if names else platform.processor()} ({' '.join(features)})"


def named_by_cpu(name: str, device: str) -> str:
    """Return a result's name with "-amx" on a CPU with AMX: both kinds' figures stay."""
    return f"{name}-amx" if device == "cpu" and "amx" in _cpu_name() else name


def save(name: str, device: str, results: object) -> Path:
    """Write `results` with the environment to benchmarks/results/<name>-<device>.json."""
    path = RESULTS / f"{name}-{device}.json"
    document = {"benchmark": name, "environment": environment(device), "results": results}
    write_atomic(path, json.dumps(document, indent=1) + "\n")
    return path
