"""Can every SuperGLUE task learn 32 official rows by heart, alike on one process and on two ranks?

    python -m benchmarks.studies.superglue_overfit --fewglue DIR --superglue DIR \
        [--tasks MultiRC ...]

A model of random values (2 layers of 128, 3,000 pieces trained on the rows' own text) is fine-tuned
on 32 FewGLUE rows a task and scored on the same rows: a score below 95 % says that features or
heads lose the label. WSC takes official train rows, because all of its FewGLUE rows are True;
MultiRC takes the shortest passages that have 32 answers together.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deberta_ds.base.errors import exit_cleanly
from deberta_ds.base.files import write_atomic
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.finetuning.directory import save_finetuned
from deberta_ds.finetuning.models import Start, build_model
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import task_named
from deberta_ds.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("BoolQ", "CB", "COPA", "MultiRC", "ReCoRD", "RTE", "WiC", "WSC")
ROWS = 32
SETTINGS = (
    "epochs=80",
    "global_batch_size=8",
    "learning_rate=1e-3",
    "weight_decay=0.0",
    "dropout=0.0",
    "head_dropout=0.0",
    "warmup_share=0.1",
    "patience=20",
    "max_length=320",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fewglue", type=Path, required=True)
    parser.add_argument("--superglue", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--out", default="benchmarks/results/superglue_overfit.json")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for task in TASKS:
            write_rows(task, options, scratch / "data" / task)
        texts = [text for path in (scratch / "data").glob("*/train.jsonl")
                 for line in path.open(encoding="utf-8") for text in strings(json.loads(line))]
        write_atomic(scratch / "text.txt", "\n".join(texts) + "\n")
        run("data_prep/train_tokenizer.py", str(scratch / "text.txt"), "--out",
            str(scratch / "spm.model"), "--vocab_size", "3000")
        write_shape(scratch)
        for task in options.tasks:
            found[task] = measure(task, scratch)
            print(json.dumps({task: found[task]}), flush=True)
    out = Path(options.out)
    record = json.loads(out.read_text()) if out.exists() else {"tasks": {}}
    record["tasks"] |= found
    write_atomic(out, json.dumps(record, indent=1) + "\n")


def write_rows(task: str, options: argparse.Namespace, directory: Path) -> None:
    """Write the chosen rows as train and as validation split."""
    source = options.superglue if task == "WSC" else options.fewglue
    lines = (source / task / "train.jsonl").read_text("utf-8").splitlines()
    if task == "MultiRC":
        lines = sorted(lines, key=len)
        answers = [sum(len(question["answers"]) for question in
                       json.loads(line)["passage"]["questions"]) for line in lines]
        lines = [line for number, line in enumerate(lines) if sum(answers[:number]) < ROWS]
    directory.mkdir(parents=True)
    for split in ("train", "val"):
        (directory / f"{split}.jsonl").write_text("\n".join(lines[:ROWS]) + "\n", "utf-8")


def strings(value) -> list[str]:
    """Return all strings inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in strings(part)]


def write_shape(scratch: Path) -> None:
    """Write a model directory whose shape and tokenizer the runs start from."""
    tokenizer = Tokenizer(scratch / "spm.model")
    shape = ModelConfig(vocab_size=tokenizer.size, hidden_size=128, num_layers=2, num_heads=4,
                        intermediate_size=256, position_buckets=32, max_position=128, init_std=0.05)
    task = task_named("RTE")
    model = build_model(task, Start("", shape, tokenizer, None), Settings(), 1)
    save_finetuned(scratch / "shape", task, Settings(), shape, dict(model.state_dict()), tokenizer)


def measure(task: str, scratch: Path) -> dict:
    """Return the train score of one process and how many predictions of two ranks are the same."""
    predictions = {}
    for ranks in (1, 2):
        out = scratch / f"out{ranks}"
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc_per_node=2",
                                          f"--master_port={29600 + TASKS.index(task)}"]
        run(*launcher, "launch/finetune.py", "--task", task, "--out", str(out),
            "--model", f"random:{scratch / 'shape'}", "--data", str(scratch / "data"),
            "--any_size", "--skip_test", "--no_save_model", *(f"--all.{text}" for text in SETTINGS))
        directory = out / task / "seed-1"
        predictions[ranks] = [json.loads(line)["prediction"] for line in
                              (directory / "val_predictions.jsonl").read_text().splitlines()]
    result = json.loads((scratch / "out1" / task / "seed-1/result.json").read_text())
    same = sum(a == b for a, b in zip(predictions[1], predictions[2], strict=True))
    return {"predictions": len(predictions[1]), "same_predictions_on_1_and_2_ranks": same,
            "train_score": result["score"], "metrics": result["metrics"],
            "baseline": result["baseline"], "best_step": result["best_step"],
            "settings": result["settings"], "model": "2 layers of 128"}


def run(*command: str) -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True,
                   stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    exit_cleanly(main)
