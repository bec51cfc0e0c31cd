"""Fine-tuning next to the Hugging Face Trainer: the same model, rows, batch, epochs, settings.

    python benchmarks/finetune_speed.py --model HF_DIRECTORY --data DIR --task RTE

Both train on one thread of one process, one after the other, in fp32 or (--bf16) under bf16
autocast, and score the validation split. Seconds of batching, forward, backward and update are
compared, those of the CPU or, with --device cuda, of the clock; tokenization before that is left
out for both. The Trainer (which needs `accelerate`) pads to the longest row of a batch; once more
it groups rows by length itself. --profile prints where our time goes instead.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from deberta_ds.base.errors import exit_cleanly
from deberta_ds.base.files import write_atomic

WAYS = {"trainer": "random", "trainer, grouped by length": "group_by_length"}
SECONDS = {"cpu": "cpu_seconds", "cuda": "seconds"}


def now(device: str) -> float:
    """Return seconds of this process on the CPU, or of the clock when the card is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory with a tokenizer")
    parser.add_argument("--data", required=True, help="directory of the tasks' files")
    parser.add_argument("--task", default="RTE")
    parser.add_argument("--seed", type=int, default=1, help="its runs are added to the results")
    parser.add_argument("--global_batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--train_rows", type=int, default=0, help="first rows of train; 0: all")
    parser.add_argument("--label", default="", help="key in the results, for one task")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast on both sides")
    parser.add_argument("--profile", action="store_true", help="operators of our own epoch")
    parser.add_argument("--any_size", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", help="(default: benchmarks/results/finetune_speed[-cuda].json)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_card = options.device == "cuda"
    out = Path(options.out or f"benchmarks/results/finetune_speed{'-cuda' * on_card}.json")
    shape = json.loads((Path(options.model) / "config.json").read_text())
    about = {key: shape[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    about |= {
        key: getattr(options, key) for key in ("global_batch_size", "epochs", "learning_rate")}
    name = options.task
    job, train, val = job_of(name, options)
    if options.profile:
        return print(profiled(job, train))
    about |= {"train_rows": len(train), "val_rows": len(val),
              "precision": "bf16 autocast" if options.bf16 else "fp32"}
    record = json.loads(out.read_text()) if out.exists() else {}
    runs = record.get(options.label or name, {}).get("runs", {})
    for way, sampling in WAYS.items():
        runs.setdefault(way, []).append(run_trainer(options, job, train, val, sampling))
    runs.setdefault("ours", []).append(run_ours(job, train))
    print(name, {way: rows[-1] for way, rows in runs.items()}, flush=True)
    least = {way: min(row[SECONDS[options.device]] for row in rows) for way, rows in runs.items()}
    ratios = {way: round(least[way] / least["ours"], 2) for way in WAYS}
    record[options.label or name] = about | {"times_as_fast": ratios, "runs": runs}
    write_atomic(out, json.dumps(record, indent=1) + "\n")


def job_of(name: str, options):
    """Return (job, train features, val features) of a task in our own terms."""
    from deberta_ds.engine.ds_config import DeepSpeedConfig
    from deberta_ds.finetuning.inputs import Job, Tables, prepare
    from deberta_ds.finetuning.models import open_start
    from deberta_ds.tasks.readers import read_split
    from deberta_ds.tasks.settings import load, resolve
    from deberta_ds.tasks.task import TASK_NAMES, task_named

    task = task_named(name)
    given = [f"--all.{key}={getattr(options, key)}" for key in
             ("global_batch_size", "epochs", "learning_rate")]
    given += ["--all.warmup_share=0.06", "--all.warmup_steps=0", "--all.max_length=128"]
    train, val = (read_split(task, options.data, split, any_size=options.any_size)
                  for split in ("train", "val"))
    job = Job(task=task, seed=options.seed, settings=resolve(task, load(None, given, TASK_NAMES)),
              start=open_start(options.model), tables=Tables(train, val), out=Path("."),
              deepspeed=DeepSpeedConfig(torch_autocast={"enabled": options.bf16}),
              device=torch.device(options.device))
    prepare([job])
    rows, val_rows = (job.tables.encoded[id(split)] for split in (train, val))
    return job, rows[: options.train_rows or len(rows)], val_rows


def run_ours(job, train) -> dict:
    from deberta_ds.config.optim import learning_rate
    from deberta_ds.engine.engine import init_distributed, set_learning_rate
    from deberta_ds.finetuning import loop
    from deberta_ds.training.step import train_step

    init_distributed()  # not before the Trainer's runs: it would wrap the model for many ranks
    settings, seed = job.settings, job.seed
    updates = settings.epochs * -(-len(train) // settings.global_batch_size)
    optim = settings.optim(updates)
    engine, training = loop.build(job, optim), loop.training_of(job)
    lengths = np.array([feature.num_tokens for feature in train])
    began = now(job.device.type)
    for step in range(updates):
        set_learning_rate(engine, learning_rate(optim, step, updates))
        rows = loop.stream(lengths, seed, step, settings.global_batch_size, settings.group_updates)
        train_step(engine, loop.micro_batches([train[i] for i in rows], settings), step=step,
                   seed=seed, training=training)
    seconds = now(job.device.type) - began
    values, _ = loop._evaluate(job, engine)
    engine.destroy()
    return {SECONDS[job.device.type]: round(seconds, 2), "accuracy": round(values["accuracy"], 4)}


def profiled(job, train) -> str:
    """Return the operators of our epoch, those with most time of their own first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_ours(job, train)
    return profiler.key_averages().table("self_cpu_time_total", row_limit=40,
                                         max_name_column_width=60)


def run_trainer(options, job, train, val, sampling: str) -> dict:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    def rows(features):
        return [{"input_ids": list(f.sequences[0]), "attention_mask": [1] * len(f.sequences[0]),
                 "labels": f.label} for f in features]

    torch.manual_seed(options.seed)
    network = AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=len(job.task.labels))
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out, per_device_train_batch_size=options.global_batch_size,
            num_train_epochs=options.epochs, use_cpu=options.device == "cpu", bf16=options.bf16,
            learning_rate=options.learning_rate, warmup_steps=0.06, weight_decay=0.01,
            adam_epsilon=1e-6, report_to=[], save_strategy="no", logging_strategy="no",
            train_sampling_strategy=sampling, disable_tqdm=True, seed=options.seed)
        collator = DataCollatorWithPadding(AutoTokenizer.from_pretrained(options.model))
        trainer = Trainer(network, arguments, data_collator=collator, train_dataset=rows(train))
        began = now(options.device)
        trainer.train()
        seconds = now(options.device) - began
        scores = trainer.predict(rows(val)).predictions
    right = scores.argmax(-1) == np.array([feature.label for feature in val])
    return {SECONDS[options.device]: round(seconds, 2), "accuracy": round(float(right.mean()), 4)}


if __name__ == "__main__":
    exit_cleanly(main)
