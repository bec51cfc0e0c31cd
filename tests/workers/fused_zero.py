"""Two training steps of a tiny RTD model through the Triton kernels, under a ZeRO stage.

In the interpreter, and by torch: dropout is on, and every path drops the same elements.
Prints the largest relative distance of losses and of the parameters' movement.

  fused_zero.py STAGE...        on one rank, in fp32
"""

import json
import sys
from dataclasses import replace

import deepspeed
import interpret_bf16  # noqa: F401
import torch
from fused_model import CONFIG, batch_of_a_packed_row

from deberta_ds.config import run_config
from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import DeepSpeedConfig, resolve
from deberta_ds.model import choose
from deberta_ds.model.choose import pick
from deberta_ds.training.step import train_step

ARGUMENTS = ["--train.global_batch_size=1", "--train.micro_batch_size=1"]


def run(stage: int, fused: bool) -> list[torch.Tensor]:
    """Return the losses of two steps, and how far each parameter moved."""
    choose.interpreted = lambda: fused
    pick.cache_clear()
    paths = ("fused", "fused") if fused else ("reference", "chunked")
    model = replace(CONFIG, attention=paths[0], cross_entropy=paths[1])
    given, _ = run_config.load("launch/runs/v3_base.toml", ARGUMENTS)
    objective = replace(given.objective, generator_layers=2)
    given = replace(given, model=model, objective=objective)
    ds = DeepSpeedConfig(zero_optimization={
        "stage": stage, "stage3_param_persistence_threshold": 0})
    model_engine = engine.build_pretraining_engine(given, resolve(given, ds, 1), None)
    engine.set_learning_rate(model_engine, 1e-3)
    parameters = list(model_engine.module.parameters())

    def values():
        with engine.gathered(parameters):
            return [x.detach().clone() for x in parameters]

    before, losses = values(), []
    for step in range(2):
        losses.append(train_step(model_engine, [batch_of_a_packed_row()], step=step, seed=1).loss)
    moved = [a - b for a, b in zip(values(), before, strict=True)]
    return [torch.tensor(losses), *moved]


def main() -> None:
    results, sys.stdout = sys.stdout, sys.stderr  # the run's log is no result, nor is DeepSpeed's
    for handler in deepspeed.utils.logger.handlers:
        handler.setStream(sys.stderr)
    engine.init_distributed()
    for stage in map(int, sys.argv[1:]):
        right, found = run(stage, False), run(stage, True)
        scale = max(x.norm().item() for x in right[1:])
        errors = [(a - b).norm().item() / max(b.norm().item(), 1e-2 * scale)
                  for a, b in zip(found, right, strict=True)]
        print(json.dumps({"stage": stage, "losses": found[0].tolist(), "loss_error": errors[0],
                          "error": torch.tensor(errors).max().item()}),
              file=results, flush=True)


if __name__ == "__main__":
    main()
