"""Count the bytes that a rank hands to collectives in one real step, by a backend around gloo.

    traffic.py RUN.toml OUT.json CASE ...

A case is a JSON: {"stage", "micro_batches", "overrides" of the run file, "zero" (more of
zero_optimization), "ds" (more of the DeepSpeed JSON)}.

Bytes sent are those of rings: 2 (N - 1) / N of an all-reduced buffer, (N - 1) / N of what a gather
yields or a scatter takes, all of a broadcast.
"""

import json
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist
from started import build

from deberta_ds.config import run_config
from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import CompleteConfig
from deberta_ds.model.backbone import count_parameters
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.step import train_step

SENT: Counter = Counter()


def size(tensors) -> int:
    return sum(size(part) if isinstance(part, list) else part.nbytes for part in tensors)


class CountingGroup(torch_dist.ProcessGroup):
    """gloo, with every buffer counted."""

    def __init__(self, rank: int, ranks: int, inner):
        super().__init__(rank, ranks)
        self._inner, self._ranks = inner, ranks

    def getBackendName(self):  # noqa: N802  torch's names
        return "counting"

    def _count(self, name: str, data: int, share: float) -> None:
        SENT[name] += data * share

    def allreduce(self, tensors, opts=None):
        self._count("all-reduce", size(tensors), 2 * (self._ranks - 1) / self._ranks)
        return self._inner.allreduce(tensors, opts)

    def broadcast(self, tensors, opts=None):
        self._count("broadcast", size(tensors), 1.0)
        return self._inner.broadcast(tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        self._count("gather", size(outputs), (self._ranks - 1) / self._ranks)
        return self._inner.allgather(outputs, inputs, opts)

    def all_gather_single(self, output, given, opts=None):
        self._count("gather", output.nbytes, (self._ranks - 1) / self._ranks)
        return self._inner._allgather_base(output, given, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        self._count("gather", size(outputs), (self._ranks - 1) / self._ranks)
        return self._inner.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def reduce_scatter_single(self, output, given, opts=None):
        self._count("reduce-scatter", given.nbytes, (self._ranks - 1) / self._ranks)
        return self._inner._reduce_scatter_base(output, given, opts)

    def reduce_scatter(self, outputs, inputs, opts=None):
        self._count("reduce-scatter", size(inputs), (self._ranks - 1) / self._ranks)
        return self._inner.reduce_scatter(outputs, inputs, opts)

    def reduce(self, tensors, opts=None):
        self._count("reduce", size(tensors), 1.0)
        return self._inner.reduce(tensors, opts)

    def gather(self, outputs, inputs, opts=None):
        return self._inner.gather(outputs, inputs, opts)

    def barrier(self, opts=None):
        return self._inner.barrier(opts)


def make_group(store, rank: int, ranks: int, timeout: timedelta):
    return CountingGroup(rank, ranks, torch_dist.ProcessGroupGloo(store, rank, ranks, timeout))


def measure(run, case: dict) -> dict:
    stage = case["stage"]
    zero = {"stage": stage, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    values = {"zero_optimization": zero | case.get("zero", {}), "bf16": {"enabled": stage > 0}}
    inputs, model_engine = build(run, values | case.get("ds", {}))
    batches = batches_of(run, inputs, start=0, end=2)
    for number in range(2):  # the first one learns the order of the modules
        SENT.clear()
        train_step(model_engine, next(batches), step=number, seed=0)
    parameters = count_parameters(model_engine.module) if stage < 3 else sum(
        parameter.ds_numel for parameter in model_engine.module.parameters())
    return {"sent": dict(SENT), "ds": inputs.ds.as_dict(), "parameters": parameters}


def main() -> None:
    engine.dict_for_deepspeed = CompleteConfig.as_dict  # as on a GPU, whose plans these are
    torch_dist.Backend.register_backend("counting", make_group, devices=["cpu"])
    torch_dist.init_process_group("counting")
    engine.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # built for a minute
    engine.deepspeed.init_distributed(verbose=False)
    torch.set_num_threads(1)
    results = {}
    for argument in sys.argv[3:]:
        case = json.loads(argument)
        rows = 2 * case["micro_batches"] * torch_dist.get_world_size()
        run, _ = run_config.load(sys.argv[1], [f"--train.global_batch_size={rows}",
                                           *case.get("overrides", [])])
        results[argument] = measure(run, case)
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
