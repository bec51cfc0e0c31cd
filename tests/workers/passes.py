"""Train under every setting in three ways in one process group; rank 0 writes what came out.

    passes.py RUN.toml OUT.pt STAGE,PRECISION,MICRO_BATCHES ...

The ways: by DeepSpeed's hooks, by gradients summed in `engine.passes`, and by a recorded graph of
these passes. Of each {(stage, precision, micro-batches, way): (losses, norm, weights)}.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import recorded_graph
import torch
from started import build

from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.engine import engine, passes
from deberta_ds.model import linear_cross_entropy
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.step import train_step

STEPS = 3


def train(run, values: dict, way: str) -> tuple:
    inputs, model_engine = build(run, values)
    model_engine.passes = passes.HookedPasses(model_engine)
    if way != "hooks":
        model_engine.passes = passes.Passes(model_engine, "auto" if way == "graph" else "off")
    losses, counts = [], []
    for step, micro in enumerate(batches_of(run, inputs, start=0, end=STEPS)):
        engine.set_learning_rate(model_engine, 1e-3, is_thawed=step >= run.train.freeze_steps)
        micro = [replace(batch, run_fraction=step / (STEPS - 1)) for batch in micro]
        if step == 1:  # a bad step between good ones changes nothing
            spike = train_step(model_engine, micro, step=step, seed=1, ceiling=-1.0,
                               raise_if_bad=False)
            assert not spike.updated and spike.problem
        losses.append(train_step(model_engine, micro, step=step, seed=1).loss)
        counts.append((model_engine.micro_steps, model_engine.global_samples,
                       model_engine.global_steps))
    weights = {name: p.detach().clone() for name, p in model_engine.module.named_parameters()}
    graphs = len(model_engine.passes._graphs) if way == "graph" else 0
    return losses, float(model_engine.get_global_grad_norm() or 0.0), weights, counts, graphs


def main() -> None:
    passes.capture = recorded_graph.capture
    # As on a GPU, which would have to be waited for.
    linear_cross_entropy.rows_to_sample = lambda here_T: torch.arange(len(here_T))
    linear_cross_entropy.check_labels = lambda *_: None
    given, _ = run_config.load(sys.argv[1], ["--model.attention=dense"])
    results = {}
    for setting in sys.argv[3:]:
        stage, precision, count = setting.split(",")
        stage, count = int(stage), int(count)
        size = given.train.micro_batch_size * count * int(os.environ["WORLD_SIZE"])
        run = replace(given, train=replace(given.train, global_batch_size=size))
        ds = {"zero_optimization": {"stage": stage}}
        if precision == "bf16":
            ds["bf16"] = {"enabled": True}
        for way in ("hooks", "sums", "graph"):
            results[stage, precision, count, way] = train(run, ds, way)
    if dist.is_main():
        torch.save(results, Path(sys.argv[2]))
    dist.destroy()


if __name__ == "__main__":
    main()
