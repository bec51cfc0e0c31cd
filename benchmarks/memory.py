"""Peak memory: attention forward + backward at long rows, and the masked LM head.

On the CPU each case runs in a process of its own and the growth of its peak resident set is read;
on a GPU all run in one process and the allocator's peak is. Writes
benchmarks/results/memory-<device>.json.

  python -m benchmarks.memory [--device cuda]
"""

import argparse
import resource
import subprocess
import sys

import torch
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.measure import save
from deberta_ds.base.errors import exit_cleanly, first_line
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

LENGTHS = (2048, 4096, 8192)
ATTENTION = ("Hugging Face eager", "ours, tiled", "ours, fused")
HEADS, SIZE = 12, 64
HEAD_ROWS, HEAD_VOCAB, HEAD_HIDDEN = 1229, 128_100, 384  # 8192 tokens at 15 percent
HF_LIMIT = 4096  # eager attention at 8192 would need about 40 GB
LINE = "bytes:"


def attention(name: str, length: int, device: str) -> None:
    """Run one forward + backward of one row."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problem = peers.make_problem(1, length, HEADS, SIZE, dtype, device, 0.1)
    context = peers.BUILDERS[name](problem)()
    torch.autograd.grad(context, problem.leaves, problem.grad_BLHD)


def head(name: str, device: str) -> None:
    """Run one forward + backward of the masked LM head."""
    hidden = torch.randn(HEAD_ROWS, HEAD_HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(HEAD_VOCAB, HEAD_HIDDEN, device=device, requires_grad=True)
    bias = torch.zeros(HEAD_VOCAB, device=device, requires_grad=True)
    labels = torch.arange(HEAD_ROWS, device=device)
    if name == "full logits":
        loss = F.cross_entropy(hidden @ weight.t() + bias, labels, reduction="sum")
    else:
        loss = linear_cross_entropy(hidden, weight, bias, labels)[0]
    torch.autograd.grad(loss, [hidden, weight, bias])


def cases() -> list[list[str]]:
    found = [["attention", name, str(length)] for length in LENGTHS for name in ATTENTION
             if not (name == "Hugging Face eager" and length > HF_LIMIT)]
    return found + [["head", "full logits", "0"], ["head", "chunked", "0"]]


def run_case(kind: str, name: str, length: int, device: str) -> int:
    """Return the bytes that the case adds to the peak."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        torch.set_num_threads(1)
        attention("ours, tiled", 64, device)  # load libraries first
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    attention(name, length, device) if kind == "attention" else head(name, device)
    if device == "cuda":
        return torch.cuda.max_memory_allocated() - before
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def on_gpu(kind: str, name: str, length: str) -> dict:
    """Return the case's peak, or why there is none."""
    try:
        return {"peak_bytes": run_case(kind, name, int(length), "cuda")}
    except Exception as reason:  # no memory, or a kernel that finds no room
        return {"absent": f"{type(reason).__name__}: {first_line(reason)}"[:160]}


def in_own_process(case: list[str]) -> dict:
    """Return the case's peak, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.memory", "--case", *case]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((x for x in process.stdout.splitlines() if x.startswith(LINE)), None)
    if line is None:
        return {"absent": process.stderr.strip().splitlines()[-1][:160]}
    return {"peak_bytes": int(line.split()[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, name, length = options.case
        print(LINE, run_case(kind, name, int(length), options.device))
        return
    results = []
    for case in cases():
        row = dict(zip(("kind", "name", "length"), case, strict=True))
        row |= on_gpu(*case) if options.device == "cuda" else in_own_process(case)
        results.append(row)
        peak = f"{row['peak_bytes'] / 2**20:9.0f} MiB" if "peak_bytes" in row else row["absent"]
        print(f"{row['kind']:10} {row['name']:20} {row['length']:>6} {peak}", flush=True)
        path = save("memory", options.device, results)
    print(f"wrote {path}")


if __name__ == "__main__":
    exit_cleanly(main)
