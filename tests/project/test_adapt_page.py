"""The commands of docs/how-to/adapt-a-public-model.md run as written, at tiny size."""

import dataclasses
import json
import re

import pytest
import rank_helpers
from data_helpers import random_documents, run_main, tokenizer_path, write_json_lines
from export_cases import BASE, random_state, run_config
from launching import ROOT
from transformers import AutoModel, AutoTokenizer

from deberta_ds.base.files import read_file
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.objectives.build import build_model
from deberta_ds.publish.convert import write_microsoft
from deberta_ds.release.model_files import release_of_state

# The model reaches 64 tokens, not 512.
SMALLER = {"2048": "256", "1024": "128", "512": "64", "0.01": "0.2", "32000": "400",
           "--learn 1000": "--learn 10", "zero1_bf16": "zero1_fp32"}
TRAIN = {"optim.warmup_steps": 1, "train.steps": 3, "train.global_batch_size": 4,
         "train.micro_batch_size": 2, "train.eval_every": 3, "train.save_every": 3,
         "train.eval_sequences": 4, "train.log_every": 1, "data.workers": 0}


def public_files(directory) -> None:
    """Write a model of the layers of deberta-v3-xsmall in the layout of its public files."""
    run = run_config("v3", embedding_sharing="gdes", generator_layers=6)
    run = dataclasses.replace(run, model=ModelConfig(**BASE | {
        "num_layers": 12, "hidden_size": 16, "intermediate_size": 32, "position_buckets": 32}))
    release = release_of_state(random_state(build_model(run)), run)
    release.tokenizer_files = {"spm.model": read_file(tokenizer_path())}
    write_microsoft(release, directory)
    (directory / "model_config.json").rename(directory / "config.json")


def smaller(text: str, root) -> str:
    """Return commands or a run file with paths under `root` and sizes for the tiny model."""
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return re.sub(r"\b(?=(?:models|text|corpus|tokenizers|runs)/|my-deberta)", f"{root}/",
                  text.replace("launch/runs/adapt/", "files/"))


@pytest.mark.slow
@pytest.mark.multi
def test_every_command_of_the_page_runs(tmp_path):
    public_files(tmp_path / "models/deberta-v3-xsmall")
    (tmp_path / "text").mkdir()
    (tmp_path / "corpus").mkdir()
    for seed, name in enumerate(("domain", "general", "language", "long")):
        longest = 60 if name == "long" else 12
        texts = random_documents(80, seed, longest)
        write_json_lines(tmp_path / f"text/{name}.jsonl", texts)
    (tmp_path / "files").mkdir()
    for file in (ROOT / "launch/runs/adapt").glob("*.toml"):
        text = smaller(file.read_text(), tmp_path)
        text = re.sub(r"freeze_steps = \d+", "freeze_steps = 1", text)
        (tmp_path / f"files/{file.name}").write_text(re.sub('preset = "[^"]*"', "", text))
    page = (ROOT / "docs/how-to/adapt-a-public-model.md").read_text()
    commands = re.findall(r"^python (\S+) (.+)$", page, re.MULTILINE)
    trained = []
    for number, (script, rest) in enumerate(commands):
        words = smaller(rest, tmp_path).split()
        if script != "launch/pretrain.py":
            run_main(script, *words)
            continue
        words[1] = str(tmp_path / words[1])
        log = rank_helpers.run(1, words + [f"--{key}={value}" for key, value in TRAIN.items()],
                               tmp_path / f"log{number}", ROOT / script)
        name = words[1].rsplit("/", 1)[1].removesuffix(".toml")
        trained.append(name)
        records = [json.loads(line)
                   for line in (tmp_path / f"runs/{name}/metrics.jsonl").open()]
        assert [one["step"] for one in records if one["kind"] == "train"] == [1, 2, 3]
        assert ("has other tokens" in log) == (name in ("domain_words", "language")), name
        assert ("relative table:" in log) == (name == "long")
        if name.startswith("domain"):
            last = next(one for one in records if one["kind"] == "eval")
            assert any(key.endswith("/general") for key in last), last
    assert sorted(trained) == sorted(
        file.stem for file in (ROOT / "launch/runs/adapt").glob("*.toml"))
    AutoModel.from_pretrained(tmp_path / "my-deberta")
    AutoTokenizer.from_pretrained(tmp_path / "my-deberta")
