"""DeepSpeed alone, on a model of two layers: what it does without an error; writes JSON.

    traps.py OUT.json DIRECTORY
"""

import argparse
import builtins
import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from torch import nn

from deberta_ds.engine.engine import init_distributed


class Turns(nn.Module):
    """Two layers used in turn, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs, number):
        return self.layers[number](inputs).square().mean()


def build(stage: int, *, optimizer=torch.optim.AdamW, cut: bool = True, **config):
    """Return an engine of two parameter groups, without and with weight decay 0.5."""
    torch.manual_seed(0)
    model = Turns()
    zero = {"stage": stage}
    if stage == 3 and cut:
        zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 64}
    groups = [{"params": [layer.weight], "weight_decay": decay}
              for layer, decay in zip(model.layers, (0.0, 0.5), strict=True)]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer(groups, lr=0.1), dist_init_required=False,
        config={"train_batch_size": 1, "zero_optimization": zero,
                "zero_allow_untested_optimizer": True} | config)
    return engine


def step(engine, number: int) -> float:
    """Use one layer and take a step; return how far layer 0 moved."""
    first = engine.module.layers[0].weight
    whole = deepspeed.zero.GatheredParameters if hasattr(first, "ds_id") \
        else lambda parameters: nullcontext()
    with whole([first]):
        before = first.detach().clone()
    engine.backward(engine(torch.ones(1, 8, dtype=first.dtype), number))
    engine.step()
    with whole([first]):
        return (first.detach() - before).norm().item()


def stale_gradient(stage: int) -> list[float]:
    """Return layer 0's moves in the step that used it and in the next one, which did not."""
    engine = build(stage, optimizer=torch.optim.SGD, gradient_clipping=0.0)
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = 0.0
    return [step(engine, 0), step(engine, 1)]


def never_partitioned() -> dict[str, int]:
    """Return the parameters (of two) that ZeRO-3 keeps whole, by default and at threshold 0."""
    return {name: sum(p.ds_persist for p in build(3, cut=cut).module.parameters())
            for name, cut in (("default", False), ("threshold 0", True))}


def universal(directory: Path) -> dict:
    """Convert a ZeRO-3 checkpoint as DeepSpeed documents it; return what its loader makes of it."""
    engine = build(3)
    engine.module.seen.fill_(7.0)
    step(engine, 0)
    engine.save_checkpoint(str(directory), tag="a")
    ds_to_universal.main(argparse.Namespace(
        input_folder=str(directory / "a"), output_folder=str(directory / "u"),
        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
        inject_missing_state=False))
    (directory / "latest_universal").write_text("u")
    engine = build(3, checkpoint={"load_universal": True})
    engine.load_checkpoint(str(directory))
    inner = engine.optimizer.optimizer
    return {"step counters": len({id(state["step"]) for state in inner.state.values()}),
            "weight decays": [group["weight_decay"] for group in inner.param_groups],
            "buffer": engine.module.seen.item()}


def flipped_bit(directory: Path) -> float:
    """Return the loss after a bit of the saved weights was flipped, less that before."""
    engine = build(1)
    inputs = torch.ones(1, 8)
    engine.save_checkpoint(str(directory), tag="a")
    path = directory / "a/mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    weights = engine.module.layers[0].weight.detach().numpy().tobytes()
    data[data.index(weights) + 3] ^= 0x40  # an exponent
    path.write_bytes(data)
    other = build(1)
    before = other(inputs, 0).item()
    other.load_checkpoint(str(directory), load_optimizer_states=False)
    return other(inputs, 0).item() - before


def missing_latest(directory: Path) -> list:
    engine = build(1)
    engine.save_checkpoint(str(directory), tag="a")
    (directory / "latest").unlink()
    return list(engine.load_checkpoint(str(directory)))


@contextmanager
def opened_for_writing(names: list[str]):
    real = builtins.open

    def spy(file, mode="r", *rest, **options):
        if "w" in mode:
            names.append(Path(file).name)
        return real(file, mode, *rest, **options)

    builtins.open = spy
    try:
        yield
    finally:
        builtins.open = real


def written_in_place(directory: Path) -> bool:
    """Return whether `latest` is opened under its own name, so that it can be half-written."""
    engine, names = build(1), []
    with opened_for_writing(names):
        engine.save_checkpoint(str(directory), tag="a")
    return "latest" in names


def adam_step_at_start() -> int:
    """Return Adam's step counter before the first step of ZeRO-0 in bf16."""
    engine = build(0, bf16={"enabled": True})
    states = engine.optimizer.optimizer.state.values()
    return max((int(state["step"]) for state in states), default=0)


def gradient_over_loss_scale() -> dict[int, float]:
    """Return {stage: how large a gradient is as a share of what its fp16 step divides by}."""
    get_accelerator().is_fp16_supported = lambda: True  # by the arithmetic that is there
    found = {}
    for stage in (0, 1):
        engine = build(stage, fp16={"enabled": True, "loss_scale": 256})
        weight, inputs = engine.module.layers[0].weight, torch.ones(1, 8, dtype=torch.half)
        expected, = torch.autograd.grad(engine.module(inputs, 0), weight)
        seen = []
        weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.norm().item()))
        engine.backward(engine(inputs, 0))
        found[stage] = seen[0] / expected.norm().item() / 256
    return found


def main() -> None:
    init_distributed()
    out, directory = Path(sys.argv[1]), Path(sys.argv[2])
    found = {"stale gradient": {stage: stale_gradient(stage) for stage in (2, 3)},
             "clipping": build(1).gradient_clipping(),
             "never partitioned": never_partitioned(),
             "universal": universal(directory / "universal"),
             "flipped bit": flipped_bit(directory / "flipped"),
             "missing latest": missing_latest(directory / "missing"),
             "latest in place": written_in_place(directory / "latest"),
             "adam step": adam_step_at_start(),
             "over loss scale": gradient_over_loss_scale(),
             "misspelled key": build(1, zero_optimisation={"stage": 3}).zero_optimization_stage()}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
