"""What the training table of an own task says of its labels: names, counts, form, metric.

Rows that cannot be read are skipped here: reading the table as a whole names them all at once.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from deberta_ds.base.errors import UserError
from deberta_ds.files.inputs import suffix_of
from deberta_ds.tasks.labels import (
    NO_LABEL,
    as_one,
    has_decimal_commas,
    is_ignored,
    is_missing,
    is_vector,
    label_cell,
    no_column,
    read_list,
    to_line,
)
from deberta_ds.tasks.layouts import chosen, examples_of
from deberta_ds.tasks.line import Line, hold_spaces, is_entities
from deberta_ds.tasks.metrics import PREFIXED, PREFIXES
from deberta_ds.tasks.tables import Row, convert, each_row, read_table, stamps_of, without_header
from deberta_ds.tasks.task import OwnTask, Task
from deberta_ds.tokenizer.words import is_unspaced

_MOST_LABELS = 1000


def with_labels(task: Task, own: OwnTask, path: Path) -> tuple[Task, str]:
    """Return (the task with what train says of its labels, a line that tells it)."""
    find = {"spans": _with_answers, "regression": _with_numbers, "choice": _with_choices}
    task = replace(task, stamps=stamps_of(task.files["train"]))
    task, said = find.get(own.kind, _with_names)(task, own, _rows(task, path))
    return task, f"{own.name}: {said}"


def _rows(task: Task, path: Path) -> list[Row]:
    """Return the rows of train that are not left out; UserError if none can be read."""
    train, rows, faults = task.files["train"], [], []
    columns = [*(task.label_columns or [task.columns["label"]]), *task.choices]
    kept = {"is_impossible", *columns, *task.columns.values(),
            *(task.texts if task.head in ("answer", "tags") else ())}
    for place, row in each_row(train, form=task.form):
        if isinstance(row, UserError):
            faults.append(str(row))
        elif (lost := [name for name in columns if name not in row]):
            asked = "" if lost[0] in task.choices else f" (label in {path})"
            more = without_header(task, train)
            faults.append(f"{place}: {no_column(lost[0], row, asked)}{more}")
        else:
            rows.append((place, {name: row[name] if name in kept else None for name in row}))
    if not rows:
        words = f"; if it has a word per line, {convert(Path(train))} --word 1 --tag -1" if (
            task.head == "tags" and suffix_of(train) == ".tsv") else ""
        raise UserError(faults[0] + words if faults else f"{train}: not a single row in it")
    return [(place, row) for place, row in rows if not is_ignored(task, row)]


def _each(rows: Sequence[Row], read: Callable[[str, dict[str, Any]], Any]) -> list:
    """Return what `read` finds in each row that it can; UserError where it finds nothing at all."""
    found, faults = [], []
    for place, row in rows:
        try:
            found.append(read(place, row))
        except UserError as error:
            faults.append(error)
    if faults and (not any(found) or 2 * len(faults) > len(rows)):
        raise faults[0]
    return found


def _with_answers(task: Task, own: OwnTask, rows: list[Row]) -> tuple[Task, str]:
    train = task.files["train"]
    task = replace(task, labels=("start", "end"), no_answer=True)

    def answers(place: str, row: dict[str, Any]) -> tuple[bool, bool]:
        line = to_line(task, place, row, 0)
        (example,) = examples_of(task, place, line, "train")
        is_placed = bool(own.start) or not isinstance(line["label"], str) or not example.gold
        return not example.gold, not is_placed and (
            example.sequences[0][1].count(example.gold[0]) > 1)

    found = _each(rows, answers)
    missing, repeated = (sum(part) for part in zip(*found, strict=True)) if found else (0, 0)
    if len(found) == missing:
        raise UserError(f"{train}: column {own.label!r} holds no answer in {missing} rows; there is"
                        " nothing to learn")
    metrics = own.metrics or (("f1_v2", "em_v2") if missing else ("f1", "em"))
    if missing and {"f1", "em"} & set(metrics):
        raise UserError(f"{train}: {missing} of {len(found)} questions have no answer, which f1 "
                        "and em cannot score; take f1_v2 and em_v2")
    said = f"{len(found)} questions, {missing} without an answer"
    if repeated:
        said += (f"; {repeated} answers occur more than once in their text and have no place: the "
                 "first is taken (name a column of places with start = ...)")
    return replace(task, no_answer=missing > 0, metrics=metrics), said


def _with_numbers(task: Task, own: OwnTask, rows: list[Row]) -> tuple[Task, str]:
    texts = [cell for _, row in rows if isinstance(cell := label_cell(task, row), str)]
    decimal = own.decimal or ("," if has_decimal_commas(texts) else ".")
    said = f"{own.label} is a number" + " with a decimal comma" * (decimal == ",")
    return replace(task, labels=("score",), decimal=decimal), said


def _with_choices(task: Task, own: OwnTask, rows: list[Row]) -> tuple[Task, str]:
    train = task.files["train"]
    forms: Counter[str] = Counter()
    numbers: set[int] = set()
    count = doubtful = 0
    for place, row in rows:
        line = to_line(task, place, row, 0)
        values = line[own.choices[0]] if len(own.choices) == 1 else [
            line[name] for name in own.choices]
        if not isinstance(values, list):
            named = [f"{own.choices[0]}.{key}" for key in values] if isinstance(
                values, dict) else ["answer1", "answer2"]
            raise UserError(f"{place}: column {own.choices[0]!r} must hold a list of answers; "
                            "answers in columns of their own are named one by one: choices = "
                            + json.dumps(named, ensure_ascii=False))
        count, value = max(count, len(values)), line.get("label")
        numbers |= {value} if type(value) is int and 0 <= value <= count else set()
        if found := chosen(value, values, task.first_answer):
            forms[found[1]] += 1
            doubtful += str(value) in values and values[found[0]] != str(value)
    if count < 2:
        raise UserError(f"{train}: {', '.join(own.choices)}: {count} answers to choose from; at "
                        "least two are needed to learn from")
    if own.first_answer is None and numbers and 0 not in numbers:
        shown = ", ".join(map(str, sorted(numbers)))
        raise UserError(f"{train}: the right one of {count} answers has the numbers {shown}, never "
                        "0; say in the task file whether they are counted from 1 (first_answer = 1)"
                        " or from 0 (first_answer = 0)")
    shown = ", ".join(f"{form} ({number})" for form, number in forms.items())
    said = f"{count} answers, the right one is said by {shown or 'no label'}"
    if doubtful:
        said += (f"; in {doubtful} rows the label is the text of another answer: the number or "
                 "letter counts")
    return replace(task, labels=tuple(f"choice{number}" for number in range(count))), said


def _with_names(task: Task, own: OwnTask, rows: list[Row]) -> tuple[Task, str]:
    """Labels are names: of classes, of several labels, of tags."""
    train, is_tags = task.files["train"], task.head == "tags"
    if is_tags:
        task = _with_words(task, rows)
    elif task.head == "multilabel" and not task.label_columns:
        task = _with_vectors(task, own, rows)
    is_raw = task.words == "raw"
    counts = Counter(name for names in _each(rows, lambda place, row: _names(task, row, place))
                     for name in names)
    if len(counts) > _MOST_LABELS:
        raise UserError(f"{train}: {own.label!r} has more than {_MOST_LABELS} values, so it is no "
                        "column of labels; is it a regression, or another column?")
    _check_names(task, own, counts, rows)
    labels = own.labels or task.label_columns or tuple(sorted(counts, key=lambda label: (
        is_tags and label != "O", float(label) if label.isdecimal() else float("inf"), label)))
    if is_raw and not any(map(PREFIXED.fullmatch, labels)):
        labels = ("O", *(f"{prefix}-{name}" for name in labels if name != "O" for prefix in "BI"))
    if len(labels) < (1 if own.kind == "multilabel" else 2):
        for _ in read_table(train, form=task.form):
            pass  # a row that cannot be read may be the reason
        raise UserError(f"{train}: column {own.label!r} has {len(labels)} labels; at least two are "
                        "needed to learn from")
    listed = sorted(counts) if is_raw else labels
    shown = [f"{label} ({counts[label]})" if counts else label for label in listed[:20]]
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    folded = Counter(map(str.casefold, counts))
    if twins := [label for label in counts if folded[label.casefold()] > 1]:
        more += f"; WARNING: {' and '.join(map(repr, twins[:2]))} differ by case alone"
    if is_raw:
        found = _each(rows, lambda place, row: [(row[task.texts[0]], entity)
                                                for entity in _entities(task, row, place)])
        more += _described_places(train, list(chain(*found)))
    task = replace(task, labels=labels)
    return (_with_tag_metric(task, own) if is_tags else task), (
        f"{len(listed)} {'kinds of entities' if is_raw else 'labels'}: {', '.join(shown)}{more}")


def _described_places(train: str, found: list[tuple[str, tuple[int, int, str]]]) -> str:
    """Return what is said of entities that begin or end inside words, which those of many languages
    do; UserError if another unit of counting puts nearly all begins at words.
    """
    def inside(text: str, at: int) -> bool:
        around = text[at - 1 : at + 1] if at else ""
        return len(around) == 2 and around.isalnum() and not any(map(is_unspaced, around))

    def astray(place: Callable[[str, int], int]) -> int:
        at = [(text, place(text, start)) for text, (start, *_) in found]
        return sum(inside(text, start) or not text[start : start + 1].isalnum()
                   for text, start in at)

    cut = [inside(text, start) or inside(text, end) for text, (start, end, _) in found]
    wrong = astray(lambda _, start: start)
    for unit, place in _UNITS.items():
        if wrong > 4 and wrong - astray(place) > 0.6 * wrong:
            raise UserError(
                f"{train}: {wrong} of {len(found)} entities do not begin where a word does, but do "
                f"if they count {unit}; count the characters of the text from 0 (as Python's text["
                "start:end])")
    more = f"; {sum(cut)} of {len(cut)} entities begin or end inside a word" if any(cut) else ""
    short = sum(f"{text}  "[end - 1 : end + 1].isalnum() and not f"{text}  "[end + 1].isalnum()
                for text, (_, end, _) in found)
    if len(found) > 4 and short > 0.9 * len(found):
        more += (f"; {short} of {len(found)} entities end one letter before their word does: if an "
                 "end counts its last letter in, add 1 to it")
    return more


# What offsets may count, and how such a place becomes one in characters from 0.
_UNITS: dict[str, Callable[[str, int], int]] = {
    "bytes of UTF-8": lambda text, at: len(text.encode()[:at].decode(errors="ignore")),
    "units of UTF-16": lambda text, at: len(
        text.encode("utf-16-le")[: 2 * at].decode("utf-16-le", "ignore")),
    "from 1": lambda text, at: at - 1}


def _names(task: Task, row: dict[str, Any], place: str) -> list[str]:
    """Return the names in the label of a row; none where it has none."""
    if task.words == "raw":
        return [name for *_, name in _entities(task, row, place)]
    label = to_line(task, place, row, 0).get("label", [])
    names = label if isinstance(label, list) else [label]
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{place}: label {name!r} is no name; " + (
                "tags are a list of names, or of entities [start, end, label]"
                if task.head == "tags" else "labels are text, whole numbers or true and false"
                + '; kind = "regression" learns numbers' * isinstance(name, float)))
    return names


def _entities(task: Task, row: dict[str, Any], place: str) -> list[tuple[int, int, str]]:
    return Line(task, place, to_line(task, place, row, 0), needed=False).entities()


def _check_names(task: Task, own: OwnTask, counts: Counter[str], rows: list[Row]) -> None:
    train = task.files["train"]
    alike: dict[str, str] = {}
    for label in counts:
        if (other := alike.setdefault(as_one(label), label)) != label:
            raise UserError(f"{train}: column {own.label!r} has labels that only look alike: "
                            f"{ascii(other)} and {ascii(label)}; write them in one way")
    if own.labels or task.head == "tags":
        return
    if {"true", "false"} & alike.keys() and {"0", "1"} & alike.keys():
        raise UserError(f"{train}: column {own.label!r} has true or false, and 0 or 1; write them "
                        "in one way, or name all labels with labels = [...]")
    none = [alike[name] for name in NO_LABEL if name in alike and alike.keys() != {"-1", "1"}]
    if none:
        raise UserError(f"{train}: {counts[none[0]]} rows have the label {none[0]!r}, which "
                        f'elsewhere means "no label". Leave them out with ignore_labels = '
                        f"{json.dumps([*own.ignore_labels, *none])} in the task file, or name all "
                        "labels, this one too, with labels = [...]")
    if task.head == "classify" and not all(map(str.isdecimal, alike)) and all(
            re.fullmatch(r"[-+]?\d*[.,]\d+", name) for name in counts):
        raise UserError(f"{train}: the labels are numbers, such as {next(iter(counts))}; kind = "
                        '"regression" learns those, or name them all with labels = [...]')
    if task.head != "multilabel" or own.separator:
        return
    cells = [cell for _, row in rows if isinstance(cell := read_list(label_cell(task, row)), str)]
    has_commas = any("," in cell for cell in cells)
    for mark in ";|\n":
        parts = Counter(part.strip() for label in counts for part in label.split(mark))
        is_repeated = any(mark in label for label in counts) and max(parts.values()) > 1
        if is_repeated or (not has_commas and sum(mark in cell for cell in cells) > 1):
            raise UserError(f"{train}: the labels have {mark!r} in them, as if it parted several; "
                            f"say separator = {json.dumps(mark)} in the task file, or separator = "
                            '"," if it is part of a name')


def _with_vectors(task: Task, own: OwnTask, rows: list[Row]) -> Task:
    """Return the task that knows whether its labels are written as 0 or 1 for each."""
    values = (read_list(label_cell(task, row)) for _, row in rows)
    lengths = {len(value) if is_vector(value) else 0 for value in values}
    if len(lengths) != 1 or 0 in lengths or set(own.labels) == {"0", "1"}:
        return task
    (length,) = lengths
    if len(own.labels) != length:
        names = ", ".join(['"..."'] * min(length, 3) + ["..."] * (length > 3))
        raise UserError(f"{task.files['train']}: {own.label!r} holds vectors of {length} numbers, 0"
                        f" or 1 for each label; name all {length} in their order: labels = "
                        f"[{names}] in the task file (names {len(own.labels)} now)"
                        + '; if 0 and 1 are the labels: labels = ["0", "1"]' * (length < 3))
    return replace(task, vectors=True)


def _with_words(task: Task, rows: list[Row]) -> Task:
    """Return the task that knows what its rows hold: words, or a text and its entities."""
    form: Literal["list", "text", "raw"] = "raw"
    words: Counter[str] = Counter()
    for _, row in rows:
        text = read_list(row.get(task.texts[0]))
        label = read_list(label_cell(task, row))
        if isinstance(text, list):
            form = "list"
            words.update(word for word in text if isinstance(word, str))
        elif not is_missing(label) and label != []:
            form = "raw" if is_entities(label) else "text"
            break
    texts = {str(row.get(task.texts[0])).strip() for _, row in rows if form == "text"}
    if len(texts) > 1 and isinstance(label, str) and not any(" " in text for text in texts):
        raise UserError(f"{task.files['train']}: every row has one word; a row is a sentence, with "
                        "a list of its words and one of its tags (in pandas: groupby the sentence "
                        "and agg(list))")
    return replace(task, words=form, spaces=not hold_spaces(words))


def _with_tag_metric(task: Task, own: OwnTask) -> Task:
    """Return the task with the metric of its tags: of spans if any says where one begins."""
    if "span_f1" not in (own.metrics or ("span_f1",)):
        return task
    train = task.files["train"]
    if all(label.isdigit() for label in task.labels):
        raise UserError(f"{train}: the tags are numbers, which do not say where spans begin; write "
                        "their names, or take metrics = [\"tag_accuracy\"]")
    is_prefixed = any(map(PREFIXED.fullmatch, task.labels))
    odd = [label for label in task.labels if label != "O" and (
        (label[1:2] == "-" and label[0] not in PREFIXES) or re.search(r"[,;|/+][BI]-", label)
        or (is_prefixed and not PREFIXED.fullmatch(label) and label not in PREFIXES))]
    turned = {label: match[1] or match[2] for label in task.labels
              if (match := re.fullmatch(r"([BI])_.+|.+[-_]([BI])", label))}
    if odd or {"B", "I"} <= {*turned.values()}:
        raise UserError(f"{train}: the tag {[*odd, *turned][0]!r} is not of IOB, IOBES, BILOU or "
                        "BMES (O, B-PER, I-PER, ...), which span_f1 counts spans of; rename it, or "
                        'take metrics = ["tag_accuracy"]')
    has_spans = any(map(PREFIXED.fullmatch, task.labels)) or {"B", "I"} <= set(task.labels)
    return task if own.metrics or has_spans else replace(task, metrics=("tag_accuracy",))
