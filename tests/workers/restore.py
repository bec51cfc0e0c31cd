"""Worker: `save` checkpoints of every kind of engine, or `load` each into every kind, bit for bit.

    restore.py save|load|save_nvme|load_nvme RUN.toml DIRECTORY

Every kind is loaded from itself, from a reference and into it, one rank having another reference
than two; with FULL_TABLE=1 in the environment from every other one. Beside our files, DeepSpeed's
own of the same state are written to DIRECTORY/deepspeed, to compare with.
"""

import ast
import dataclasses
import itertools
import os
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from started import build

from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import Best, RunRecord
from deberta_ds.checkpoint.save import begin_save, finish_save
from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import CompleteConfig
from deberta_ds.engine.state import MASTER
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.step import train_step

# Every kind of engine that trains, by stage, precision and where the optimizer lies.
KINDS = ("zero0_fp32", "zero1_fp32", "zero1_bf16", "zero1_fp16",
         "zero1_bf16_fp32accumulation", "zero1_fp32_roundrobin", "zero2_fp32", "zero2_bf16_cpu",
         "zero3_fp32", "zero3_bf16", "zero3_fp16", "zero3_bf16_cpu")
SAVED_BY_ONE = ("zero0_fp32", "zero1_fp32_roundrobin", "zero3_bf16")  # the others by two ranks only
REFERENCES = {1: "zero1_fp32", 2: "zero3_bf16"}  # by the number of ranks that load
# Muon takes no offload; its precisions other than these are tried with FULL_TABLE=1.
MUON_KINDS = tuple(kind for kind in KINDS if not kind.endswith("cpu") and (
    "FULL_TABLE" in os.environ or "16" not in kind or kind in ("zero1_bf16", "zero3_bf16")))
NVME_KINDS = ("zero3_nvme", "zero1_fp32")


def deepspeed_dict(kind: str, directory: Path) -> dict:
    zero = {"stage": int(kind[4]), "overlap_comm": False}
    if zero["stage"] == 3:  # several sub-groups, every parameter cut
        zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 20_000}
    if kind.endswith("nvme"):
        del zero["sub_group_size"]
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(directory / "swap"),
                                     "buffer_count": 4, "pin_memory": False}
    if kind.endswith("cpu"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if kind.endswith("roundrobin"):
        zero["round_robin_gradients"] = True
    values = {"zero_optimization": zero}
    for precision in ("bf16", "fp16"):
        if precision in kind:
            values[precision] = {"enabled": True}
    if "fp16" in kind:
        values["fp16"]["initial_scale_power"] = 8
    if kind.endswith("fp32accumulation"):
        values["data_types"] = {"grad_accum_dtype": "fp32"}
    return values


def save(run, directory: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        inputs, model_engine = build(run, deepspeed_dict(kind, directory))
        batches = batches_of(run, inputs, start=0, end=2)
        for step in range(2):
            micro = next(batches)
            engine.set_learning_rate(model_engine, 1e-3)
            train_step(model_engine, micro, step=step, seed=0)
        name = f"w{dist.world_size()}_{kind}"
        write(model_engine, run, inputs.ds, directory / name)
        compare_with_model(model_engine, find.path_of(directory / name, 2))
        if not kind.endswith("nvme"):
            model_engine.save_checkpoint(str(directory / "deepspeed" / name), tag="zero",
                                         save_latest=False)


def write(model_engine, run, ds: CompleteConfig, out: Path) -> None:
    record = RunRecord(step=2, sequences_seen=0, tokens_seen=0, seconds=0.0,
                       world_size=dist.world_size(), config=run_config.to_dict(run),
                       deepspeed=ds.as_dict(), content_hashes={}, tokenizer_sha256="",
                       recent_losses=[], since_line={}, time_use={}, begun_from="", best=Best(),
                       versions={})
    finish_save(begin_save(model_engine, out, record, keep=1))


def load(run, directory: Path, kinds: tuple[str, ...]) -> None:
    other = dataclasses.replace(
        run, train=dataclasses.replace(run.train, seed=99),
        optim=dataclasses.replace(run.optim, weight_decay=0.25, clip_norm=0.5))
    done = 0
    is_full = "FULL_TABLE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"])  # the group is joined by the first engine
    reference, again = REFERENCES[ranks], directory / f"again{ranks}"
    for loaded in kinds:
        inputs, model_engine = build(other, deepspeed_dict(loaded, directory))
        watch = no_loader_of_deepspeed  # the first load of each kind: watching is slow
        for saved, world_size in itertools.product(kinds, (1, 2)):
            source = find.path_of(directory / f"w{world_size}_{saved}", 2)
            if not source.exists() or not (is_full or reference in (saved, loaded)
                                           or saved == loaded):
                continue
            with watch():
                saved_state.load_state(model_engine, find.find(source.parent.parent, "auto").path)
            watch = nullcontext if not is_full else watch
            check_settings(model_engine)
            write(model_engine, run, inputs.ds, again)
            compare_with_model(model_engine, find.path_of(again, 2))
            if dist.is_main():
                done += 1
                compare(source, find.path_of(again, 2), f"{source} into {loaded}")
            dist.barrier()
    if dist.is_main():
        shutil.rmtree(again)
        print(f"{done} loads equal")


def dist_alone() -> bool:
    return os.environ["WORLD_SIZE"] == "1" and "FULL_TABLE" not in os.environ


@cache
def loaders_of_deepspeed() -> set[tuple[str, str]]:
    """Return (file, function) of all of the installed DeepSpeed that unpickles or loads a file."""
    found = set()
    for path in Path(deepspeed.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"(torch|pickle)\.load|load\w*checkpoint|load_module_state_dict", text):
            continue  # to parse all of them takes longer than the loads
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = {ast.unparse(node.func) for node in ast.walk(function)
                         if isinstance(node, ast.Call)}
                pattern = r"(torch|pickle)\.loads?$|load_(checkpoint|module_state_dict)$"
                loads = any(re.search(pattern, call) for call in calls)
                if loads or re.search(r"load\w*checkpoint", function.name):
                    found.add((str(path), function.name))
    return found


@contextmanager
def no_loader_of_deepspeed():
    """Fail if one of these loaders is called inside, or torch.load with pickles allowed."""
    loaders = loaders_of_deepspeed()
    assert {"load_checkpoint", "_load_zero_checkpoint"} <= {name for _, name in loaders}
    called, real_load = set(), torch.load

    def profile(frame, event, _argument):
        place = (frame.f_code.co_filename, frame.f_code.co_name)
        if event == "call" and place in loaders:
            called.add(place)

    def safe_load(*arguments, **options):
        assert options.get("weights_only") is True
        return real_load(*arguments, **options)

    torch.load = safe_load
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        torch.load = real_load
    assert not called, called


def check_settings(model_engine) -> None:
    """The hyper-parameters are this run's, not the checkpoint's, in each group by itself."""
    decays = {group["weight_decay"] for group in model_engine.optimizer.param_groups}
    assert decays == {0.25, 0.0}, decays
    assert model_engine.gradient_clipping() == 0.5
    clip = getattr(model_engine.optimizer, "clip_grad", 0.5)
    assert clip == 0.5, clip


def compare_with_model(model_engine, path: Path) -> None:
    """The saved fp32 weights, rounded, are the weights that the model runs with."""
    state = SavedState(path)
    for name, parameter in model_engine.module.named_parameters():
        with engine.gathered([parameter]):
            saved = state.read_whole(name).to(parameter.dtype)
            assert torch.equal(saved, parameter.detach()), (path, name)


def is_muons(name: str) -> bool:
    """Return whether a parameter of the tiny model is Muon's in this run."""
    matrix = re.search(r"(attention\.\w+|ffn_in|ffn_out|dense)\.weight$", name)
    return bool(matrix) and run.optim.name == "muon"


def compare(first: Path, second: Path, what: str) -> None:
    a, b = SavedState(first), SavedState(second)
    assert a.shapes == b.shapes and a.counters == b.counters
    for name in a.shapes:
        keys = ["exp_avg"] if is_muons(name) else ["exp_avg", "exp_avg_sq"]
        assert sorted(a.state_keys(name)) == keys == sorted(b.state_keys(name)), (what, name)
        for key in (MASTER, *keys):
            assert torch.equal(a.read(name, key), b.read(name, key)), (what, name, key)
        assert a.scalars(name) == b.scalars(name), what
    scales = a.loss_scale, b.loss_scale
    if all(scale.get("dynamic") for scale in scales):
        assert scales[0]["cur_scale"] == scales[1]["cur_scale"], what


if __name__ == "__main__":
    run, _ = run_config.load(sys.argv[2], ["--model.attention=tiled"])  # which stays the run's own
    mode, directory = sys.argv[1], Path(sys.argv[3])
    kinds = MUON_KINDS if run.optim.name == "muon" else KINDS
    if mode.endswith("nvme"):
        kinds = NVME_KINDS
    # Old CPUs have no fast fp16, which DeepSpeed takes for none; its arithmetic is there.
    get_accelerator().is_fp16_supported = lambda: True
    if mode.startswith("save"):
        save(run, directory, SAVED_BY_ONE if mode == "save" and dist_alone() else kinds)
    else:
        load(run, directory, kinds)
    dist.destroy()
