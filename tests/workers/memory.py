"""Measure the bytes that training holds and needs, by the allocator's own events; rank 0 writes.

    memory.py RUN.toml OUT.json NAME:STAGE:--override;--override ...
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from deberta_ds import config, dist
from deberta_ds.data.loader import build_loader
from deberta_ds.train import engine
from deberta_ds.train.setup import prepare
from deberta_ds.train.step import train_step


class Allocated:
    """Bytes allocated less bytes freed inside the block: at its end, and at the highest point."""

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        events = [e for e in self._profile.profiler.kineto_results.events()
                  if e.name() == "[memory]"]
        self.end = self.peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            self.end += event.nbytes()
            self.peak = max(self.peak, self.end)


def settle() -> None:
    """Let garbage and the buffers of finished collectives go; when they do is chance."""
    dist.barrier()
    time.sleep(0.5)
    gc.collect()


def measure(run, stage: int) -> dict:
    zero = {"stage": stage, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1_000_000}
    inputs = prepare(run, {"zero_optimization": zero, "bf16": {"enabled": stage > 0}}, "test")
    train = run.train
    batches = build_loader(
        inputs.dataset, start_row=0, global_batch_rows=train.global_batch_rows,
        micro_batch_rows=train.micro_batch_rows, rank=dist.rank(), world_size=dist.world_size(),
        num_workers=0, num_steps=3)
    gc.collect()  # or the engine before this one would be freed inside the block
    with Allocated() as resident:
        model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)
        train_step(model_engine, [next(batches)], step=0, seed=0)
        train_step(model_engine, [next(batches)], step=1, seed=0)
        settle()
    micro = [next(batches)]
    with Allocated() as step:
        train_step(model_engine, micro, step=2, seed=0)
    # gloo's threads hold buffers of finished collectives for a while: only ever too much.
    resident_bytes = min(dist.gather_objects(resident.end))
    peak_bytes = resident_bytes + min(dist.gather_objects(step.peak))
    saved = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = (storage, storage.nbytes())
        return tensor

    parameters = {p.untyped_storage()._cdata for p in model_engine.module.parameters()}
    norm = {"targets": torch.ones(()), "tokens": torch.ones(())}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss, *_ = model_engine(micro[0], norm)
    del loss
    return {"resident": resident_bytes, "peak": peak_bytes,
            "saved": sum(size for _, size in saved.values()),
            "targets": micro[0].num_targets, "world_size": dist.world_size(), "ds": inputs.ds}


def main() -> None:
    results = {}
    for argument in sys.argv[3:]:
        name, stage, overrides = argument.split(":")
        run, _ = config.load(sys.argv[1], overrides.split(";"))
        # What gloo still holds only ever adds, so the least of some readings is the engine's own.
        readings = [measure(run, int(stage)) for _ in range(3 if stage in "12" else 1)]
        least = {key: min(reading[key] for reading in readings) for key in ("resident", "peak")}
        results[f"{name}, ZeRO-{stage}"] = readings[0] | least
        print(name, stage, results[f"{name}, ZeRO-{stage}"], flush=True)
    if dist.is_main():
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy()


if __name__ == "__main__":
    main()
