"""Command-line options that launch/finetune.py and launch/sweep.py share.

Nothing is imported above that takes time: --help and a mistyped option are answered at once.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deberta_ds.base.command_line import local_path, natural, positive
from deberta_ds.base.errors import UserError

if TYPE_CHECKING:
    from deberta_ds.engine.ds_config import DeepSpeedConfig
    from deberta_ds.finetuning.sweep import Sweep
    from deberta_ds.tasks.task import Task

_GPU_JSON = "ds_configs/zero1_bf16.json"
SIFT_WEIGHT = 5.0  # lambda of the published DeBERTaV3 small and base recipes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every fine-tuning command takes."""
    add, is_run = parser.add_argument, "--look" not in sys.argv
    add("--model", required=is_run,
        help="run or checkpoint, Hugging Face directory, random:PRESET or random:DIRECTORY")
    add("--data", default="", help="data of SuperGLUE or GLUE: directory, zip, or hub")
    add("--out", required=is_run, type=local_path, help="results go to OUT/TASK/seed-N/")
    add("--seeds", type=positive, default=1, help="how many seeds: 1 .. N")
    add("--config", metavar="TOML",
        help="settings, such as launch/runs/superglue/small.toml; any can be overridden: "
        "--all.epochs=3, --RTE.epochs=4 for one task")
    add("--deepspeed_config", metavar="JSON",
        help=f"how it is run (default: {_GPU_JSON} on a GPU with bf16, else fp32 without ZeRO)")
    add("--tokenizer", help="path of a tokenizer: for random:PRESET, or where the model has none")
    add("--sift", action="store_true",
        help=f"adversarial fine-tuning (SiFT), sift_weight = {SIFT_WEIGHT} unless it is set")
    add("--carve_train", nargs="+", action="extend", default=[], metavar="TASK",
        help="cut the train split of these tasks out of val, by passage")
    add("--any_size", action="store_true", help="accept files that are not of the official size")
    add("--max_bad", type=natural, default=0, metavar="N",
        help="leave out up to N rows of a table that cannot be used")
    add("--skip_test", action="store_true", help="make no test predictions")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it


def open_task(name: str) -> "Task":
    """Return a benchmark's task by its name, or one of the user's own by its file."""
    from deberta_ds.tasks.task import task_named

    if not name.endswith(".toml"):
        return task_named(name)
    from deberta_ds.tasks.task_file import load_own_task

    task, labels = load_own_task(name)
    say(labels)
    return task


def build_sweep(options: argparse.Namespace, overrides: list[str], tasks: "Sequence[str | Task]",
                init_from: "Mapping[str, str] | Sequence[str] | str", keep_models: bool,
                show_scores: bool = False) -> "Sweep":
    """Join the process group and return the sweep that the command line asks for."""
    from deberta_ds.cluster import dist
    from deberta_ds.model import choose
    from deberta_ds.training import start

    asked = {f"--{name}": str(value) for name, value in vars(options).items()
             if name != "local_rank"}
    asked |= {key: value for key, _, value in (text.partition("=") for text in overrides)}
    device = start.join(asked | {
        "--tasks": list(map(str, tasks)), "--init_from": init_from, "save models": keep_models,
        "--out, absolute": os.path.abspath(options.out)})
    opened = dist.together(lambda: _open(options, overrides, tasks, init_from))
    lines = opened.pop("lines")
    kernels = start.agreed_kernels(lambda: choose.in_a_line(start.kernel_choices(
        opened["start"].config, opened["deepspeed"], without=("cross-entropy",))))
    for line in (lines[0], f"kernels: {kernels}", *lines[1:]):
        say(line)
    from deberta_ds.finetuning.sweep import Sweep

    return Sweep(
        **opened, num_seeds=options.seeds, data=options.data or ".", out=options.out,
        device=device, any_size=options.any_size, max_bad=options.max_bad,
        predict_test=not options.skip_test, keep_models=keep_models, show_scores=show_scores,
        say=say)


def open_tasks(options: argparse.Namespace, overrides: list[str], given: "Sequence[str | Task]"
               ) -> "tuple[tuple[Task, ...], dict[str, dict[str, Any]]]":
    """Return the tasks, and tables of their settings, which fit them."""
    from deberta_ds.tasks import settings
    from deberta_ds.tasks.task import TASK_NAMES

    tasks = tuple(open_task(task) if isinstance(task, str) else task for task in given)
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two tasks are called {twice[0]}, and so are their directories; name it "
                        "once, or give one of the task files another name")
    for task in tasks:
        if task.predicted_by:
            raise UserError(
                f"{task.name} has no training data; the {task.predicted_by} model predicts it: "
                f"run --task {task.predicted_by}")
    own = [task.name for task in tasks if task.name not in TASK_NAMES]
    if not options.data and len(own) < len(tasks):
        raise UserError("--data: name the directory of the benchmark's files, a zip, or hub")
    tables = settings.load(options.config, overrides, (*TASK_NAMES, *own), names)
    for task in tasks:
        if options.sift and "sift_weight" not in task.settings:
            tables.setdefault(task.name, {}).setdefault("sift_weight", SIFT_WEIGHT)
        settings.resolve(task, tables)
    return tasks, tables


def _open(options: argparse.Namespace, overrides: list[str], given: "Sequence[str | Task]",
          init_from: "Mapping[str, str] | Sequence[str] | str") -> dict[str, Any]:
    """Open what all runs have in common; return fields of the sweep, and what is said of them."""
    from deberta_ds.engine.engine import check_machine
    from deberta_ds.finetuning.models import open_start
    from deberta_ds.tasks.task import task_named

    tasks, tables = open_tasks(options, overrides, given)
    names = [task.name for task in tasks]
    json, ds = deepspeed(options.deepspeed_config)
    if isinstance(init_from, str):
        init_from = {names[0]: init_from} if init_from else {}
    elif not isinstance(init_from, Mapping):
        init_from = pairs(init_from, names)
    return {"tasks": tasks, "settings": tables, "deepspeed": ds, "init_from": init_from,
            "start": open_start(options.model, options.tokenizer),
            "carved": tuple(task_named(name).name for name in options.carve_train),
            "lines": [f"DeepSpeed: {json}", *check_machine(ds, json)]}


def pairs(texts: Sequence[str], tasks: list[str]) -> dict[str, str]:
    """Return {task name: directory} of "TASK=DIR" texts; a name in any case."""
    names = {task.lower(): task for task in tasks}
    found: dict[str, str] = {}
    for text in texts:
        name, separator, directory = text.partition("=")
        if not separator:
            raise UserError(f"--init_from {text}: write TASK=DIR")
        if (name := names.get(name.lower(), name)) in found:
            raise UserError(f"--init_from {text}: {name} starts from {found[name]} already")
        found[name] = directory
    return found


def deepspeed(path: str | None) -> "tuple[str, DeepSpeedConfig]":
    """Return the name of a DeepSpeed JSON and the JSON; of this machine's where none is given."""
    import torch

    from deberta_ds.cluster.launcher import count_gpus
    from deberta_ds.engine import ds_config

    if not path and count_gpus() and torch.cuda.is_bf16_supported(including_emulation=False):
        path = _GPU_JSON
    return (path, ds_config.load(path)) if path else (
        "fp32 without ZeRO", ds_config.DeepSpeedConfig())


def say(text: str) -> None:
    """Print on the first rank."""
    from deberta_ds.cluster import dist

    if dist.is_main():
        print(text, flush=True)
