"""Remedies that messages name, followed to the letter: the command works, or says something else.

Not here, as no input of a test provokes them: disks that are full or fail, networks, launchers,
memory, GPUs, downloads that stopped, files that change while they are read, other versions of
libraries. Those of checkpoints, signals and several ranks are followed by the tests of these.
"""

import json

import pytest

from deberta_ds.base.errors import UserError
from deberta_ds.config.toml_files import as_toml
from deberta_ds.tasks.own import load_own_task
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.settings import resolve

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
    ("a.jsonl", texts("good", "-", "bad"), TEXT, "labels = [...]", {"labels": ["good", "-", "bad"]}),
    ("a.jsonl", texts(0.25, 0.5, 0.75), TEXT, 'kind = "regression"', {"kind": "regression"}),
    ("a.jsonl", texts("good", "good"), TEXT, "at least two", texts("good", "bad")),
    ("a.jsonl", texts("caf\u00e9", "cafe\u0301", "bad"), TEXT, "only look alike",
     texts("caf\u00e9", "bad")),
    ("a.jsonl", texts(["a", "b"], ["a"], ["b", "a"]), TEXT, 'kind = "multilabel"', {"kind": "multilabel"}),
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
