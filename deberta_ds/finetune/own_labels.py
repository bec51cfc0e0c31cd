"""What the training table of an own task says of its labels: names, counts, form, metric.

Rows that cannot be read are passed by here: reading the table as a whole names them all at once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.tables import suffix_of
from deberta_ds.finetune.annotations import BAD_ENTITIES, entities_of, hold_spaces, is_entities
from deberta_ds.finetune.column_files import PREFIXED
from deberta_ds.finetune.labels import (
    NO_LABEL,
    has_decimal_commas,
    is_ignored,
    is_missing,
    is_sentence,
    is_vector,
    label_cell,
    read_list,
)
from deberta_ds.finetune.layouts import chosen, examples_of
from deberta_ds.finetune.tables import (
    Row,
    as_shown,
    choice_label,
    each_row,
    no_column,
    read_table,
    to_line,
)
from deberta_ds.finetune.tasks import Task

_MOST_LABELS = 1000
_PREFIXES = "BIESLUM"


def with_labels(task: Task, own: Any, path: Path) -> tuple[Task, str]:
    """Return (the task with what train says of its labels, a line that tells it)."""
    find = {"spans": _with_answers, "regression": _with_numbers, "choice": _with_choices}
    return find.get(own.kind, _with_names)(task, own, path)


def _rows(task: Task, path: Path) -> Iterator[Row]:
    """Yield the rows of train that are not left out; UserError if there is none."""
    fault, is_empty = None, True
    columns = [*(task.label_columns or [task.columns["label"]]), *task.choices]
    for place, row in each_row(task.files["train"], form=task.form):
        if isinstance(row, UserError):
            fault = fault or row
        elif not is_sentence(task, row) and (lost := [name for name in columns if name not in row]):
            asked = "" if lost[0] in task.choices else f" (label in {path})"
            fault = fault or UserError(f"{place}: {no_column(lost[0], row, asked)}")
        else:
            is_empty = False
            if not is_ignored(task, row):
                yield place, row
    if is_empty and not fault:
        raise UserError(f"{task.files['train']}: not a single row in it")
    if is_empty:
        words = "; if it has a word per line, name its columns in the task file, counted from 1 " \
            "or from the end: columns = {word = 1, tag = -1}" if task.head == "tags" and (
                suffix_of(task.files["train"]) in (".tsv", ".csv")) else ""
        raise UserError(f"{fault}{words}")


def _with_answers(task: Task, own: Any, path: Path) -> tuple[Task, str]:
    train = task.files["train"]
    task = replace(task, labels=("start", "end"), no_answer=True)
    count = missing = repeated = 0
    fault = None
    for number, (place, row) in enumerate(_rows(task, path)):
        try:
            line = to_line(task, place, row, number)
            (example,) = examples_of(task, place, line, "train")
        except UserError as error:
            fault = fault or error
            continue
        count += 1
        missing += not example.gold
        repeated += bool(isinstance(line["label"], str) and not own.start and example.gold) and (
            example.sequences[0][1].count(example.gold[0]) > 1)
    if fault and not count:
        raise fault
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


def _with_numbers(task: Task, own: Any, path: Path) -> tuple[Task, str]:
    cells = [label_cell(task, row) for _, row in _rows(task, path)]
    texts = [cell for cell in cells if isinstance(cell, str)]
    decimal = own.decimal or ("," if has_decimal_commas(texts) else ".")
    said = f"{own.name}: {own.label} is a number" + " with a decimal comma" * (decimal == ",")
    return replace(task, labels=("score",), decimal=decimal), said


def _with_choices(task: Task, own: Any, path: Path) -> tuple[Task, str]:
    train = task.files["train"]
    forms: Counter[str] = Counter()
    numbers: set[int] = set()
    count = doubtful = 0
    for place, row in _rows(task, path):
        values = read_list(row[own.choices[0]]) if len(own.choices) == 1 else [
            row[name] for name in own.choices]
        if not isinstance(values, list):
            raise UserError(f"{place}: column {own.choices[0]!r} must hold a list of answers; "
                            "answers in columns of their own are named one by one: choices = "
                            '["answer1", "answer2"]')
        count = count or len(values)
        value = choice_label(row.get(own.label))
        numbers |= {value} if type(value) is int and 0 <= value <= count else set()
        found = chosen(value, values, task.first_answer)
        forms.update(found[1:] if found else ())
        doubtful += found is not None and str(value) in values and values[found[0]] != str(value)
    if count < 2:
        raise UserError(f"{train}: {', '.join(own.choices)}: {count} answers to choose from; at "
                        "least two are needed to learn from")
    if own.first_answer is None and numbers and 0 not in numbers:
        shown = ", ".join(map(str, sorted(numbers)))
        raise UserError(f"{train}: the right one of {count} answers has the numbers {shown}, never "
                        "0; say in the task file whether they are counted from 1 (first_answer = 1)"
                        " or from 0 (first_answer = 0)")
    shown = ", ".join(f"{form} ({number})" for form, number in forms.items())
    said = f"{own.name}: {count} answers, the right one is said by {shown}"
    if doubtful:
        said += (f"; in {doubtful} rows the label is the text of another answer: the number or "
                 "letter counts")
    return replace(task, labels=tuple(f"choice{number}" for number in range(count))), said


def _with_names(task: Task, own: Any, path: Path) -> tuple[Task, str]:
    """Labels are names: of classes, of several labels, of tags."""
    if task.head == "tags":
        task = _with_words(task, path)
    elif task.head == "multilabel" and not task.label_columns:
        task = _with_vectors(task, own, path)
    counts: Counter[str] = Counter()
    fault = None
    for place, row in _rows(task, path):
        try:
            counts.update(_names(task, row, place))
        except UserError as error:
            fault = fault or error
        if len(counts) > _MOST_LABELS:
            raise UserError(f"{place}: {own.label!r} has more than {_MOST_LABELS} values, so it is "
                            "no column of labels; is it a regression, or another column?")
    if fault and not counts:
        raise fault
    _check_names(task, own, counts)
    if task.words == "raw":
        names = own.labels or sorted(counts)
        if not any(map(PREFIXED.fullmatch, names)):
            names = ["O", *(f"{prefix}-{name}" for name in names if name != "O" for prefix in "BI")]
        labels = tuple(names)
    else:
        labels = own.labels or task.label_columns or tuple(sorted(counts, key=_by_number))
    if task.head == "tags" and not own.labels:
        labels = tuple(sorted(labels, key=lambda label: label != "O"))
    if len(labels) < (1 if own.kind == "multilabel" else 2):
        for _ in read_table(task.files["train"], form=task.form):
            pass  # a row that cannot be read may be the reason
        raise UserError(f"{task.files['train']}: column {own.label!r} has {len(labels)} labels; at "
                        "least two are needed to learn from")
    listed = tuple(sorted(counts)) if task.words == "raw" else labels
    shown = [f"{label} ({counts[label]})" if counts else label for label in listed[:20]]
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    what = "kinds of entities" if task.words == "raw" else "labels"
    task = replace(task, labels=labels)
    if task.head == "tags":
        task = _with_tag_metric(task, own, path)
    return task, f"{own.name}: {len(listed)} {what}: {', '.join(shown)}{more}"


def _names(task: Task, row: dict[str, Any], place: str) -> list[str]:
    """Return the names in the label of a row; none where it has none."""
    label = to_line(task, place, row, 0).get("label", [])
    if task.words == "raw":
        try:
            return [name for *_, name in entities_of(row[task.texts[0]], label)]
        except BAD_ENTITIES as error:
            raise UserError(f"{place}: {error}") from None
    names = label if isinstance(label, list) else [label]
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{place}: label {name!r} is no name; labels are text, whole numbers "
                            "or true and false")
    return names


def _check_names(task: Task, own: Any, counts: Counter[str]) -> None:
    train = task.files["train"]
    alike: dict[str, str] = {}
    for label in counts:
        if (other := alike.setdefault(as_shown(label), label)) != label:
            raise UserError(f"{train}: column {own.label!r} has labels that only look alike: "
                            f"{ascii(other)} and {ascii(label)}; write them in one way")
    if own.labels or task.head == "tags":
        return
    none = [label for label in NO_LABEL if label in counts and counts.keys() != {"-1", "1"}]
    if none:
        raise UserError(f"{train}: {counts[none[0]]} rows have the label {none[0]!r}, which "
                        f'elsewhere means "no label". Leave them out with ignore_labels = '
                        f'["{none[0]}"] in the task file, or name all labels, this one too, with '
                        "labels = [...]")
    for mark in ";|" if task.head == "multilabel" and not own.separator else "":
        parts = Counter(part.strip() for label in counts for part in label.split(mark))
        if any(mark in label for label in counts) and max(parts.values()) > 1:
            raise UserError(f"{train}: the labels have {mark!r} in them, as if it parted several; "
                            f'say separator = "{mark}" in the task file, or separator = "," if '
                            "it is part of a name")


def _with_vectors(task: Task, own: Any, path: Path) -> Task:
    """Return the task that knows whether its labels are written as 0 or 1 for each."""
    lengths = {len(value) if is_vector(value) else 0
               for value in (read_list(label_cell(task, row)) for _, row in _rows(task, path))}
    length = lengths.pop() if len(lengths) == 1 else 0
    if not length or set(own.labels) == {"0", "1"}:
        return task
    if len(own.labels) != length:
        names = ", ".join('"..."' for _ in range(min(length, 3)))
        raise UserError(f"{task.files['train']}: {own.label!r} holds vectors of {length} numbers, 0"
                        f" or 1 for each label; name all {length} in their order: labels = "
                        f"[{names}{', ...' if length > 3 else ''}] in the task file (names "
                        f"{len(own.labels)} now)" + ('; if 0 and 1 are the labels: labels = ["0", '
                        '"1"]' if length < 3 else ""))
    return replace(task, vectors=True)


def _with_words(task: Task, path: Path) -> Task:
    """Return the task that knows what its rows hold: words, or a text and its entities."""
    form: Literal["list", "text", "raw"] = "raw"
    words: Counter[str] = Counter()
    for _, row in _rows(task, path):
        text = row["tokens"] if is_sentence(task, row) else read_list(row.get(task.texts[0]))
        label = read_list(label_cell(task, row))
        if isinstance(text, list):
            form = "list"
            words.update(word for word in text if isinstance(word, str))
        elif not is_missing(label) and label != []:
            form = "raw" if is_entities(label) else "text"
            break
    return replace(task, words=form, spaces=not hold_spaces(words))


def _with_tag_metric(task: Task, own: Any, path: Path) -> Task:
    """Return the task with the metric of its tags: of spans if any says where one begins.

    UserError if spans are counted and tags do not say where they begin.
    """
    if "span_f1" not in (own.metrics or ("span_f1",)):
        return task
    if all(label.isdigit() for label in task.labels):
        raise UserError(f"{path}: the tags are numbers, which do not say where spans begin; write "
                        "their names, or take metrics = [\"tag_accuracy\"]")
    odd = [label for label in task.labels if label[1:2] == "-" and label[0] not in _PREFIXES]
    if odd:
        raise UserError(f"{path}: the tag {odd[0]!r} is not of IOB, IOBES, BILOU or BMES, which "
                        "span_f1 counts spans of; rename it, or take tag_accuracy")
    has_spans = any(map(PREFIXED.fullmatch, task.labels)) or {"B", "I"} <= set(task.labels)
    return task if own.metrics or has_spans else replace(task, metrics=("tag_accuracy",))


def _by_number(label: str) -> tuple[float, str]:
    return (float(label), "") if label.isdecimal() else (float("inf"), label)
