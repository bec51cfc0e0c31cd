"""Broken inputs and broken disks: each command ends with one line that names the file."""

import json
from dataclasses import replace

import pytest
from small_disk import small_disk

from deberta_ds.checkpoint.find import step_of
from tools.fuzz.cases import CLASSES
from tools.fuzz.commands import ROOT, Command
from tools.fuzz.judge import try_case
from tools.fuzz.readers import finetune, own_task, pretrain
from tools.fuzz.setting import prepare
from tools.fuzz.toml_text import toml

PREPARE = ("--tokenizer", "spm.model", "--workers", "1")
WRITERS = {  # every command that writes: what it writes first
    "pretrain": (pretrain("--out_dir=new"), "new/"),
    "export": (Command("launch/export.py", ("--run", "out", "--out", "new")),
               "model.safetensors"),
    "convert to microsoft": (Command("launch/convert.py",
                                     ("--model", "hf", "--out", "new", "--to", "ms")),
                             "pytorch_model.bin"),
    "finetune": (Command("launch/finetune.py", (
        "--task", "CB", "--model", "hf", "--data", "superglue", "--any_size", "--out", "new",
        "--all.epochs=1", "--all.max_length=64")), "/spm.model: "),
    "report": (Command("launch/report.py", ("--run", "out", "--out", "new")), "new"),
    "train tokenizer": (Command("data_prep/train_tokenizer.py", (
        "train.jsonl", "--vocab_size", "400", "--out", "new")), ".tsv"),
    "tokenize": (Command("data_prep/tokenize_corpus.py", ("train.jsonl", "--out", "new", *PREPARE)),
                 "new/.job.json"),
    "pack": (Command("data_prep/pack.py", ("train", "--seq_len", "32", *PREPARE)), "train/rows-32"),
    "dedup": (Command("data_prep/dedup.py", ("train.jsonl", "--out", "new", "--workers", "1")),
              "new/.job.json"),
}


@pytest.fixture(scope="module")
def setting(server, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs") / "whole", server)


@pytest.fixture
def place(setting, tmp_path):
    """A directory with whole inputs, to run in and to break."""
    return setting.copy(tmp_path / "here")


@pytest.mark.parametrize("name", CLASSES)
def test_no_broken_input_is_met_by_a_traceback_a_hang_or_silence(server, setting, tmp_path, name):
    """One of each of what CI tries at night by `python -m tools.fuzz`, whose help says what."""
    result = try_case(name, 1, setting, server, tmp_path / "case")
    assert not result.violation, result


def one_line(outcome) -> str:
    """Return the message of a command that ended as it should for a user's error."""
    assert outcome.code == 2 and not outcome.hung, outcome
    assert "Traceback" not in outcome.errors, outcome.errors[-3000:]
    lines = [line for line in outcome.errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, outcome.errors
    return lines[0]


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_line_that_names_the_file(server, place, name):
    command, written = WRITERS[name]
    limit = 100_000 if name == "finetune" else 50  # what it encodes in memory is a file, too
    message = one_line(server.run(limited(command, place, limit)))
    assert "File too large" in message and written in message, message


def test_encoded_data_that_find_no_room_are_named(server, place):
    message = one_line(server.run(limited(WRITERS["finetune"][0], place, 50)))
    assert "superglue/CB/train.jsonl, encoded in memory: File too large" in message, message


@pytest.mark.parametrize("name", WRITERS)
def test_a_read_only_target_is_one_line_that_names_it(server, place, name):
    command, _ = WRITERS[name]
    for directory in (place, place / "train"):
        directory.chmod(0o555)
    try:
        message = one_line(server.run(limited(command, place, None)))
    finally:
        for directory in (place, place / "train"):
            directory.chmod(0o755)
    assert "Permission denied" in message and ("new" in message or "train" in message), message


OWN = {"name": "tickets", "kind": "classification", "texts": ["text"], "label": "queue",
       "train": "t.csv", "settings": {"epochs": 1}}
BOTH, HEADER = "text,queue\na b,x\nc d,y\n", "text,queue\n"
NO_LABEL = 'text,queue\na b,""\nc d,""\n'
OUTSIDE = '{"text": ["a", "b"], "queue": ["O", "O"]}\n' * 3
INSIDE = '{"text": ["a", "b"], "queue": ["O", "B-x"]}\n' * 3
WITHOUT_TARGETS = {  # what is wrong: (values of the task file, its tables, words of the error)
    "no row to train on": ({}, {"t.csv": HEADER}, "t.csv: not a single row in it"),
    "no number to train on": ({"kind": "regression"}, {"t.csv": HEADER},
                              "t.csv: not a single row in it"),
    "no row to evaluate on": ({"val": "v.csv"}, {"t.csv": BOTH, "v.csv": HEADER},
                              "v.csv: not a single example"),
    "one text, so none is left": ({}, {"t.csv": "text,queue\na b,x\na b,y\n"},
                                  "too few different texts"),
    "one class": ({}, {"t.csv": "text,queue\na b,x\nc d,x\n"}, "has 1 labels"),
    "no label to evaluate on": ({"val": "v.csv"}, {"t.csv": BOTH, "v.csv": "text,queue\na b,\n"},
                                'v.csv:2: field "queue" is missing'),
    "several labels, none there": (
        {"kind": "multilabel", "labels": ["x", "y"], "val": "t.csv"}, {"t.csv": NO_LABEL},
        "t.csv: not a single target in 2 rows"),
    "several labels, none in val": (
        {"kind": "multilabel", "val": "v.csv"}, {"t.csv": BOTH, "v.csv": NO_LABEL},
        "v.csv: not a single target in 2 rows"),
    "no tag to train on": (
        {"kind": "tags", "train": "t.jsonl", "val": "v.jsonl", "labels": ["O", "B-x"]},
        {"t.jsonl": OUTSIDE, "v.jsonl": INSIDE}, "t.jsonl: not a single target in 3 rows"),
    "no tag in val": ({"kind": "tags", "train": "t.jsonl", "val": "v.jsonl"},
                      {"t.jsonl": INSIDE, "v.jsonl": OUTSIDE}, "v.jsonl: not a single target"),
    "one number in val": (
        {"kind": "regression", "val": "v.csv"},
        {"t.csv": "text,queue\na b,1\nc d,2\n", "v.csv": "text,queue\na b,1\nc d,1\n"},
        "v.csv: not a single target in 2 rows: every label is 1.0"),
}


@pytest.mark.parametrize("name", WITHOUT_TARGETS)
def test_fine_tuning_without_a_single_target_is_one_line_that_says_so(server, place, name):
    values, tables, words = WITHOUT_TARGETS[name]
    (place / "tickets.toml").write_text(toml(OWN | values))
    for file, text in tables.items():
        (place / file).write_text(text)
    message = one_line(server.run(replace(own_task(), directory=str(place))))
    assert words in message, message
    assert not (place / "new/tickets/seed-1/result.json").exists()


@pytest.mark.parametrize(("task", "line"), [
    ("CB", ""),
    ("MultiRC", '{"idx": 0, "version": 1.1, "passage": {"text": "a b", "questions": []}}'),
    ("ReCoRD", '{"idx": 0, "passage": {"text": "a b", "entities": [{"start": 0, "end": 1}]}, '
               '"qas": []}')])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_of_a_benchmark_without_an_example_is_named(server, place, task, line, split):
    (place / f"superglue/{task}/{split}.jsonl").write_text(line + "\n")
    message = one_line(server.run(replace(finetune(task), directory=str(place))))
    assert f"{task}/{split}.jsonl: not a single example in it" in message


def limited(command: Command, place, file_limit_bytes: int | None) -> Command:
    return Command(command.script, command.arguments, directory=str(place),
                   file_limit_bytes=file_limit_bytes)


def test_metrics_that_cannot_be_written_save_a_checkpoint_and_stop(server, place):
    """The file has room for one record more; the checkpoint still has room."""
    limit = 400_000
    event = {"kind": "event", "step": 0, "seconds": 0.0, "event": "start", "detail": "x" * 900}
    line = json.dumps(event) + "\n"
    metrics = place / "new/metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(line * (limit // len(line)))
    arguments = ("--out_dir=new", "--train.steps=8")
    outcome = server.run(pretrain(*arguments, directory=str(place), file_limit_bytes=limit))
    message = one_line(outcome)
    assert "new/metrics.jsonl: File too large" in message and "run it again" in message
    saved = list((place / "new/checkpoints").iterdir())
    assert len(saved) == 1 and step_of(saved[0]) < 8, saved
    assert server.run(pretrain(*arguments, directory=str(place))).code == 0
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = step_of(saved[0]) + 1
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps[-1] == 8 and steps[-(8 - first + 1):] == list(range(first, 9))


def test_a_disk_that_fills_up_while_a_run_goes_on(server, place):
    """A real file system without room for the checkpoint: no half of one is left."""
    disk = place / "disk"
    with small_disk(disk, "64k"):
        message = one_line(server.run(pretrain("--out_dir=disk/run", directory=str(place))))
        assert "No space left on device" in message and "disk/run/checkpoints" in message
        assert not list((disk / "run/checkpoints").iterdir())


def test_the_autocast_json_trains_and_resumes_bit_for_bit(server, place):
    """Products in bf16, weights in fp32: losses are within 1e-3 of fp32's."""
    options = ("--deepspeed_config", str(ROOT / "ds_configs/zero1_autocast_cpu.json"),
               "--config", "run.toml", "--train.steps=6", "--objective.kind=rtd",
               "--model.num_layers=4")

    def train(out: str, *more: str) -> list:
        command = Command("launch/pretrain.py", (*options, f"--out_dir={out}", *more),
                          directory=str(place))
        assert server.run(command).code == 0
        lines = (place / out / "metrics.jsonl").read_text().splitlines()
        return [(r["loss"], r["grad_norm"]) for r in map(json.loads, lines) if r["kind"] == "train"]

    unbroken = train("unbroken")
    train("broken", "--train.stop_after=3")
    assert train("broken") == unbroken and len(unbroken) == 6
    exact = train("exact", "--deepspeed_config", "ds.json")
    for (loss, norm), (exact_loss, exact_norm) in zip(unbroken, exact, strict=True):
        assert loss == pytest.approx(exact_loss, rel=1e-3) and loss != exact_loss
        assert norm == pytest.approx(exact_norm, rel=1e-2)
