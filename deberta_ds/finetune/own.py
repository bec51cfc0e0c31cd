"""A task of the user's own, described by a TOML file: which columns of which tables are what.

    name = "tickets"
    kind = "classification"        # or multilabel, regression, choice, tags, spans
    texts = ["title", "body"]      # columns in the order the model reads them; the first may be cut
    label = "queue"
    train = "train.csv"            # paths are relative to the TOML file
    val = "val.csv"                # or val_share = 0.1 of train

    [settings]                     # as in a settings file
    epochs = 3

It becomes a `Task`, so that everything after that is what the benchmarks' tasks use.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from deberta_ds.base.errors import UserError
from deberta_ds.config.options import STRICT, nearest, option, validate
from deberta_ds.config.toml_files import read_toml
from deberta_ds.finetune.answer_texts import LANGUAGES
from deberta_ds.finetune.layouts import chosen, examples_of
from deberta_ds.finetune.metrics import METRIC_NAMES, PREFIXES
from deberta_ds.finetune.settings import Settings
from deberta_ds.finetune.tables import (
    as_shown,
    choice_label,
    label_text,
    no_column,
    read_table,
    to_line,
)
from deberta_ds.finetune.tasks import TASK_NAMES, TEST, HeadKind, Layout, Task

Kind = Literal["classification", "multilabel", "regression", "choice", "tags", "spans"]
_MOST_LABELS = 1000
# kind: (head, layout, metrics)
_FORMS: dict[str, tuple[HeadKind, Layout, tuple[str, ...]]] = {
    "classification": ("classify", "texts", ("accuracy", "macro_f1")),
    "multilabel": ("multilabel", "texts", ("micro_f1", "macro_f1")),
    "regression": ("regress", "texts", ("pearson", "spearman")),
    "choice": ("choice", "choices", ("accuracy",)),
    "tags": ("tags", "tags", ("span_f1",)),
    "spans": ("answer", "answers", ("f1", "em")),  # f1_v2 and em_v2 if some have no answer
}
_OF_TWO = ("binary_f1", "f1a", "matthews")  # metrics of a class against another one
_METRICS = {
    "classification": ("accuracy", "macro_f1", "matthews_multi", *_OF_TWO),
    "multilabel": ("micro_f1", "macro_f1", "exact_labels"),
    "regression": ("pearson", "spearman"),
    "choice": ("accuracy",),
    "tags": ("span_f1", "tag_accuracy"),
    "spans": ("f1", "em", "f1_v2", "em_v2"),
}


@dataclass(config=STRICT, frozen=True, kw_only=True)
class OwnTask:
    """What a task file may say."""

    name: str = option("name of the task and of its directory under --out")
    kind: Kind = option("what is predicted")
    texts: tuple[str, ...] = option("columns that are read, the first may be cut", min_length=1)
    label: str = option("column of the label", "label")
    start: str = option("of spans: column of the answer's first character; empty: in the label, or "
                        "where the answer first occurs", "")
    choices: tuple[str, ...] = option("of a choice: the answers' columns, or one with a list", ())
    labels: tuple[str, ...] = option("names of the labels in order; empty: those in train", ())
    metrics: tuple[str, ...] = option("the score is their mean; empty: the usual of the kind", ())
    train: str = option("table to train on", min_length=1)
    val: str = option("table to evaluate on; empty: a share of train", "")
    val_share: float = option("share of train to evaluate on, where there is no val", 0.1,
                              gt=0, lt=1)
    test: str = option("table to predict after training, and to score if it has labels; empty: "
                       "none", "")
    tests: Mapping[str, str] = option("more such tables: {NAME = TABLE, ...}", {})
    group: str = option("column by whose values scores are shown, too; empty: none", "")
    language: str = option("of spans: by whose rule answers are compared, such as de or zh (MLQA's "
                           "rules); empty: characters in scripts without spaces, else SQuAD's", "")
    settings: Mapping[str, Any] = field(default_factory=dict)


def load_own_task(path: str | Path) -> tuple[Task, OwnTask, str]:
    """Return (task, what the file says, a line on the labels that were found).

    Raises UserError naming the file, the key and what it may be.
    """
    path = Path(path)
    values = read_toml(path, "task file", "the one in docs/finetuning.md")
    own = validate(OwnTask, values, str(path))
    _check(own, path)
    head, layout, metrics = _FORMS[own.kind]
    files = {split: os.path.normpath(path.parent.resolve() / name) for split, name in
             (("train", own.train), ("val", own.val), ("test", own.test),
              *((TEST + name, table) for name, table in own.tests.items())) if name}
    if not os.path.exists(files["train"]):
        raise UserError(f"{path}: train = {own.train!r}: {files['train']}: no such file; paths are "
                        "relative to the task file")
    task = Task(
        name=own.name, head=head, layout=layout, labels=(), texts=own.texts, choices=own.choices,
        metrics=own.metrics or metrics, files=files, language=own.language,
        columns={"label": own.label} | ({"group": own.group} if own.group else {}),
        may_be_blank=len(own.texts) > 1, val_share=own.val_share, settings=own.settings,
    )
    if own.kind == "spans":
        task, said = _with_answers(task, own, Path(files["train"]), path)
    else:
        labels, said = _labels(own, Path(files["train"]), path)
        task = replace(task, labels=labels)
        _check_positive(own, labels, path)
        _check_tags(own, labels, path)
        if len(labels) != 2 and (wrong := set(own.metrics) & set(_OF_TWO)):
            raise UserError(f"{path}: metrics: {sorted(wrong)[0]!r} is of two labels, and there "
                            f"are {len(labels)}; take macro_f1 or matthews_multi")
    return task, own, said


def _with_answers(task: Task, own: OwnTask, train: Path, path: Path) -> tuple[Task, str]:
    """Return (task that knows whether answers may be missing, a line on what train has)."""
    columns = {**task.columns, **({"start": own.start} if own.start else {})}
    task = replace(task, labels=("start", "end"), columns=columns, no_answer=True)
    count = missing = repeated = 0
    for number, (place, row) in enumerate(read_table(train)):
        _check_label(own, row, place, path)
        for example in examples_of(task, place, to_line(task, place, row, number), "train"):
            count += 1
            missing += not example.gold
            text = isinstance(row[own.label], str) and not own.start
            repeated += bool(text and example.gold) and (
                example.sequences[0][1].count(example.gold[0]) > 1)
    if count == missing:
        raise UserError(f"{train}: column {own.label!r} holds no answer in {count} rows; there is "
                        "nothing to learn")
    metrics = own.metrics or (("f1_v2", "em_v2") if missing else ("f1", "em"))
    if missing and {"f1", "em"} & set(metrics):
        raise UserError(f"{train}: {missing} of {count} questions have no answer, which f1 and em "
                        "cannot score; take f1_v2 and em_v2")
    said = f"{own.name}: {count} questions, {missing} without an answer"
    if repeated:
        said += (f"; {repeated} answers occur more than once in their text and have no place: the "
                 "first is taken (name a column of places with start = ...)")
    return replace(task, no_answer=missing > 0, metrics=metrics), said


def _check(own: OwnTask, path: Path) -> None:
    if own.name in TASK_NAMES or not _is_name(own.name):
        raise UserError(f"{path}: name = {own.name!r} must be letters, digits, - and _, and not a "
                        "benchmark's task")
    if (own.kind == "choice") != bool(own.choices):
        raise UserError(f"{path}: choices are needed for kind = \"choice\", and for no other kind")
    if own.kind == "spans" and len(own.texts) != 2:
        raise UserError(f"{path}: spans are answers in a text; texts must name two columns, the "
                        "question and the text that the answer lies in")
    for name in (*own.texts, *own.choices):
        if name in _TAKEN:
            raise UserError(f"{path}: the column {name!r} cannot be a text or an answer: a row has "
                            f"its {', '.join(_TAKEN)} under these names; rename the column")
    if own.language and (own.kind != "spans" or own.language not in LANGUAGES):
        raise UserError(f"{path}: language = {own.language!r}: is for kind = \"spans\", and one of "
                        f"{', '.join(LANGUAGES)}")
    if own.group in _TAKEN:
        raise UserError(f"{path}: group = {own.group!r}: a row has its {', '.join(_TAKEN)} under "
                        "these names; rename the column")
    taken = (own.name, "train", "val", "test")
    for name, table in own.tests.items():
        if not _is_name(name) or name in taken or not table:
            raise UserError(f"{path}: tests: {name} = {table!r}: a test table needs a name of "
                            f"letters, digits, - and _ that is none of {', '.join(taken)}, and a "
                            "file")
    if own.start and own.kind != "spans":
        raise UserError(f'{path}: start is the place of an answer, for kind = "spans" only')
    if own.kind == "tags" and len(own.texts) != 1:
        raise UserError(f"{path}: tags are of one text; texts must name the column of its words")
    for name in own.metrics:
        if name not in METRIC_NAMES:
            raise UserError(f"{path}: metrics: {name!r} is not known{nearest(name, METRIC_NAMES)}; "
                            f"there are {', '.join(METRIC_NAMES)}")
        if name not in _METRICS[own.kind]:
            raise UserError(f"{path}: metrics: {name!r} is not of kind = {own.kind!r}, which has "
                            f"{', '.join(_METRICS[own.kind])}")
    if len(set(own.labels)) < len(own.labels):
        raise UserError(f"{path}: labels names a label twice: {', '.join(own.labels)}")
    validate(Settings, dict(own.settings), f"{path}, [settings]")


def _is_name(name: str) -> bool:
    return name.replace("-", "").replace("_", "").isalnum()


_PLAIN = (("0", "1"), ("False", "True"), ("false", "true"), ("no", "yes"))
_TAKEN = ("idx", "id", "label", "start")


def _check_positive(own: OwnTask, labels: tuple[str, ...], path: Path) -> None:
    """UserError if it is not plain of which of two labels an F1 is."""
    wanted = [name for name in own.metrics if name in ("binary_f1", "f1a")]
    if wanted and not own.labels and labels not in _PLAIN:
        raise UserError(f"{path}: metrics: {wanted[0]} is the F1 of the second of two labels; say "
                        f"which it is: labels = {json.dumps(list(labels))}, or the other way "
                        "around")


def _check_tags(own: OwnTask, labels: tuple[str, ...], path: Path) -> None:
    """UserError if spans are counted and tags do not say where they begin."""
    if own.kind != "tags" or "span_f1" not in (own.metrics or ("span_f1",)):
        return
    if all(label.isdigit() for label in labels):
        raise UserError(f"{path}: the tags are numbers, which do not say where spans begin; write "
                        "their names, or take metrics = [\"tag_accuracy\"]")
    odd = [label for label in labels if label[1:2] == "-" and label[0] not in PREFIXES]
    if odd:
        raise UserError(f"{path}: the tag {odd[0]!r} is not of IOB, IOBES, BILOU or BMES, which "
                        "span_f1 counts spans of; rename it, or take tag_accuracy")


def _labels(own: OwnTask, train: Path, path: Path) -> tuple[tuple[str, ...], str]:
    """Return (label names, a line that shows them with their counts in train)."""
    if own.kind == "regression":
        return ("score",), f"{own.name}: {own.label} is a number"
    if own.kind == "choice":
        return _choices(own, train, path)
    counts: Counter[str] = Counter()
    for place, row in read_table(train):
        _check_label(own, row, place, path)
        counts.update(_names(own.kind, row[own.label], place))
        if len(counts) > _MOST_LABELS:
            raise UserError(f"{place}: {own.label!r} has more than {_MOST_LABELS} values, so it is "
                            "no column of labels; is it a regression, or another column?")
    alike: dict[str, str] = {}
    for label in counts:
        if (other := alike.setdefault(as_shown(label), label)) != label:
            raise UserError(f"{train}: column {own.label!r} has labels that only look alike: "
                            f"{ascii(other)} and {ascii(label)}; write them in one way")
    labels = own.labels or tuple(sorted(counts, key=_by_number))
    if own.kind == "tags" and not own.labels:
        labels = tuple(sorted(labels, key=lambda label: label != "O"))
    if len(labels) < (1 if own.kind == "multilabel" else 2):
        raise UserError(f"{train}: column {own.label!r} has {len(labels)} labels; at least two are "
                        "needed to learn from")
    shown = [f"{label} ({counts[label]})" if counts else label for label in labels[:20]]
    more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
    return labels, f"{own.name}: {len(labels)} labels: {', '.join(shown)}{more}"


def _check_label(own: OwnTask, row: Mapping[str, Any], place: str, path: Path) -> None:
    if own.label not in row:
        raise UserError(f"{place}: {no_column(own.label, row, f' (label in {path})')}")


def _choices(own: OwnTask, train: Path, path: Path) -> tuple[tuple[str, ...], str]:
    """Return (names of the answers, a line on what the labels of train are)."""
    forms: Counter[str] = Counter()
    count = doubtful = 0
    for place, row in read_table(train):
        _check_label(own, row, place, path)
        if lost := [name for name in own.choices if name not in row]:
            raise UserError(f"{place}: {no_column(lost[0], row)}")
        values = row[own.choices[0]] if len(own.choices) == 1 else [
            row[name] for name in own.choices]
        if not isinstance(values, list):
            raise UserError(f"{place}: column {own.choices[0]!r} must hold a list of answers; "
                            "answers in columns of their own are named one by one: choices = "
                            '["answer1", "answer2"]')
        count = count or len(values)
        value = choice_label(row.get(own.label))
        found = chosen(value, values)
        forms.update(found[1:] if found else ())
        doubtful += found is not None and str(value) in values and values[found[0]] != str(value)
    if count < 2:
        raise UserError(f"{train}: {', '.join(own.choices)}: {count} answers to choose from; at "
                        "least two are needed to learn from")
    shown = ", ".join(f"{form} ({number})" for form, number in forms.items())
    said = f"{own.name}: {count} answers, the right one is said by {shown}"
    if doubtful:
        said += (f"; in {doubtful} rows the label is the text of another answer: the number or "
                 "letter counts")
    return tuple(f"choice{number}" for number in range(count)), said


def _names(kind: str, value: Any, place: str) -> list[str]:
    """Return the label names in one cell."""
    if kind == "tags" and isinstance(value, str):
        value = value.split()
    elif kind == "multilabel" and isinstance(value, str):
        value = value.split(",") if value else []
    parts = value if isinstance(value, list) else [value]
    names = [label_text(part) for part in parts]
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{place}: label {name!r} is no name; labels are text, whole numbers "
                            "or true and false")
    return names


def _by_number(label: str) -> tuple[float, str]:
    return (float(label), "") if label.isdecimal() else (float("inf"), label)
