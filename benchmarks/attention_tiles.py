"""Time candidates for `kernels/attention/tiles.json` on this GPU, for heads of 64.

One layer forward and backward in bf16 with dropout, position terms kept. Each candidate replaces
one kernel's tile: compiled by several processes at once, then timed alone by its kernel's own time.
Prints the fastest, the table's own marked by a star; a candidate that does not compile, or whose
results differ from those of the table's tiles, is named at the end.

  python -m benchmarks.attention_tiles
  python -m benchmarks.attention_tiles --kernels key forward --shapes 32x1024
"""

import argparse
import multiprocessing
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention_kernels import ATTENTION_DROPOUT, CALLS, HEADS, SHAPES, SIZE
from benchmarks.measure import save
from benchmarks.peers import GEOMETRY, Problem, make_problem
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.cluster.driver import count_gpus
from deberta_ds.model.attention.geometry import make_band
from deberta_ds.model.kernels.attention import fused_path, ops

WORKERS = 14
KERNELS = {"forward": "forward_kernel", "key": "key_kernel", "query": "query_kernel",
           "bias": "bias_kernel", "rows": "row_gradient_kernel", "table": "table_gradient_kernel"}
FLASH = ("forward", "key", "query")
# rows (of queries for flash kernels), columns, warps, stages
CANDIDATES = {
    "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3),
                (128, 32, 4, 3), (128, 32, 8, 3), (64, 32, 4, 3), (64, 128, 4, 2),
                (128, 128, 8, 2)],
    "key": [(32, 128, 8, 3), (32, 128, 8, 2), (32, 128, 4, 2), (16, 128, 8, 2), (16, 128, 4, 2),
            (64, 128, 8, 2), (64, 128, 8, 1), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2),
            (64, 64, 4, 1), (64, 64, 8, 2), (128, 64, 8, 1), (32, 64, 8, 2), (64, 32, 4, 2),
            (32, 32, 4, 2)],
    "query": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3),
              (128, 32, 8, 2), (128, 32, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2)],
    "bias": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (64, 128, 4, 2), (128, 64, 4, 2),
             (128, 64, 8, 2), (128, 128, 8, 2), (64, 32, 4, 3), (32, 64, 4, 2), (128, 32, 4, 3)],
    "rows": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3), (128, 64, 4, 3),
             (128, 64, 8, 3), (64, 128, 4, 3), (128, 128, 8, 2), (64, 32, 4, 4), (128, 32, 4, 4)],
    "table": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 3), (128, 64, 4, 3),
              (128, 64, 8, 3), (32, 128, 4, 3), (64, 128, 4, 3), (128, 128, 8, 2), (32, 64, 4, 4)]}


def use(kernel: str, tile: tuple[int, ...] | None) -> None:
    """Give one kernel a tile; None: the table's own, of all."""
    ops.choose_tile.cache_clear()
    ops.choose_product_tile.cache_clear()
    ops.tile_table.cache_clear()
    if tile is None:
        return
    table = ops.tile_table()  # kept until the next call
    sizes = table[ops._architecture(torch.cuda.get_device_capability())][str(SIZE)]
    for place in (sizes["short"], sizes["long"]) if kernel in FLASH else (sizes,):
        place[kernel] = list(tile)


def layer(problem: Problem) -> list[Tensor]:
    """Run attention forward and backward; return all results."""
    batch, _, length, _ = problem.q_BHLD.shape
    segments = torch.ones(batch, length, dtype=torch.int32, device=problem.device)
    context = fused_path(*problem.leaves, geometry=GEOMETRY, segments_BL=segments,
                         query_positions_BQ=None, dropout=problem.dropout, seed=1, keep_terms=True)
    return [context, *torch.autograd.grad(context, problem.leaves, problem.grad_BLHD)]


def compile_one(job: tuple[str, tuple[int, ...]], shapes: list[tuple[int, int]]) -> str:
    """Compile a candidate into Triton's cache on disk; return why it cannot run."""
    try:
        use(*job)
        for _, length in shapes:
            layer(make_problem(1, length, HEADS, SIZE, torch.bfloat16, "cuda", ATTENTION_DROPOUT))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, a fault: another tile may still run
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def timed(problem: Problem, kernel: str, truth: list[Tensor]) -> tuple[float, float]:
    """Return the seconds of one kernel in a layer, and the largest relative error of results."""
    found = layer(problem)
    error = max(float((a.float() - b.float()).norm() / b.float().norm())
                for a, b in zip(found, truth, strict=True))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            layer(problem)
        torch.cuda.synchronize()
    seconds = sum(event.self_device_time_total for event in profiler.key_averages()
                  if event.key == KERNELS[kernel])
    return seconds / CALLS / 1e6, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--shapes", nargs="+", metavar="ROWSxLENGTH",
                        default=[f"{rows}x{length}" for rows, length in SHAPES])
    options = parser.parse_args()
    if not count_gpus():
        raise UserError("attention_tiles times kernels on a GPU; this machine has none")
    shapes = [(int(rows), int(length)) for rows, length in (x.split("x") for x in options.shapes)]
    jobs = [(kernel, tile) for kernel in options.kernels for tile in CANDIDATES[kernel]]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        problems = pool.map(partial(compile_one, shapes=shapes), jobs, chunksize=1)
    results, odd = [], [f"{kernel} {tile}: {problem}" for (kernel, tile), problem
                        in zip(jobs, problems, strict=True) if problem]
    for shape in shapes:
        use("", None)
        problem = make_problem(*shape, HEADS, SIZE, torch.bfloat16, "cuda", ATTENTION_DROPOUT)
        truth = layer(problem)
        for kernel in options.kernels:
            own, rows = _own(kernel, shape[1]), []
            for (of, tile), fault in zip(jobs, problems, strict=True):
                if of != kernel or fault:
                    continue
                use(kernel, tile)
                seconds, error = timed(problem, kernel, truth)
                if not seconds:  # short rows have no query kernel
                    break
                rows.append((seconds, tile))
                results.append({"kernel": kernel, "shape": shape, "tile": tile, "error": error,
                                "seconds": seconds})
                if error > 1e-2:
                    odd.append(f"{kernel} {tile} at {shape}: results differ by {error:.1e}")
            print(f"{kernel}, {shape[0]} x {shape[1]}, ms: " + ", ".join(
                f"{'*' if tile == own else ''}{tile} {1e3 * seconds:.3f}"
                for seconds, tile in sorted(rows)), flush=True)
    print(*odd, sep="\n")
    print("wrote", save("attention_tiles", "cuda", results))


def _own(kernel: str, length: int) -> tuple[int, ...]:
    """Return the table's tile of a kernel."""
    use("", None)
    capability = torch.cuda.get_device_capability()
    if kernel in FLASH:
        far = make_band(GEOMETRY.reach, length).far
        return tuple(ops.choose_tile(capability, SIZE, length, kernel, False, far))
    return tuple(ops.choose_product_tile(capability, SIZE, kernel))


if __name__ == "__main__":
    exit_cleanly(main)
