"""Whole inputs of every kind, small enough that a command with them takes a moment."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from data_helpers import random_documents, tokenizer_path

from tools.fuzz.commands import ROOT, Command, Server
from tools.fuzz.readers import READERS, convert, own_task, pretrain, sweep

RUN = """
name = "small"
out_dir = "out"
[model]
preset = "tiny"
vocab_size = 640
hidden_size = 16
num_layers = 2
num_heads = 2
intermediate_size = 32
[objective]
kind = "mlm"
[data]
sources = [{path = "train"}]
heldout = "heldout"
tokenizer = "spm.model"
seq_len = 64
workers = 0
[optim]
learning_rate = 1e-3
[train]
steps = 2
global_batch_size = 2
micro_batch_size = 1
log_every = 1
eval_sequences = 2
watchdog_seconds = 0
"""
OWN_TASK = """
name = "tickets"
kind = "classification"
texts = ["text", "more"]
label = "queue"
train = "tickets.csv"
val_share = 0.3
test = "tickets.csv"
group = "more"
[tests]
again = "tickets.csv"
[settings]
epochs = 1
global_batch_size = 4
"""
FILTERS = """
use = ["language", "lines", "c4", "gopher", "repetition", "personal"]
[language]
keep = ["en", "de"]
probability = 0.0
[lines]
min_words = 1
end_mark = false
phrases = ["no such phrase"]
[c4]
min_sentences = 0
[gopher]
min_words = 0
max_word_characters = 100.0
min_stop_words = 0
min_letter_word_share = 0.1
[repetition]
max_line_share = 0.9
[personal]
kinds = ["email", "phone"]
"""


@dataclass(frozen=True)
class Setting:
    """A directory in which whole inputs of every kind lie; commands run in copies of it."""

    root: Path

    def copy(self, to: Path) -> Path:
        """Copy everything to `to`, where it may be broken."""
        return shutil.copytree(self.root, to, symlinks=True)


def prepare(root: Path, server: Server) -> Setting:
    """Make the inputs under `root` with the project's own commands."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer_path(), root / "spm.model")
    (root / "run.toml").write_text(RUN)
    (root / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}, indent=1))
    for name, count, seed in (("train", 60, 0), ("heldout", 20, 9)):
        lines = [json.dumps({"text": text}) for text in random_documents(count, seed)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        tokenizer = ("--tokenizer", "spm.model", "--workers", "1")
        _run(server, root, "data_prep/tokenize_corpus.py", f"{name}.jsonl", "--out", name,
             *tokenizer)
        _run(server, root, "data_prep/pack.py", name, "--seq_len", "64", *tokenizer)
    shutil.copytree(ROOT / "tests/fixtures/superglue", root / "superglue")
    _make(server, root, pretrain())
    _run(server, root, "launch/export.py", "--run", "out", "--out", "hf")
    _prepare_more_data(root, server)
    _prepare_models(root, server)
    _prepare_tasks(root, server)
    return Setting(root)


def _prepare_more_data(root: Path, server: Server) -> None:
    _run(server, root, "data_prep/upload.py", "train", "--to", "file://store")
    (root / "filters.toml").write_text(FILTERS)
    (root / "ids.txt").write_text("train.jsonl@0\n")
    _run(server, root, "data_prep/dedup.py", "train.jsonl", "--out", "found", "--workers", "1")
    for corpus, out in (("train", "replaced"), ("heldout", "replaced_heldout")):
        _run(server, root, "data_prep/replace.py", corpus, "--generator", "hf", "--out", out,
             "--seq_len", "64", "--workers", "1")
    texts = random_documents(8, 3)
    pairs = [{"sentence_good": text[:40], "sentence_bad": text[40:80] or "x", "paradigm": "p",
              "phenomenon": "f"} for text in texts]
    (root / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs))


def _prepare_models(root: Path, server: Server) -> None:
    """Models with a generator, in microsoft's format, that of the official training, and ours."""
    _make(server, root, pretrain("--objective.kind=rtd", "--out_dir=rtd", "--model.num_layers=4"))
    _make(server, root, convert("rtd", "ms", "ms"))
    _make(server, root, convert("rtd", "ours", "ours"))
    shutil.rmtree(root / "rtd")
    for part, weights, config in (
            ("discriminator", "pytorch_model.bin", "model_config.json"),
            ("generator", "pytorch_model.generator.bin", "generator_config.json")):
        directory = root / "official" / part
        directory.mkdir(parents=True)
        shutil.copy(root / "ms" / weights, directory / "pytorch.model-000002.bin")
        shutil.copy(root / "ms" / config, directory / "model_config.json")
    shutil.copy(root / "spm.model", root / "official/discriminator/spm.model")


def _prepare_tasks(root: Path, server: Server) -> None:
    words = re.findall(r"\w+", " ".join(random_documents(6, 5)))
    rows = [f"{' '.join(words[3 * n:3 * n + 3])},{words[n]},{'ab'[n % 2]}" for n in range(20)]
    (root / "tickets.csv").write_text("text,more,queue\n" + "\n".join(rows) + "\n")
    (root / "tickets.toml").write_text(OWN_TASK)
    _make(server, root, own_task("--out", "tuned"))
    _make(server, root, sweep("sweep"))
    _make(server, root, READERS["submission"][0])
    (root / "new.zip").rename(root / "whole.zip")


def _make(server: Server, root: Path, command: Command) -> None:
    _run(server, root, command.script, *command.arguments)


def _run(server: Server, root: Path, script: str, *arguments: str) -> None:
    outcome = server.run(Command(script, arguments, directory=str(root)))
    if outcome.code:
        raise RuntimeError(f"{script} {' '.join(arguments)}\n{outcome.output}\n{outcome.errors}")
