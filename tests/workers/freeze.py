"""Worker: train a run with a part of it frozen under every ZeRO stage; rank 0 writes what came out.

    freeze.py RUN.toml DIRECTORY

Each engine is saved and restored into another one, before and after a thaw; all ends are compared.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from started import build
from workers import restore

from deberta_ds.checkpoint import find, saved_state
from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.config.optim import learning_rate
from deberta_ds.engine import ds_config, engine
from deberta_ds.objectives.build import objective_of
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.step import train_step

THAW = 2  # step
RUNS = (("frozen", "zero0_fp32", (3,)),  # the last: steps to save at, and to go on from
        ("frozen", "zero1_fp32", (3,)), ("frozen", "zero2_fp32", ()),
        ("frozen", "zero3_fp32", (3,)), ("thawed", "zero1_bf16", (1, 3)),
        ("thawed", "zero3_fp32", ()))


def train(run, inputs, kind: str, out: Path, start: int, saves: tuple[int, ...] = ()) -> dict:
    """Return losses and weights after the last step; `start`: go on from the checkpoint of it."""
    ds = ds_config.check(restore.deepspeed_dict(kind, out), kind)
    ds = ds_config.resolve(run, ds, dist.world_size())
    model_engine = engine.build_pretraining_engine(run, ds, inputs.tokenizer.size)
    if start:
        saved_state.load_state(model_engine, find.path_of(out / f"{start}", 2))
    losses, steps = [], run.train.steps
    batches = batches_of(run, inputs, start=start, end=steps)
    for step in range(start, steps):
        engine.set_learning_rate(model_engine, learning_rate(run.optim, step, steps),
                                 is_thawed=step >= run.train.freeze_steps)
        result = train_step(model_engine, next(batches), step=step, seed=run.train.seed)
        losses.append(objective_of(run).means(run, result.sums)["loss"])
        if step + 1 in saves:
            restore.write(model_engine, run, ds, out / f"{step + 1}")
            restore.compare_with_model(model_engine, find.path_of(out / f"{step + 1}", 2))
    weights = {}
    for name, parameter in model_engine.module.named_parameters():
        with engine.gathered([parameter]):
            weights[name] = parameter.detach().clone()
    return {"losses": losses, "weights": weights}


def main() -> None:
    run, directory = run_config.load(sys.argv[1])[0], Path(sys.argv[2])
    inputs, _ = build(run, {})
    found = {}
    for name, kind, saves in RUNS:
        one = dataclasses.replace(run, train=dataclasses.replace(
            run.train, freeze_steps=THAW if name == "thawed" else 0))
        out = directory / name / kind
        whole = found[f"{name} {kind}"] = train(one, inputs, kind, out, 0, saves)
        for start in saves:
            again = train(one, inputs, kind, out, start)
            assert again["losses"] == whole["losses"][start:], (name, kind, start)
            for key, value in again["weights"].items():
                assert torch.equal(value, whole["weights"][key]), (name, kind, start, key)
    if dist.is_main():
        torch.save(found, directory / "found.pt")
    dist.destroy()


if __name__ == "__main__":
    main()
