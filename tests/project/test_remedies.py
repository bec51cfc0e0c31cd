"""Remedies that messages name, followed to the letter: the command works, or says something else.

Not here, as no input of a test provokes them: disks that are full or fail, networks, launchers,
memory, GPUs, downloads that stopped, files that change while they are read, other versions of
libraries. Those of checkpoints, signals and several ranks are followed by the tests of these.
"""

import json
import re

import pytest
from data_helpers import random_documents, run_main, tokenizer_path
from launching import ROOT, make_run

from deberta_ds.base.errors import UserError
from deberta_ds.config import run_config
from deberta_ds.config.toml_files import as_override, as_toml
from deberta_ds.engine import ds_config
from deberta_ds.planner.new_run import open_devices
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.settings import resolve
from deberta_ds.tasks.task_file import load_own_task
from deberta_ds.training.start import check_run

MOODS = "fine,good\nawful,bad\n"
TEXT = {"kind": "classification", "texts": ["text"], "label": "label"}
NAMES = {"kind": "tags", "texts": ["tokens"], "label": "tags"}
SPANS = {"kind": "spans", "texts": ["question", "context"], "label": "answer"}
CHOICE = {"kind": "choice", "texts": ["q"], "choices": ["a", "b"], "label": "label"}


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(*labels, **more) -> str:
    return lines(*({"text": f"text {n}", "label": label} | more for n, label in enumerate(labels)))


# name of the table, what it holds, the task file, a part of the message, what it says to do: keys
# of the task file (None: leave it out), or another table
TABLES = [
    ("a.csv", "a b,good\nc,bad\n", TEXT, "names = [...]", {"names": ["text", "label"]}),
    ("a.csv", "a b,good\nc,bad\n", TEXT, "header = false",
     {"header": False, "texts": ["1"], "label": "2"}),
    ("a.csv", "text;a,b,c,label\nx;good\ny;bad\n", TEXT, "delimiter = \";\"",
     {"delimiter": ";", "label": "a,b,c,label"}),
    ("a.csv", "text,label\n" + "fine, really,good\nawful,bad\n", TEXT, "quot",
     'text,label\n"fine, really",good\nawful,bad\n'),
    ("a.jsonl", texts("good", "-", "bad"), TEXT, 'ignore_labels = ["-"]', {"ignore_labels": ["-"]}),
    ("a.jsonl", texts("good", "-", "bad"), TEXT, "labels = [...]", {"labels": ["good", "-",
     "bad"]}),
    ("a.jsonl", texts(0.25, 0.5, 0.75), TEXT, 'kind = "regression"', {"kind": "regression"}),
    ("a.jsonl", texts("good", "good"), TEXT, "at least two", texts("good", "bad")),
    ("a.jsonl", texts("caf\u00e9", "cafe\u0301", "bad"), TEXT, "only look alike",
     texts("caf\u00e9", "bad")),
    ("a.jsonl", texts(["a", "b"], ["a"], ["b", "a"]), TEXT, 'kind = "multilabel"',
     {"kind": "multilabel"}),
    ("a.jsonl", texts("a;b", "a", "b;a"), TEXT | {"kind": "multilabel"}, 'separator = ";"',
     {"separator": ";"}),
    ("a.jsonl", texts([0, 1, 0], [1, 0, 1]), TEXT | {"kind": "multilabel"}, "labels = [",
     {"labels": ["x", "y", "z"]}),
    ("a.jsonl", lines({"text": "x", "a": 1, "b": 2}), TEXT | {"kind": "multilabel",
     "label": ["a", "b"]}, "must be 0 or 1", lines({"text": "x", "a": 1, "b": 0})),
    ("a.jsonl", texts("good", "bad"), TEXT | {"label": "mood"}, "label", {"label": "label"}),
    ("a.jsonl", texts("good", "bad"), TEXT | {"texts": ["body"]}, "text", {"texts": ["text"]}),
    ("a.jsonl", texts("good", "bad"), TEXT | {"train": "b.jsonl"}, "relative to the task file",
     {"train": "a.jsonl"}),
    ("a.xlsx", "PK", TEXT, "export it as CSV", ("a.csv", "text,label\na,x\nb,y\n")),
    ("a.csv", "PK\3\4" + "x" * 99, TEXT, "as CSV", "text,label\na,x\nb,y\n"),
    ("a.txt", "x", TEXT, "ending must be one of .csv", ("a.csv", "text,label\na,x\nb,y\n")),
    ("a.jsonl", "[1]\n", TEXT, "write one object a line", texts("a", "b")),
    ("a.jsonl", texts("a", "b").replace("\n", ",\n"), TEXT, "without a comma behind it",
     texts("a", "b")),
    ("a.jsonl", '{"text": "x", "label": "a", "label": "b"}\n', TEXT, "name each key once",
     texts("a", "b")),
    ("a.jsonl", '{"text": NaN, "label": "a"}\n', TEXT, "write null",
     '{"text": null, "label": "a"}\n'),
    ("a.jsonl", "", TEXT, "not a single row", texts("a", "b")),
    ("a.csv", b"text,label\ncaf\xe9,a\nb,c\n", TEXT, "cp1252", {"encoding": "cp1252"}),
    ("a.csv", "text,text,label\na,b,c\nd,e,f\n", TEXT, "rename the others",
     "text,text2,label\na,b,c\nd,e,f\n"),
    ("a.jsonl", texts("a", "b"), TEXT | {"metrics": ["binary_f1"]}, 'labels = ["a", "b"]',
     {"labels": ["a", "b"]}),
    ("a.jsonl", texts("a", "b", "c"), TEXT | {"metrics": ["matthews"]}, "matthews_multi",
     {"metrics": ["matthews_multi"]}),
    ("a.jsonl", texts("a", "b", "c"), TEXT | {"metrics": ["f1"]}, "macro_f1",
     {"metrics": ["macro_f1"]}),
    ("a.jsonl", texts("a", "b"), TEXT | {"metrics": ["bleu"]}, "accuracy",
     {"metrics": ["accuracy"]}),
    ("a.jsonl", texts("a", "b"), TEXT | {"kind": "classify"}, "classification",
     {"kind": "classification"}),
    ("a.jsonl", texts("a", "b"), TEXT | {"lable": "x"}, "label", {"lable": None}),
    ("a.jsonl", lines({"tokens": "a", "tags": "O"}, {"tokens": "b", "tags": "B-X"}), NAMES,
     "every row has one word", lines({"tokens": ["a", "b"], "tags": ["O", "B-X"]})),
    ("a.jsonl", lines({"tokens": ["a", "b"], "tags": [0, 1]}), NAMES, "tag_accuracy",
     {"metrics": ["tag_accuracy"]}),
    ("a.jsonl", lines({"tokens": ["a", "b"], "tags": ["O", "X-PER"]}, {"tokens": ["a", "b"],
     "tags": ["O", "B-PER"]}), NAMES, "tag_accuracy", {"metrics": ["tag_accuracy"]}),
    ("a.jsonl", lines({"tokens": ["a", "b"], "tags": ["O"]}), NAMES, "tags",
     lines({"tokens": ["a", "b"], "tags": ["O", "B-X"]})),
    ("a.jsonl", lines({"question": "?", "context": "a b", "answer": "c"}), SPANS, "answer",
     lines({"question": "?", "context": "a b c", "answer": "c"})),
    ("a.jsonl", lines({"question": "?", "context": "a b", "answer": ""}), SPANS, "no answer in",
     lines({"question": "?", "context": "a b c", "answer": "c"})),
    ("a.jsonl", lines({"question": "?", "context": "a b", "answer": ""}, {"question": "?",
     "context": "a b", "answer": "b"}), SPANS | {"metrics": ["f1"]}, "take f1_v2 and em_v2",
     {"metrics": ["f1_v2", "em_v2"]}),
    ("a.jsonl", lines({"q": "?", "a": "x", "b": "y", "label": 1}, {"q": "!", "a": "x", "b": "y",
     "label": 2}), CHOICE, "first_answer = 1", {"first_answer": 1}),
    ("a.jsonl", lines({"q": "?", "a": "x", "b": "y", "label": 1}, {"q": "!", "a": "x", "b": "y",
     "label": 1}), CHOICE, "first_answer = 0", {"first_answer": 0}),
    ("a.jsonl", lines({"q": "?", "a": "x", "b": "y", "label": 0}), CHOICE | {"choices": ["a"]},
     'choices = ["answer1", "answer2"]', {"choices": ["a", "b"]}),
    ("a.jsonl", texts("a", "b"), TEXT | {"settings": {"truncation": "second"}}, "it has one text",
     {"settings": {"truncation": "first"}}),
    ("a.jsonl", texts("a", "b"), TEXT | {"settings": {"class_weights": {"A": 2.0}}}, "a",
     {"settings": {"class_weights": {"a": 2.0}}}),
    ("a.jsonl", texts("a", "b"), TEXT | {"settings": {"epoch": 2}}, "epochs",
     {"settings": {"epochs": 2}}),
    ("a.jsonl", texts("a", "b"), TEXT | {"settings": {"best_metric": "f2"}}, "accuracy",
     {"settings": {"best_metric": "accuracy"}}),
    ("a.jsonl", texts("a", "b"), TEXT | {"name": "CB"}, "not a benchmark", {"name": "letters-1"}),
    ("a.jsonl", texts("a", "b"), TEXT | {"choices": ["x"]}, "for no other kind", {"choices": None}),
    ("a.jsonl", texts("a", "b"), TEXT | {"first_answer": 1}, "first_answer",
     {"first_answer": None}),
    ("a.jsonl", texts("a", "b"), TEXT | {"label": "text"}, "is a text, too", {"label": "label"}),
    ("a.jsonl", texts("a", "b"), TEXT | {"label": ["label", "x"]}, "leave labels out",
     {"label": "label"}),
    ("a.jsonl", texts("a", "b"), TEXT | {"val": "a.jsonl", "val_share": 0.2}, "leave one of them",
     {"val_share": None}),
    ("a.jsonl", texts("a", "b"), TEXT | {"labels": ["a", "b", "a"]}, "names a label twice",
     {"labels": ["a", "b"]}),
    ("a.jsonl", texts("a", "b"), TEXT | {"tests": {"val": "a.jsonl"}}, "letters, digits",
     {"tests": {"letters": "a.jsonl"}}),
    ("a.jsonl", texts("a", "b"), TEXT | {"tests": {"x": "b.jsonl"}, "language": "xx"},
     'kind = "spans" only', {"language": None}),
    ("a.jsonl", lines({"tokens": "a b", "tags": "O"}), NAMES | {"ignore_labels": ["O"]},
     'can only be [""]', {"ignore_labels": [""], "metrics": ["tag_accuracy"]}),
]

# overrides of a run file, a part of the message, what it says to do (None: leave it out)
RUNS = [
    ({"train.initial_batch_size": 2}, "set both, or leave both out",
     {"train.initial_batch_size": None}),
    ({"train.initial_batch_size": 2}, "set both", {"train.batch_warmup_steps": 4}),
    ({"train.initial_batch_size": 3, "train.batch_warmup_steps": 4}, "must divide",
     {"train.initial_batch_size": 2}),
    ({"train.freeze_steps": 2}, "leave freeze_steps out", {"train.freeze_steps": None}),
    ({"train.freeze_steps": 2}, "set both", {"train.freeze": ["embeddings"]}),
    ({"train.upload": "bucket"}, "such as s3://bucket/run", {"train.upload": "s3://bucket/run"}),
    ({"train.watchdog_seconds": 0.5}, "at least 1", {"train.watchdog_seconds": 1.0}),
    ({"out_dir": "s3://x/y"}, 'train.upload = "s3://x/y"',
     {"out_dir": "x", "train.upload": "s3://x/y"}),
    ({"init.moments": True}, "moments needs init.from", {"init.moments": None}),
    ({"init.layers": [0]}, "layers needs init.from", {"init.layers": None}),
    ({"init.generator": "x"}, "init.generator needs init.from", {"init.generator": None}),
    ({"init.from": "random:x", "init.embeddings_only": True, "objective.kind": "mlm"},
     "leave random: out", {"init.from": "x"}),
    ({"init.from": "x", "init.embeddings_only": True}, 'objective.kind = "mlm"',
     {"objective.kind": "mlm"}),
    ({"objective.mask.mask_share": 0.9, "objective.mask.random_share": 0.2}, "at most 1",
     {"objective.mask.random_share": 0.1}),
    ({"model.num_heads": 3}, "divisible by num_heads", {"model.num_heads": 2}),
    ({"model.conv_kernel": 2}, "must be odd, or 0", {"model.conv_kernel": 0}),
    ({"model.position_buckets": 1}, "at least 2, or 0", {"model.position_buckets": 2}),
    ({"model.preset": "tinny"}, "did you mean tiny", {"model.preset": "tiny"}),
    ({"train.stepz": 3}, "did you mean train.steps", {"train.stepz": None, "train.steps": 30}),
    ({"data.seq_len": 4096}, "above model.max_position", {"model.max_position": 4096}),
    ({"optim.warmup_steps": 99}, "more than train.steps", {"train.steps": 99}),
    ({"train.batch_warmup_steps": 99, "train.initial_batch_size": 2}, "more than train.steps",
     {"train.steps": 99}),
    ({"train.freeze": ["embeddings"], "train.freeze_steps": 99}, "leave it out to freeze all",
     {"train.freeze_steps": None}),
    ({"train.global_batch_size": 9}, "not divisible by micro_batch_size",
     {"train.micro_batch_size": 1}),
    ({"train.micro_batch_size": "8 "}, "a valid integer", {"train.micro_batch_size": 8}),
    ({"data.heldout": {"a b": "x"}}, "letters, digits", {"data.heldout": {"a_b": "x"}}),
    ({"data.heldout": {"a": ""}}, "must be a directory", {"data.heldout": {"a": "x"}}),
    ({"train.best_metric": "loss2"}, "use one of generator_loss",
     {"train.best_metric": "generator_loss"}),
    ({"evaluate.minimal_pairs": "pairs.jsonl", "data.heldout": ""},
     "leave evaluate.minimal_pairs out",
     {"evaluate.minimal_pairs": None}),
    ({"objective.kind": "rdt"}, "did you mean rtd", {"objective.kind": "rtd"}),
    ({"optim.schedule": "cosin"}, "cosine", {"optim.schedule": "cosine"}),
]


def attempt(directory, name: str, content, task: dict) -> str:
    """Return what a task file and its table are refused with, "" for nothing."""

    directory.mkdir()
    (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    values = {"name": "mine", "train": name} | task
    path = directory / "task.toml"
    path.write_text("".join(f"{key} = {as_toml(value)}\n" for key, value in values.items()
                            if value is not None))
    try:
        loaded, _ = load_own_task(path)
        read_split(loaded, ".", "train")
        resolve(loaded, {loaded.name: {}})
    except UserError as error:
        return str(error).replace(str(directory), "")
    return ""


@pytest.mark.parametrize("name, content, task, message, remedy", TABLES,
                         ids=[f"{row[3]}-{number}" for number, row in enumerate(TABLES)])
def test_a_remedy_of_a_table(tmp_path, name, content, task, message, remedy):
    said = attempt(tmp_path / "a", name, content, task)
    assert message in said, said
    if isinstance(remedy, dict):
        parts = [part for pair in remedy.items() for one in pair
                 for part in (one if isinstance(one, list) else [one])]
        assert any(str(part) in said for part in parts), said
        task = task | remedy
    else:
        name, content = remedy if isinstance(remedy, tuple) else (name, remedy)
    again = attempt(tmp_path / "b", name, content, task)
    assert not again or message not in again and again.split(": ")[-1] != said.split(": ")[-1]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


def refused(run_file, overrides: dict) -> str:
    """Return what a run file with overrides is refused with, "" for nothing."""
    words = [as_override(key, value) for key, value in overrides.items() if value is not None]
    try:
        run, _ = run_config.load(run_file, words)
        check_run(run, ds_config.load(ROOT / "ds_configs/zero1_fp32.json"), 1, "run.toml")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("overrides, message, remedy", RUNS, ids=[row[1] for row in RUNS])
def test_a_remedy_of_a_run_file(run_file, overrides, message, remedy):
    said = refused(run_file, overrides)
    assert message in said, said
    assert message not in refused(run_file, overrides | remedy)


def tried(capsys, *words) -> str:
    """Return what a command says as it ends with an error, "" if it does its work."""
    try:
        run_main(*words)
    except UserError as error:
        return str(error)
    except SystemExit as ended:
        return capsys.readouterr().err if ended.code else ""
    return ""


@pytest.mark.parametrize("inputs, options, message, remedy", [
    ("text", {}, "2 documents, as each text file is one; documents = blank_line gives 40, line 80;",
     {"documents": "blank_line"}),
    ("text", {}, "line 80; set one of them", {"documents": "line"}),
    ("text/0.txt", {"documents": "lines"}, "must be file, line", {"documents": "line"}),
    ("sheet.csv", {"text_key": "text"}, "or unpack it", {"inputs": ["good.csv"]}),
    ("good.csv", {"text_key": "body"}, "name one of text", {"text_key": "text"}),
    ("text/9.txt", {}, "no such file", {"inputs": ["text/0.txt"]}),
])
def test_a_remedy_of_a_recipe(tmp_path, monkeypatch, capsys, inputs, options, message, remedy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / f"text/{number}.txt").write_text("\n\n".join(
            f"{text}\n{text[::-1]}" for text in random_documents(20, number)))
    (tmp_path / "sheet.csv").write_text("PK\3\4" + "x" * 99)
    (tmp_path / "good.csv").write_text("text\n" + "\n".join(
        text.replace(",", "") for text in random_documents(40)))

    def build(out: str, **keys) -> str:
        keys = {"name": "web", "inputs": [inputs]} | options | keys
        recipe = tmp_path / f"{out}.toml"
        recipe.write_text(f'out = "{out}"\nheldout_share = 0.2\n[tokenizer]\npath = '
                          f'"{tokenizer_path()}"\n[[corpora]]\n' + "".join(
                              f"{key} = {as_toml(value)}\n" for key, value in keys.items()))
        return tried(capsys, "data_prep/build.py", "--recipe", recipe, "--workers", 1)

    said = build("a", heldout=True)
    assert message in said, said
    assert message not in build("b", **remedy)


@pytest.mark.parametrize("words", [
    ("launch/pretrain.py", "--config", ROOT / "launch/runs/v3_base.toml", "--deepspeed_config",
     ROOT / "ds_configs/zero0_fp32.json", "--check"),
    ("launch/pretrain.py", "--config", "run.toml", "--deepspeed_config", "ds.json"),
    ("launch/evaluate.py", "--run", "runs/base"), ("data_prep/verify.py", "corpus/web"),
    ("data_prep/tokenize_corpus.py", "a.jsonl", "--tokenizer", tokenizer_path(), "--out", "x",
     "--heldout_out", "y"),
    ("data_prep/pack.py", "corpus/web", "--tokenizer", "spm.model", "--seq_len", 128),
    ("data_prep/build.py", "--recipe", "corpus.toml"), ("launch/report.py", "--run", "runs/base"),
], ids=lambda words: words[0])
def test_a_relative_path_is_named_with_the_folder_where_it_was_looked_for(
        tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    said = tried(capsys, *words)
    assert f"(looked in {tmp_path})" in said, said


@pytest.mark.parametrize("devices, message, remedy", [
    ("12 x h100", '"2 x 4 x a100"', ("2 x 4 x a100",)), ("4", '"2 cpu"', ("2 cpu",)),
    ("mine", "--tflops (dense, of the run's precision) and --memory_gb", ("mine", 100.0, 80.0)),
    ("h200s", "one of h200", ("h200",))])
def test_a_remedy_of_devices(devices, message, remedy):
    with pytest.raises(UserError, match=re.escape(message)):
        open_devices(devices)
    assert open_devices(*remedy)
