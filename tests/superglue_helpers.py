"""Shared by the SuperGLUE tests: the sample data, the real data where it is, a tiny tokenizer."""

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import sentencepiece
import torch

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.finetuning.features import collate, encode
from deberta_ds.finetuning.heads import TaskModel
from deberta_ds.finetuning.models import Start, build_model, save_finetuned, tokenizer_files
from deberta_ds.finetuning.predict_file import predict_file
from deberta_ds.model.backbone import init_parameters
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import task_named
from deberta_ds.tokenizer import Tokenizer

SAMPLE = Path(__file__).parent / "fixtures" / "superglue"
ALL_TASKS = ("BoolQ", "CB", "COPA", "MultiRC", "ReCoRD", "RTE", "WiC", "WSC")
SHARED = Path(os.environ.get("DEBERTA_DS_SHARED", "../shared/data"))
REAL, FEW = SHARED / "superglue", SHARED / "fewglue"
V1 = {"position_buckets": 0, "share_position_projections": False, "relative_norm": False,
      "key_bias": False}
SHAPES = {"v3": {}, "v2 convolution": {"conv_kernel": 3}, "v1": V1,
          "absolute": {"relative_attention": False, "position_terms": (), "absolute_input": True,
                       "relative_norm": False, "share_position_projections": False,
                       "position_buckets": 0},
          "bert": {"relative_attention": False, "absolute_input": True},
          "a row a distance": {"position_buckets": 128}}  # of 64: more than transformers can read
needs_real = pytest.mark.skipif(
    not REAL.is_dir(), reason=f"the official SuperGLUE files are not at {REAL}")


def sample(name: str, split: str = "train"):
    return read_split(task_named(name), SAMPLE, split, any_size=True)


@functools.cache
def tokenizer_path() -> str:
    directory = Path(tempfile.mkdtemp(prefix="deberta_ds_superglue_"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    lines = [file.read_text("utf-8") for file in sorted(SAMPLE.glob("*/*.jsonl"))]
    text = directory / "text.txt"
    text.write_text("\n".join(_texts("\n".join(lines))), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(directory / "spm"), vocab_size=700, minloglevel=2,
        model_type="unigram", pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
        bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", byte_fallback=True,
        num_threads=1, hard_vocab_limit=False)
    return str(directory / "spm.model")


def _texts(lines: str) -> list[str]:
    found: list[str] = []

    def walk(value):
        if isinstance(value, str):
            found.append(value.replace("\n", " "))
        elif isinstance(value, dict):
            [walk(part) for part in value.values()]
        elif isinstance(value, list):
            [walk(part) for part in value]

    for line in lines.split("\n"):
        if line:
            walk(json.loads(line))
    return found


@functools.cache
def tiny_start(shape: str = "v3") -> Start:
    tokenizer = Tokenizer(tokenizer_path())
    config = ModelConfig(**{
        "vocab_size": tokenizer.size, "hidden_size": 32, "num_layers": 2, "num_heads": 2,
        "intermediate_size": 64, "position_buckets": 16, "max_position": 64} | SHAPES[shape])
    return Start("random:tiny", config, tokenizer, None)


def save_random(directory, task, start=None, std: float = 0.0) -> TaskModel:
    """Return a new model of `task`, which is saved in `directory`; std: of all its matrices."""
    start = start or tiny_start()
    model = build_model(task, start, Settings(), 1).eval()
    if std:
        init_parameters(model, std, 3)
    save_finetuned(directory, task, Settings(), start, dict(model.state_dict()),
                   tokenizer_files(start.tokenizer, 256))
    return model


def predict(saved, table, out, **options) -> list[dict]:
    """Return the lines that are predicted of a table, and written to `out`."""
    options = {"global_batch_size": 8, "max_length": 64} | options
    count = predict_file(saved, table, out, torch.device("cpu"), **options)
    lines = read_lines(out)
    assert count == len(lines)
    return lines


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def jsonl(rows) -> str:
    """Return rows as JSON lines; text stands for a line that is none."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write_lines(path, rows) -> None:
    path.write_text(jsonl(rows))


def saved_model(directory, name, shape="v3"):
    """Return (examples, features, scores) of a random model that was saved in `directory`."""
    start, task = tiny_start(shape), task_named(name)
    model = save_random(directory, task, start, 0.2)
    examples = sample(name).examples[:6]
    # Rows beyond the 64 distances of the relative table, too; not beyond 64 absolute positions.
    length = 64 if start.config.absolute_input else 128
    features = encode(task, examples, start.tokenizer, max_length=length, window_overlap=16)
    with torch.no_grad():
        return examples, features, model(collate(features)).scores
