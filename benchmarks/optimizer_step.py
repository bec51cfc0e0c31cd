"""What an update costs: Muon compared with AdamW on the networks of a run, one rank.

    python -m benchmarks.optimizer_step --config launch/runs/small_mlm.toml
    python -m benchmarks.optimizer_step --config launch/runs/v3_base.toml --device cuda

Random gradients; the least of some rounds in turns. Writes
benchmarks/results/optimizer_step-<run>-<device>.json.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.measure import interleaved_minimum, save
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.config import run_config
from deberta_ds.engine.optim import build_optimizer
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives.build import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    run, _ = run_config.load(options.config)
    with torch.device(options.device):
        model = build_model(run, None)
    init_parameters(model, run.model.init_std, run.train.seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    calls = {"adamw": build_optimizer(model, replace(run.optim, name="adamw")).step}
    for name, kind in (("muon, fp32 matmuls", None), ("muon, bf16 matmuls", torch.bfloat16)):
        muon = build_optimizer(model, replace(run.optim, name="muon"), matmuls=kind)
        calls[name] = muon.step
    matrices = sum(p.numel() for group in muon.param_groups if group["matrices"]
                   for p in group["params"])
    seconds = interleaved_minimum(calls, options.rounds, options.device)
    for name, value in seconds.items():
        print(f"{name:22}{1000 * value:9.2f} ms")
    save(f"optimizer_step-{Path(options.config).stem}", options.device,
         {"parameters": sum(p.numel() for p in model.parameters()), "in matrices": matrices,
          "seconds": seconds})


if __name__ == "__main__":
    exit_cleanly(main)
