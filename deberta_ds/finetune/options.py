"""Command-line options that launch/finetune.py and launch/superglue.py share."""

import argparse
from pathlib import Path

from deberta_ds import deepspeed_config, dist
from deberta_ds.errors import UserError
from deberta_ds.finetune.models import open_start
from deberta_ds.finetune.sweep import Sweep
from deberta_ds.finetune.tasks import Task, task_named
from deberta_ds.train.engine import init_distributed

SIFT_WEIGHT = 5.0  # lambda of the published DeBERTaV3 small and base recipes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every fine-tuning command takes."""
    add = parser.add_argument
    add("--model", required=True,
        help="checkpoint of ours, Hugging Face directory, random:PRESET or random:DIRECTORY")
    add("--data", required=True, help="SuperGLUE data: directory, zip, or hub")
    add("--out", required=True, type=Path, help="results go to OUT/TASK/seed-N/")
    add("--seeds", type=int, default=1, help="how many seeds: 1 .. SEEDS")
    add("--config", help="settings file, such as launch/runs/superglue/small.toml")
    add("--set", nargs="+", action="extend", default=[], metavar="[TASK.]KEY=VALUE",
        help="settings that override the file")
    add("--deepspeed_config", help="DeepSpeed JSON (default: fp32 without ZeRO)")
    add("--tokenizer", help="SentencePiece file; only for random:PRESET")
    add("--sift", action="store_true",
        help=f"adversarial fine-tuning (SiFT), sift_weight = {SIFT_WEIGHT} unless it is set")
    add("--carve-train", nargs="+", default=[], metavar="TASK",
        help="cut the train split of these tasks out of val, by passage")
    add("--any-size", action="store_true", help="accept files that are not of the official size")
    add("--skip-test", action="store_true", help="make no test predictions")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it


def build_sweep(
    options: argparse.Namespace, tasks: tuple[Task, ...], init_from: dict[str, str],
    keep_models: bool,
) -> Sweep:  # fmt: skip
    """Join the process group and return the sweep that `options` ask for."""
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1")
    for task in tasks:
        if task.predicted_by:
            raise UserError(
                f"{task.name} has no training data; the {task.predicted_by} model predicts it: "
                f"run --task {task.predicted_by}"
            )
    values = deepspeed_config.load(options.deepspeed_config) if options.deepspeed_config else {}
    given = tuple(options.set)
    if options.sift:
        given = (f"sift_weight={SIFT_WEIGHT}", *given)
    device = init_distributed()
    return Sweep(
        tasks=tasks,
        num_seeds=options.seeds,
        start=open_start(options.model, options.tokenizer),
        data=options.data,
        out=options.out,
        deepspeed=values,
        device=device,
        preset=options.config,
        given=given,
        init_from=init_from,
        carved=tuple(task_named(name).name for name in options.carve_train),
        any_size=options.any_size,
        predict_test=not options.skip_test,
        keep_models=keep_models,
        say=say,
    )


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.is_main():
        print(text, flush=True)
