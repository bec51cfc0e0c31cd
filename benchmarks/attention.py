"""Attention forward + backward: ours and every peer, same inputs, one interleaved run.

Prints milliseconds, the ratio to Hugging Face eager and the largest relative error of the context
and all gradients against float64, the forward alone, and the useful TF/s: products of queries and
keys, of probabilities and values, and of rows and min(length, 512) table slots; forward + backward
counts 3.5 x forward, as disentangled-flash does. On a CPU where our runs let oneDNN compute fp32
products (`deberta_ds.model.cpu`), all are timed both ways: ratios are to Hugging Face as it
comes, and "x equal" to Hugging Face with the same products. Writes
benchmarks/results/attention-<device>.json.

  python -m benchmarks.attention                     # CPU: one thread, process time
  python -m benchmarks.attention --device cuda       # GPU: 16k tokens, bf16, dropout 0.1
"""

import argparse
import itertools
from collections.abc import Callable

import torch

from benchmarks import peers
from benchmarks.measure import as_it_is, as_torch_comes, interleaved_minimum, save
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.model import cpu

# (batch, length) at 12 heads of 64
CPU_SHAPES = ((8, 128), (2, 512))
GPU_SHAPES = ((32, 512), (8, 2048), (2, 8192))
HEADS, SIZE = 12, 64
# The float64 oracle is a reference run: only as many scores as this.
_ERROR_SCORES = {"cpu": 1 << 25, "cuda": 1 << 28}
_BASE, ONEDNN = "Hugging Face eager", ", oneDNN"
_ORACLE = "ours, reference"  # not timed on a GPU: it needs tens of GiB there
# One compiles again for half a minute a shape, the other holds the scores of all pairs.
_ONLY_SHORT_ON_GPU = ("FlexAttention", "ours, dense")


def measure(shape, dtype: torch.dtype, device: str, dropout: float, rounds: int,
            ways: dict[str, Callable]) -> dict:
    """Return seconds, error and reason of absence of each implementation.

    ways: what to add to an implementation's name, and what decides who computes its products.
    """
    batch, length = shape
    problem = peers.make_problem(batch, length, HEADS, SIZE, dtype, device, dropout)
    calls, forwards, results, rows = {}, {}, None, {}
    truth = _truth(problem) if dropout == 0 else None
    for peer, (suffix, way) in itertools.product(peers.BUILDERS, ways.items()):
        if device == "cuda" and peer == _ORACLE or "absent" in rows.get(peer, ()):
            continue
        name = peer + suffix
        row = rows[name] = {}
        if device == "cuda" and length > 512 and peer in _ONLY_SHORT_ON_GPU:
            row["absent"] = "timed at 512 tokens only"
            continue
        try:
            forward = peers.BUILDERS[peer](problem)
            call = way(_with_backward(forward, problem))
            results = call()
        except peers.NoBackwardError as reason:
            row["absent"] = str(reason)
            forwards[name] = way(_without_graph(reason.forward))
            continue
        except peers.UnavailableError as reason:
            row["absent"] = str(reason)
            continue
        except Exception as reason:  # a peer that fails must not end the comparison
            row["absent"] = f"failed: {type(reason).__name__}: {str(reason)[:120]}"
            continue
        calls[name] = call
        forwards[name] = way(_without_graph(forward))
        if truth is not None:
            row["error"] = _error(results, truth)
    del results, truth
    for name, seconds in interleaved_minimum(calls, rounds, device).items():
        rows[name]["seconds"] = seconds
    for name, seconds in interleaved_minimum(forwards, rounds, device).items():
        rows[name]["forward_seconds"] = seconds
        if device == "cuda":
            rows[name]["peak_bytes"] = _peak_bytes(calls[name])
    result = {"batch": batch, "length": length, "dtype": str(dtype)[6:], "dropout": dropout}
    result["forward_flops"] = forward_flops(batch, length)
    return result | {"rows": rows}


def forward_flops(batch: int, length: int) -> float:
    """Return the FLOPs that the method needs; a multiply-add is 2."""
    slots = min(length, peers.GEOMETRY.num_slots)
    return batch * HEADS * length * 2 * SIZE * (2 * length + 2 * slots)


def _with_backward(forward, problem):
    def run():
        context = forward()
        return [context, *torch.autograd.grad(context, problem.leaves, problem.grad_BLHD)]

    return run


def _without_graph(forward):
    def run():
        with torch.no_grad():
            return forward()

    return run


def _truth(problem: peers.Problem) -> list[torch.Tensor]:
    """Return context and gradients in float64 of the first heads: as many as fit, all rows."""
    batch, heads, length, _ = problem.q_BHLD.shape
    heads = min(heads, max(1, _ERROR_SCORES[problem.device.type] // (batch * length**2)))
    planes = [x[:, :heads].detach().double().requires_grad_() for x in problem.leaves[:3]]
    tables = [x[:heads].detach().double().requires_grad_() for x in problem.leaves[3:]]
    wide = peers.Problem(*planes, *tables, problem.grad_BLHD[:, :, :heads].double(), 0.0)
    return _with_backward(peers.ours("reference")(wide), wide)()


def _error(results: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Return the largest relative error of any tensor."""
    worst = 0.0
    for place, (result, right) in enumerate(zip(results, truth, strict=True)):
        heads_dim = 2 if place == 0 else 1 if place < 4 else 0
        part = result.narrow(heads_dim, 0, right.shape[heads_dim]).double()
        worst = max(worst, ((part - right).norm() / right.norm()).item())
    return worst


def _peak_bytes(call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show(result: dict) -> None:
    """Print one table."""
    rows, flops = result["rows"], result["forward_flops"]
    base = rows[_BASE].get("seconds")
    print(
        f"\n{result['batch']} x {result['length']} tokens, {HEADS} heads x {SIZE}, "
        f"{result['dtype']}, dropout {result['dropout']}: forward + backward")
    titles = ("ms", "x HF", "x equal", "error", "peak MB", "fwd ms", "fwd TF/s", "TF/s")
    print(f"  {'':32}" + "".join(f"{title:>9}" for title in titles))
    for name, row in rows.items():
        if "absent" in row:
            forward = row.get("forward_seconds")
            note = f"; forward alone {forward * 1e3:.2f} ms" if forward else ""
            print(f"  {name:32}{row['absent']}{note}")
            continue
        cells = [f"{row['seconds'] * 1e3:.2f}", f"{base / row['seconds']:.2f}" if base else "-"]
        equal = rows[_BASE + ONEDNN if name.endswith(ONEDNN) else _BASE].get("seconds")
        cells.append(f"{equal / row['seconds']:.2f}" if equal else "-")
        cells.append(f"{row['error']:.0e}" if "error" in row else "-")
        cells.append(f"{row['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in row else "-")
        cells.append(f"{row['forward_seconds'] * 1e3:.2f}")
        cells.append(f"{flops / row['forward_seconds'] / 1e12:.3g}")
        cells.append(f"{3.5 * flops / row['seconds'] / 1e12:.3g}")
        print(f"  {name:32}" + "".join(f"{cell:>9}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    options = parser.parse_args()
    ways = plain = {"": as_torch_comes}
    if options.device == "cpu":
        torch.set_num_threads(1)
        if cpu.use_onednn():
            ways = plain | {ONEDNN: as_it_is}
        shapes, dtypes = CPU_SHAPES, (torch.float32, torch.bfloat16)
    else:
        shapes, dtypes = GPU_SHAPES, (torch.bfloat16,)
    results = []
    for shape in shapes:
        for dtype in dtypes:
            for dropout in options.dropout:
                chosen = ways if dtype == torch.float32 else plain  # bf16 is oneDNN's anyway
                results.append(
                    measure(shape, dtype, options.device, dropout, options.rounds, chosen))
                show(results[-1])
                path = save("attention", options.device, results)  # a time limit may come
    print(f"\nwrote {path}")


if __name__ == "__main__":
    exit_cleanly(main)
