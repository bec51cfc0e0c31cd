"""Train a run under each ZeRO stage in one process group; rank 0 writes losses and tables.

    trajectory.py RUN.toml OUT.pt STAGE,STAGE,...
"""

import sys
from pathlib import Path

import torch
from started import build

from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.config.optim import learning_rate
from deberta_ds.engine import engine
from deberta_ds.objectives.build import objective_of
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.step import train_step


def trajectory(run, values: dict) -> dict:
    """Return {"generator", "discriminator": losses, "words", "delta": final tables}."""
    inputs, model_engine = build(run, values)
    train = run.train
    batches = batches_of(run, inputs, start=0, end=train.steps)
    losses = {"generator": [], "discriminator": []}
    for step in range(train.steps):
        engine.set_learning_rate(model_engine, learning_rate(run.optim, step, train.steps))
        micro = next(batches)
        result = train_step(model_engine, micro, step=step, seed=train.seed)
        means = objective_of(run).means(run, result.sums)
        losses["generator"].append(means["generator_loss"])
        losses["discriminator"].append(means["discriminator_loss"])
    module = model_engine.module
    tables = {"words": module.words.weight}
    if run.objective.embedding_sharing != "es":
        tables["delta"] = module.discriminator.words.weight
    with engine.gathered(list(tables.values())):
        return losses | {name: table.detach().clone() for name, table in tables.items()}


def main() -> None:
    run, _ = run_config.load(sys.argv[1])
    results = {}
    for stage in map(int, sys.argv[3].split(",")):
        zero = {"stage": stage}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        results[stage] = trajectory(run, {"zero_optimization": zero})
    if dist.is_main():
        torch.save(results, Path(sys.argv[2]))
    dist.destroy()


if __name__ == "__main__":
    main()
