"""Whole inputs of every kind, small enough that a command with them takes a moment."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from data_helpers import random_documents, tokenizer_path

from tests.fuzz.commands import ROOT, Command, Server

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
eval = "heldout"
tokenizer = "spm.model"
seq_len = 64
workers = 0
[optim]
lr = 1e-3
[train]
steps = 2
global_batch_rows = 2
micro_batch_rows = 1
log_every = 1
eval_rows = 2
watchdog_seconds = 0
"""


@dataclass(frozen=True)
class Setting:
    """A directory in which whole inputs of every kind lie; commands run in copies of it."""

    root: Path

    def copy(self, to: Path) -> Path:
        """Copy everything to `to`, where it may be broken."""
        return shutil.copytree(self.root, to, symlinks=True)


def pretrain(*arguments: str, **more) -> Command:
    """The command that trains the small run."""
    return Command("launch/pretrain.py", ("--config", "run.toml", "--deepspeed_config", "ds.json",
                                          *arguments), **more)


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
    command = pretrain()
    _run(server, root, command.script, *command.arguments)
    _run(server, root, "launch/export.py", "--run", "out", "--out", "hf")
    return Setting(root)


def _run(server: Server, root: Path, script: str, *arguments: str) -> None:
    outcome = server.run(Command(script, arguments, directory=str(root)))
    if outcome.code:
        raise RuntimeError(f"{script} {' '.join(arguments)}\n{outcome.output}\n{outcome.errors}")
