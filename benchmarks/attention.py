"""Attention forward + backward: ours beside every peer, same inputs, one interleaved run.

Prints milliseconds, the ratio to Hugging Face eager and the relative error against float64, and
writes benchmarks/results/attention-<device>.json.

  python -m benchmarks.attention                     # CPU: one thread, process time
  python -m benchmarks.attention --device cuda       # GPU: 16k tokens, bf16, dropout 0.1
"""

import argparse

import torch

from benchmarks import peers
from benchmarks.measure import interleaved_minimum, save
from deberta_ds.errors import exit_cleanly

# (batch, length) at 12 heads of 64
CPU_SHAPES = ((8, 128), (2, 512))
GPU_SHAPES = ((32, 512), (8, 2048), (2, 8192))
HEADS, SIZE = 12, 64
_ERROR_SCORES = 1 << 25  # the float64 oracle is a reference run: only as large as this


def measure(shape, dtype: torch.dtype, device: str, dropout: float, rounds: int) -> dict:
    """Return seconds, error and reason of absence of each implementation."""
    batch, length = shape
    problem = peers.make_problem(batch, length, HEADS, SIZE, dtype, device, dropout)
    calls, rows = {}, {}
    truth = _truth(problem) if dropout == 0 and _fits(problem) else None
    for name, build in peers.BUILDERS.items():
        rows[name] = {}
        try:
            run = _with_backward(build(problem), problem)
            results = run()
        except peers.UnavailableError as reason:
            rows[name]["absent"] = str(reason)
            continue
        except Exception as reason:  # a peer that fails must not end the comparison
            rows[name]["absent"] = f"failed: {type(reason).__name__}: {str(reason)[:120]}"
            continue
        calls[name] = run
        if truth is not None:
            rows[name]["error"] = max(
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(results, truth, strict=True)
            )
        del results
    for name, seconds in interleaved_minimum(calls, rounds, device).items():
        rows[name]["seconds"] = seconds
        rows[name]["peak_bytes"] = _peak_bytes(calls[name]) if device == "cuda" else None
    result = {"batch": batch, "length": length, "dtype": str(dtype)[6:], "dropout": dropout}
    return result | {"rows": rows}


def _with_backward(forward, problem):
    def run():
        context = forward()
        return [context, *torch.autograd.grad(context, problem.leaves, problem.grad_BLHD)]

    return run


def _fits(problem: peers.Problem) -> bool:
    batch, heads, length, _ = problem.q_BHLD.shape
    return batch * heads * length * length <= _ERROR_SCORES


def _truth(problem: peers.Problem) -> list[torch.Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in problem.leaves]
    wide = peers.Problem(*leaves, problem.grad_BLHD.double(), 0.0)
    return _with_backward(peers.ours("reference")(wide), wide)()


def _peak_bytes(call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show(result: dict) -> None:
    """Print one table."""
    rows = result["rows"]
    base = rows["Hugging Face eager"].get("seconds")
    print(
        f"\n{result['batch']} x {result['length']} tokens, {HEADS} heads x {SIZE}, "
        f"{result['dtype']}, dropout {result['dropout']}: forward + backward"
    )
    print(f"  {'':26}{'ms':>9}{'x HF':>7}{'error':>9}{'peak MB':>9}")
    for name, row in rows.items():
        if "absent" in row:
            print(f"  {name:26}{row['absent']}")
            continue
        ratio = f"{base / row['seconds']:.2f}" if base else "-"
        error = f"{row['error']:.0e}" if "error" in row else "-"
        peak = f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else "-"
        print(f"  {name:26}{row['seconds'] * 1e3:9.2f}{ratio:>7}{error:>9}{peak:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        shapes, dtypes = CPU_SHAPES, (torch.float32, torch.bfloat16)
    else:
        shapes, dtypes = GPU_SHAPES, (torch.bfloat16,)
    results = []
    for shape in shapes:
        for dtype in dtypes:
            for dropout in options.dropout:
                results.append(measure(shape, dtype, options.device, dropout, options.rounds))
                show(results[-1])
    print(f"\nwrote {save('attention', options.device, results)}")


if __name__ == "__main__":
    exit_cleanly(main)
