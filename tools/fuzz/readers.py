"""The commands that read each kind of input; on whole inputs (setting.py) each of them succeeds."""

from tools.fuzz.case import BRIEF
from tools.fuzz.commands import Command

_SPM = ("--tokenizer", "spm.model")
_STEP = "out/checkpoints/step-00000002"
_SMALL = ("--any_size", "--all.epochs=1", "--all.max_length=64", "--all.window_overlap=16",
          "--all.train_rows=4")
SUITE_TASKS = ("CB", "COPA", "RTE", "MultiRC")  # of the small sweep
_LEFT_OUT = ("BoolQ", "WiC", "WSC", "ReCoRD")


def pretrain(*arguments: str, **more) -> Command:
    """The command that trains the small run."""
    return Command("launch/pretrain.py", ("--config", "run.toml", "--deepspeed_config", "ds.json",
                                          *arguments), **more)


def finetune(name: str, *more: str, out: str = "new") -> Command:
    """The command that fine-tunes one task on a few rows."""
    return Command("launch/finetune.py", ("--task", name, "--model", "hf", "--data", "superglue",
                                          "--out", out, *_SMALL, *more))


def sweep(out: str) -> Command:
    """The command that fine-tunes several tasks."""
    return Command("launch/superglue.py", (
        "--tasks", *SUITE_TASKS, "--model", "hf", "--data", "superglue", "--out", out,
        "--save_models", *_SMALL))


def own_task(*more: str) -> Command:
    """The command that fine-tunes a task of the user's own."""
    return Command("launch/finetune.py", ("--task", "tickets.toml", "--model", "hf", "--out", "new",
                                          "--all.max_length=32", *more))


def convert(model: str, to: str, out: str = "new") -> Command:
    return Command("launch/convert.py", ("--model", model, "--out", out, "--to", to))


def cached(*more: str) -> tuple[str, ...]:
    """Options that make the small run one on stored replacements."""
    return ("--objective.kind=rtd_cached", "--data.sources=[{path = 'train', replaced = "
            "'replaced'}]", "--data.heldout_replaced=replaced_heldout", *more)


def _submit(*what: str) -> Command:
    return Command("launch/submit.py", ("--data", "superglue", "--any_size", *what, "--leave_out",
                                        *_LEFT_OUT))


READERS: dict[str, list[Command]] = {
    "shards": [
        pretrain("--out_dir=new", *BRIEF),
        pretrain("--out_dir=new", "--data.verify=full", *BRIEF),
        Command("data_prep/verify.py", ("train", "heldout", *_SPM)),
        Command("data_prep/stats.py", ("train", "heldout", *_SPM)),
        Command("data_prep/show.py", ("train", "--seq_len", "64", "--rows", "50", *_SPM)),
        Command("data_prep/pack.py", ("train", "heldout", "--seq_len", "32", "--workers", "1",
                                      *_SPM)),
        Command("data_prep/tokenize_corpus.py", ("train.jsonl", "--out", "train", "--workers", "1",
                                                 *_SPM)),
        Command("data_prep/pack.py", ("train", "--seq_len", "64", "--workers", "1", *_SPM)),
        Command("data_prep/mixture.py", ("train", "heldout", "--seq_len", "64")),
        Command("data_prep/find.py", ("train", "--seq_len", "64", "--row", "0", "3")),
        Command("data_prep/find.py", ("train", "--seq_len", "64", "--document",
                                      "train.jsonl@0")),
        Command("data_prep/take_down.py", ("train", "--out", "new", "--workers", "1",
                                           "--documents_from", "ids.txt", *_SPM)),
        Command("data_prep/upload.py", ("train", "--to", "file://new")),
        Command("launch/evaluate.py", ("--run", "out"))],
    "remote": [
        pretrain("--out_dir=new", "--data.sources=[{path = 'file://store'}]", "--data.cache=cache",
                 *BRIEF),
        Command("data_prep/upload.py", ("train", "--to", "file://store"))],
    "filters": [
        Command("data_prep/filter.py", ("heldout.jsonl", "--filters", "filters.toml", "--out",
                                        "new", "--workers", "1")),
        Command("data_prep/tokenize_corpus.py", ("heldout.jsonl", "--filters", "filters.toml",
                                                 "--out", "new", "--workers", "1", *_SPM))],
    "against": [
        Command("data_prep/decontaminate.py", ("train.jsonl", "--against", "superglue/CB",
                                               "pairs.jsonl", "--out", "new", "--workers", "1"))],
    "plan": [
        Command("launch/plan.py", ("--config", "run.toml", "--deepspeed_config", "ds.json",
                                   "--devices", "h200"))],
    "replaced": [
        pretrain("--out_dir=new", *cached(*BRIEF, "--init.generator=hf")),
        Command("data_prep/replace.py", ("train", "--generator", "hf", "--out", "replaced",
                                         "--seq_len", "64", "--workers", "1"))],
    "findings": [
        Command("data_prep/tokenize_corpus.py", ("train.jsonl", "--out", "new", "--workers", "1",
                                                 "--leave_out", "found", *_SPM)),
        Command("data_prep/dedup.py", ("train.jsonl", "--out", "found", "--workers", "1"))],
    "pairs": [
        Command("launch/minimal_pairs.py", ("--model", "hf", "--data", "pairs.jsonl", "--out",
                                            "new")),
        pretrain("--out_dir=new", "--evaluate.minimal_pairs=pairs.jsonl", *BRIEF)],
    "checkpoint": [
        pretrain("--train.steps=3"),
        pretrain("--train.steps=3", f"--resume={_STEP}", "--out_dir=new"),
        Command("launch/evaluate.py", ("--run", "out")),
        Command("launch/export.py", ("--run", "out", "--out", "new")),
        convert("out", "ours"),
        pretrain("--out_dir=new", "--init.from=out", *BRIEF)],
    "model": [
        convert("hf", "ms"), convert("hf", "hf"), convert("hf", "ours"),
        Command("launch/fill_mask.py", ("--model", "hf", "the [MASK] of")),
        Command("launch/attention_map.py", ("--model", "hf", "a b", "--out", "new.html")),
        pretrain("--out_dir=new", "--init.from=hf", *BRIEF), finetune("CB")],
    "microsoft": [
        convert("ms", "hf"), convert("ms", "ours"), convert("ms", "ms"),
        Command("launch/fill_mask.py", ("--model", "ms", "the [MASK] of"))],
    "official": [convert("official", "hf"), convert("official", "ours")],
    "ours": [convert("ours", "hf"), convert("ours", "ms")],
    "task": [finetune("CB")],
    "own_task": [own_task()],
    "results": [
        Command("launch/report.py", ("--superglue", "sweep", "--out", "new.html")),
        sweep("sweep"),
        Command("launch/superglue.py", (
            "--tasks", "CB", "--model", "hf", "--data", "superglue", "--out", "new",
            "--compare", "sweep", *_SMALL)),
        _submit("--run", "sweep", "--zip", "new.zip")],
    "submission": [
        _submit("--run", "sweep", "--zip", "new.zip"), _submit("--check", "whole.zip")],
    "finetuned": [
        Command("launch/predict.py", ("--model", "sweep/CB/seed-1", "--data",
                                      "superglue/CB/test.jsonl", "--out", "new.jsonl")),
        finetune("CB", "--init_from", "sweep/CB/seed-1"),
        convert("sweep/CB/seed-1/model", "hf")],
    "predicted": [
        Command("launch/predict.py", ("--model", "tuned/tickets/seed-1", "--data", "tickets.csv",
                                      "--out", "new.jsonl", "--keep", "text"))],
    "page": [
        Command("launch/report.py", ("--run", "out", "--out", "new.html")),
        Command("launch/report.py", ("--run", "out", "out", "--out", "new.html")),
        pretrain("--train.steps=3")],
}
