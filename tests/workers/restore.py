"""Worker: `save` checkpoints of every stage, or `load` all of them into every stage, bit for bit.

    restore.py save|load|save_nvme|load_nvme RUN.toml DIRECTORY
"""

import dataclasses
import shutil
import sys
from pathlib import Path

import torch

from deberta_ds import config, dist
from deberta_ds.formats import checkpoint
from deberta_ds.formats.shards import MASTER, ShardedState
from deberta_ds.train import engine
from deberta_ds.train.loop import batches_of
from deberta_ds.train.setup import prepare
from deberta_ds.train.step import train_step

KINDS = ("zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32", "zero1_bf16", "zero3_bf16")
# (saved, loaded): every stage into every other one, between precisions, and itself
LOADS = [("zero0_fp32", "zero3_fp32"), ("zero0_fp32", "zero1_fp32"), ("zero1_fp32", "zero1_fp32"),
         ("zero1_fp32", "zero3_fp32"), ("zero1_fp32", "zero2_fp32"), ("zero2_fp32", "zero1_fp32"),
         ("zero2_fp32", "zero0_fp32"), ("zero3_fp32", "zero3_fp32"), ("zero3_fp32", "zero0_fp32"),
         ("zero3_fp32", "zero1_fp32"), ("zero3_fp32", "zero2_fp32"), ("zero3_bf16", "zero1_bf16"),
         ("zero1_bf16", "zero3_bf16"), ("zero1_bf16", "zero3_fp32")]
NVME_KINDS = ("zero3_nvme", "zero1_fp32")
NVME_LOADS = [("zero3_nvme", "zero3_nvme"), ("zero3_nvme", "zero1_fp32"),
              ("zero1_fp32", "zero3_nvme")]


def deepspeed_dict(kind: str, directory: Path) -> dict:
    zero = {"stage": int(kind[4]), "overlap_comm": False}
    if zero["stage"] == 3:  # several sub-groups, every parameter cut
        zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 20_000}
    if kind.endswith("nvme"):
        del zero["sub_group_size"]
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(directory / "swap"),
                                     "buffer_count": 4, "pin_memory": False}
    return {"zero_optimization": zero, "bf16": {"enabled": kind.endswith("bf16")}}


def build(run, kind: str, directory: Path):
    inputs = prepare(run, deepspeed_dict(kind, directory), "test")
    return inputs, engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)


def save(run, directory: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        inputs, model_engine = build(run, kind, directory)
        batches = batches_of(run, inputs, start=0, end=2)
        for step in range(2):
            micro = [next(batches) for _ in range(model_engine.gradient_accumulation_steps())]
            engine.set_learning_rate(model_engine, 1e-3)
            train_step(model_engine, micro, step=step, seed=0)
        write(model_engine, run, inputs.ds, directory / f"w{dist.world_size()}_{kind}")


def write(model_engine, run, ds: dict, out: Path) -> None:
    record = {"world_size": dist.world_size(), "config": config.to_dict(run), "deepspeed": ds}
    checkpoint.save(model_engine, out, 2, record, keep=1)


def load(run, directory: Path, loads: list[tuple[str, str]]) -> None:
    other = dataclasses.replace(
        run, train=dataclasses.replace(run.train, seed=99),
        optim=dataclasses.replace(run.optim, weight_decay=0.25, clip_norm=0.5))
    done = 0
    for saved, loaded in loads:
        for world_size in (1, 2):
            source = checkpoint.path_of(directory / f"w{world_size}_{saved}", 2)
            if not source.exists():
                continue
            inputs, model_engine = build(other, loaded, directory)
            checkpoint.load(model_engine, source)
            check_settings(model_engine)
            again = directory / f"again{dist.world_size()}"
            write(model_engine, run, inputs.ds, again)
            if dist.is_main():
                done += 1
                compare(source, saved, checkpoint.path_of(again, 2), loaded, run)
            dist.barrier()
    if dist.is_main():
        shutil.rmtree(again)
        print(f"{done} loads equal")


def check_settings(model_engine) -> None:
    """The hyper-parameters are this run's, not the checkpoint's, in each group by itself."""
    decays = {group["weight_decay"] for group in model_engine.optimizer.param_groups}
    assert decays == {0.25, 0.0}, decays
    assert model_engine.gradient_clipping() == 0.5
    clip = getattr(model_engine.optimizer, "clip_grad", 0.5)
    assert clip == 0.5, clip


def compare(first: Path, first_kind: str, second: Path, second_kind: str, run) -> None:
    names = checkpoint._plain_order({"config": config.to_dict(run)})
    a = ShardedState(first / "zero", int(first_kind[4]), names)
    b = ShardedState(second / "zero", int(second_kind[4]), names)
    assert a.shapes == b.shapes and a.counters == b.counters
    for name in a.shapes:
        keys = a.state_keys(name)
        assert keys == ["exp_avg", "exp_avg_sq"] == b.state_keys(name), (keys, b.state_keys(name))
        for key in (MASTER, *keys):
            equal = torch.equal(a.read(name, key), b.read(name, key))
            assert equal, (first_kind, second_kind, name, key)
        steps = float(a.scalars(name)["step"]), float(b.scalars(name)["step"])
        assert steps == (2, 2), steps


if __name__ == "__main__":
    run, _ = config.load(sys.argv[2])
    mode, directory = sys.argv[1], Path(sys.argv[3])
    if mode.startswith("save"):
        save(run, directory, NVME_KINDS if mode.endswith("nvme") else KINDS)
    else:
        load(run, directory, NVME_LOADS if mode.endswith("nvme") else LOADS)
    dist.destroy()
