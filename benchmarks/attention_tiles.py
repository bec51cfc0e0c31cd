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

from benchmarks.attention_kernels import (
    ATTENTION_DROPOUT,
    HEADS,
    SHAPES,
    SIZE,
    VARIANTS,
    kernel_seconds,
    layer,
)
from benchmarks.measure import save
from benchmarks.peers import GEOMETRY, Problem, make_problem
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.cluster.launcher import count_gpus
from deberta_ds.model.attention.geometry import make_band
from deberta_ds.model.kernels.attention import tiles

WORKERS, MOST_ERROR = 14, 1e-2
FUSED = VARIANTS["fused"]
KERNELS = {"forward": "forward_kernel", "key": "key_kernel", "query": "query_kernel",
           "bias": "bias_kernel", "rows": "row_gradient_kernel", "table": "table_gradient_kernel",
           "content": "content_kernel"}
FLASH = ("forward", "key", "query")
# rows (of queries for flash kernels), columns, warps, stages
CANDIDATES = {
    "forward": [(64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 2),
                (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 4, 2), (64, 128, 4, 2)],
    "key": [(64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2), (32, 128, 8, 2),
            (32, 128, 8, 3), (64, 64, 8, 2), (64, 128, 8, 1), (32, 128, 4, 2), (64, 64, 4, 1)],
    "query": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3),
              (128, 32, 8, 2), (128, 32, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2)],
    "bias": [(64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 3), (64, 64, 8, 2), (64, 128, 4, 2),
             (32, 64, 4, 2), (64, 128, 8, 2), (64, 32, 4, 3)],
    "rows": [(64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3),
             (64, 128, 4, 2), (64, 128, 4, 3), (64, 32, 4, 4), (32, 64, 4, 3)],
    "content": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 128, 4, 2), (128, 64, 4, 3),
                (128, 64, 8, 3), (64, 32, 4, 4)],
    "table": [(32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 4, 2),
              (64, 128, 8, 2), (16, 64, 4, 3)]}
# A forward tile has at least the queries of a key tile, and a key tile at most 128 keys: `forward`.


def use_own_tiles() -> None:
    """Give all kernels the tiles of the table."""
    for cached in (tiles.choose_tile, tiles.tile_table):
        cached.cache_clear()


def use(kernel: str, tile: tuple[int, ...]) -> None:
    """Give one kernel a tile, the others those of the table."""
    use_own_tiles()
    table = tiles.tile_table()  # kept until the next call
    sizes = table[tiles.architecture_of(torch.cuda.get_device_capability())][str(SIZE)]
    for place in (sizes["short"], sizes["long"]) if kernel in FLASH else (sizes,):
        place[kernel] = list(tile)


def layer_of(rows: int, length: int) -> Problem:
    return make_problem(rows, length, HEADS, SIZE, torch.bfloat16, "cuda", ATTENTION_DROPOUT)


def compile_one(job: tuple[str, tuple[int, ...]], shapes: list[tuple[int, int]]) -> str:
    """Compile a candidate into Triton's cache on disk; return why it cannot run."""
    try:
        use(*job)
        for _, length in shapes:
            layer(FUSED, layer_of(1, length))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, a fault: another tile may still run
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def own_tile(kernel: str, length: int) -> tuple[int, ...]:
    """Return the table's tile of a kernel."""
    use_own_tiles()
    far = make_band(GEOMETRY.reach, length).far
    return tuple(tiles.choose_tile(
        torch.cuda.get_device_capability(), SIZE, kernel, length, False, far))


def timed(problem: Problem, kernel: str, candidates: list[tuple[int, ...]]) -> list[dict]:
    """Return the candidates for one kernel with its seconds in a layer, the fastest first.

    error: of all results, against those of the table's tiles.
    """
    use_own_tiles()
    truth, found = layer(FUSED, problem), []
    for tile in candidates:
        use(kernel, tile)
        error = max(float((a.float() - b.float()).norm() / b.float().norm())
                    for a, b in zip(layer(FUSED, problem), truth, strict=True))
        seconds = kernel_seconds(FUSED, problem)[KERNELS[kernel]]
        if seconds:  # short rows have no query kernel
            found.append({"kernel": kernel, "tile": tile, "seconds": seconds, "error": error})
    return sorted(found, key=lambda row: row["seconds"])


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
        faults = pool.map(partial(compile_one, shapes=shapes), jobs, chunksize=1)
    compiled = [job for job, fault in zip(jobs, faults, strict=True) if not fault]
    results = []
    for shape in shapes:
        problem = layer_of(*shape)
        for kernel in options.kernels:
            own = own_tile(kernel, shape[1])
            rows = timed(problem, kernel, [tile for of, tile in compiled if of == kernel])
            results += [row | {"shape": shape} for row in rows]
            print(f"{kernel}, {shape[0]} x {shape[1]}, ms: " + ", ".join(
                f"{'*' if row['tile'] == own else ''}{row['tile']} {1e3 * row['seconds']:.3f}"
                for row in rows), flush=True)
    for (kernel, tile), fault in zip(jobs, faults, strict=True):
        if fault:
            print(f"{kernel} {tile}: {fault}")
    for row in results:
        if not row["error"] <= MOST_ERROR:
            print(f"{row['kernel']} {row['tile']} at {row['shape']}: results differ by "
                  f"{row['error']:.1e}")
    print("wrote", save("attention_tiles", "cuda", results))


if __name__ == "__main__":
    exit_cleanly(main)
