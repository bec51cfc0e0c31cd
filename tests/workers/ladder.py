"""Train each ladder rung past bad steps in one process group; rank 0 writes what happened.

    ladder.py RUN.toml OUT.json NAME=DS.json[:checkpointing:interval] ...

Per rung: losses of three good steps with a spike discarded between them, the norms of both
networks' gradients after clipping, then what a non-finite gradient raised, and whether the weights
moved in either.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from started import build

from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.engine import engine
from deberta_ds.engine.state import base_optimizer, buffers, layout_of
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.step import BadStepError, train_step

BAD = "generator.head.dense.weight"


def climb(run, values: dict) -> dict:
    inputs, model_engine = build(run, values)
    train = run.train
    batches = batches_of(run, inputs, start=0, end=3)
    found = {"losses": [], "updated": [], "norms": []}
    for step in range(3):
        engine.set_learning_rate(model_engine, run.optim.learning_rate)
        micro = next(batches)
        if step == 2:
            before = snapshot(model_engine)
            spike = train_step(model_engine, micro, step=step, seed=train.seed, ceiling=-1.0,
                               raise_if_bad=False)
            found["spike"] = [spike.updated, spike.problem, same(before, snapshot(model_engine))]
        result = train_step(model_engine, micro, step=step, seed=train.seed,
                            request=step == 2 and dist.rank() == 1)
        found["losses"].append(result.loss)
        found["updated"].append(result.updated)
        found["norms"].append(float(model_engine.get_global_grad_norm() or 0.0))
        if step == 0:
            found["clipped"] = clipped_norms(model_engine, run.optim.betas[0])
    found["stop"] = result.request
    found["bad_gradient"] = bad_gradient(model_engine, micro, train.seed)
    found["found"] = type(model_engine.optimizer).__name__
    return found


def clipped_norms(model_engine, beta: float) -> list[float]:
    """Return generator's and discriminator's gradient norm of the first step, from Adam's mean."""
    layout, state = layout_of(model_engine), base_optimizer(model_engine).state
    squares = torch.zeros(2, dtype=torch.float64)
    for buffer in buffers(model_engine, layout):
        mean = state[buffer.weights]["exp_avg"].view(-1)
        for name, piece in buffer.held:
            held = mean[piece.offset:piece.offset + piece.count].double().cpu()
            squares[int(name.startswith("discriminator."))] += held.square().sum()
    if not layout.is_replicated:
        squares = dist.sum_over_ranks(squares)
    return (squares.sqrt() / (1 - beta)).tolist()


def bad_gradient(model_engine, micro: list, seed: int) -> list:
    """Return [the error's text, whether the weights stayed] when the last rank makes a NaN."""
    weight = dict(model_engine.module.named_parameters())[BAD]
    if dist.rank() == dist.world_size() - 1:
        weight.register_hook(lambda gradient: gradient * torch.nan)
    before = snapshot(model_engine)
    text = ""
    try:
        train_step(model_engine, micro, step=3, seed=seed)
    except BadStepError as error:
        text = str(error)
    return [text, same(before, snapshot(model_engine))]


def snapshot(model_engine) -> list[torch.Tensor]:
    parameters = list(model_engine.module.parameters())
    with engine.gathered(parameters):
        return [p.detach().clone() for p in parameters]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def main() -> None:
    run, _ = run_config.load(sys.argv[1])
    # Old CPUs have no fast fp16, which DeepSpeed takes for none; its arithmetic is there.
    get_accelerator().is_fp16_supported = lambda: True
    results = {}
    for argument in sys.argv[3:]:
        name, _, rest = argument.partition("=")
        path, *more = rest.split(":")
        values = json.loads(Path(path).read_text())
        zero = values["zero_optimization"]
        if zero["stage"] == 3:
            zero["stage3_param_persistence_threshold"] = 0  # or nothing this small is partitioned
        if "fp16" in values:
            values["fp16"]["initial_scale_power"] = 6  # no overflow in the first steps
        if zero.get("offload_optimizer", {}).get("device") == "nvme":
            zero["offload_optimizer"]["nvme_path"] = str(Path(sys.argv[2]).parent)
        layers = replace(
            run.train, activation_checkpointing=more[0],
            activation_checkpointing_interval=int(more[1])) if more else run.train
        results[name] = climb(replace(run, train=layers), values)
        print(name, results[name], flush=True)
    if dist.is_main():
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy()


if __name__ == "__main__":
    main()
