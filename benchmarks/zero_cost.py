"""What ZeRO costs on a CPU: a step under torch's DDP and under DeepSpeed's stages, in turns.

    torchrun --nproc_per_node=2 -m benchmarks.zero_cost --shape demo
    torchrun --nproc_per_node=2 -m benchmarks.zero_cost --shape xsmall --rows 4 --stages 3

All ways compute the same model on the same rows, with the same clipping and the same AdamW. Wall
time of the slowest rank, the least of several rounds; forward, backward and update of that round.
Writes benchmarks/results/zero_cost-<shape>-<precision>[-<stages>]-cpu.json (amx-cpu: with AMX).
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import environment, named_by_cpu, save
from benchmarks.train_step import make_batch, normalizers_of
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.data.rows import Batch
from deberta_ds.engine import ds_config, engine
from deberta_ds.engine.clipping import clip_gradients
from deberta_ds.engine.optim import build_optimizer
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives.build import build_model, objective_of

RUNS = {"demo": "launch/runs/demo.toml", "xsmall": "launch/runs/v3_xsmall.toml"}
LENGTH = 128
DDP = "DDP"
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
Step = Callable[[], tuple[float, float, float]]  # returns when forward, backward, update ended


def ddp_step(run, batch: Batch, half: bool) -> Step:
    model = build_model(run, None)
    init_parameters(model, run.model.init_std, 0)
    # One gradient of a table that is looked up and predicts arrives late: so no static graph.
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, run.optim, apart=objective_of(run).clip_groups(run),
                                matmuls=torch.bfloat16 if half else None)
    normalizers = normalizers_of(batch)

    def step() -> tuple[float, float, float]:
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = parallel(batch, normalizers)[0]
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        clip_gradients(optimizer, run.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return forward, backward, time.perf_counter()

    return step


def deepspeed_step(run, batch: Batch, half: bool, stage: int) -> Step:
    values = json.loads(Path(f"ds_configs/zero{stage}_fp32.json").read_text())
    values |= AUTOCAST if half else {}
    resolved = ds_config.resolve(run, ds_config.check(values, "ds.json"), dist.world_size())
    model_engine = engine.build_pretraining_engine(run, resolved, None)
    normalizers = normalizers_of(batch)

    def step() -> tuple[float, float, float]:
        loss = model_engine(batch, normalizers)[0]
        forward = time.perf_counter()
        model_engine.backward(loss)
        backward = time.perf_counter()
        model_engine.step()
        return forward, backward, time.perf_counter()

    return step


def slowest(seconds: list[float]) -> list[float]:
    """Return the largest of each over the ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def measure(run, stages: list[int], rows: int, half: bool,
            rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds of a step, and of its parts, for each way."""
    batch = make_batch(run.model, rows, LENGTH)
    steps = {DDP: ddp_step(run, batch, half)}
    steps |= {f"ZeRO-{stage}": deepspeed_step(run, batch, half, stage) for stage in stages}
    best: dict[str, dict[str, float]] = {name: {} for name in steps}
    for number in range(rounds + 2):
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            dist.barrier()
            started = time.perf_counter()
            forward, backward, update = steps[name]()
            parts = slowest([update - started, forward - started, backward - forward,
                             update - backward])
            if number > 1 and parts[0] < best[name].get("step", math.inf):
                best[name] = dict(zip(("step", "forward", "backward", "update"), parts,
                                      strict=True))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=RUNS, default="demo")
    parser.add_argument("--rows", type=int, default=8, help="of 128 tokens, per rank")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[*range(4)],
                        help="of ZeRO; all of them hold a model each at once")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--bf16", action="store_true", help="bf16 matmuls, fp32 weights")
    options = parser.parse_args()
    ranks = int(engine.init_distributed() and dist.world_size())
    run, _ = run_config.load(RUNS[options.shape], [f"--train.micro_batch_size={options.rows}",
                                               f"--train.global_batch_size={options.rows * ranks}"])
    seconds = measure(run, options.stages, options.rows, options.bf16, options.rounds)
    if dist.is_main():
        kind = "bf16" if options.bf16 else "fp32"
        print(f"{options.shape}, RTD, {ranks} ranks x {options.rows} x {LENGTH} tokens, {kind}, "
              f"{environment()['processor']}")
        print(f"{'':8}{'step':>9}{'/ DDP':>8}{'forward':>10}{'backward':>10}{'update':>10}")
        for name, parts in seconds.items():
            print(f"{name:8}{parts['step'] * 1e3:6.0f} ms"
                  f"{parts['step'] / seconds[DDP]['step']:8.2f}"
                  f"{parts['forward'] * 1e3:7.0f} ms{parts['backward'] * 1e3:7.0f} ms"
                  f"{parts['update'] * 1e3:7.0f} ms")
        result = {"shape": options.shape, "rows": options.rows, "length": LENGTH, "ranks": ranks,
                  "precision": kind, "seconds": seconds}
        only = "" if len(options.stages) == 4 else "-" + "-".join(map(str, options.stages))
        save(named_by_cpu(f"zero_cost-{options.shape}-{kind}{only}", "cpu"), "cpu", result)
    dist.destroy()


if __name__ == "__main__":
    exit_cleanly(main)
