"""Measure the bytes that training holds and needs on rank 0, by the allocator's own events.

    memory.py RUN.toml OUT.json RANKS NAME:STAGE:--override;--override ...

The other ranks are imaginary: in torch's "fake" process group every rank sends what this one does,
at once. DeepSpeed allocates the same, and the readings do not hang on when the threads of a real
backend let the buffers of finished collectives go. Products of matrices are allocated and not
computed: in bf16 on a CPU without AVX-512 they took nine tenths of the time.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from deberta_ds.config import run_config
from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.model import dropout
from deberta_ds.planner import activations
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.start import join_group, open_run
from deberta_ds.training.step import train_step


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


def measure(run, stage: int) -> dict:
    zero = {"stage": stage, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1_000_000}
    ds = DeepSpeedConfig(zero_optimization=zero, bf16={"enabled": stage > 0})
    *_, ds = join_group(run, ds, "test")
    *_, inputs = open_run(run, ds, "test", "never")
    batches = batches_of(run, inputs, start=0, end=2)

    def step(number: int) -> None:
        result = train_step(model_engine, next(batches), step=number, seed=0)
        assert result.updated

    gc.collect()  # or the engine before this one would be freed inside the block
    with Allocated() as held:
        model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)
        step(0)
        gc.collect()
    with Allocated() as used:
        step(1)
    return {"held": held.end, "peak": held.end + used.peak, "ds": ds.as_dict()}


def main() -> None:
    os.environ["LOCAL_RANK"] = "0"
    dropout.DropoutMask.apply = activations._dropped  # keep what a GPU would keep
    products = torch.library.Library("aten", "IMPL")
    products.impl("mm", lambda a, b: a.new_zeros(len(a), b.shape[1]), "CPU")
    products.impl("addmm", lambda bias, a, b, **_: a.new_zeros(len(a), b.shape[1]), "CPU")
    torch.distributed.init_process_group("fake", rank=0, world_size=int(sys.argv[3]),
                                         store=FakeStore())
    engine.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # built for a minute
    engine.deepspeed.init_distributed(verbose=False)
    results = {}
    for argument in sys.argv[4:]:
        name, stage, overrides = argument.split(":")
        run, _ = run_config.load(sys.argv[1], overrides.split(";"))
        results[f"{name}, ZeRO-{stage}"] = measure(run, int(stage))
        print(name, stage, results[f"{name}, ZeRO-{stage}"], flush=True)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
