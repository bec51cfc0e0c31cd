"""Rows of tables -> the lines that layouts.py reads, by column names, and their labels' names:
numbers, lists, vectors of 0 and 1, columns.

A cell of text may hold a list as JSON, pandas or NumPy write one: ["a"], ['a', 'b'], ['a' 'b'],
[1 0 0], {'text': array(['x'], dtype=object)}.
"""

import ast
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import parse_json
from deberta_ds.tasks.task import Task
from deberta_ds.tokenizer.text import is_removed

# What tables write where there is none.
NO_LABEL = ("-", "-1", "-100", "?", ".", "nan", "NaN", "None", "null", "NULL", "\\N", "NA", "N/A",
            "n/a", "<NA>", "#N/A", "#NV")
# Between the digits of a large number, by its decimal mark.
_THOUSANDS = {",": r"(?<=\d)['’.\s](?=\d{3}(?!\d))",
              ".": r"(?<=\d)(['’\s]|,(?=[\d,]*\.))(?=\d{3}(?!\d))"}
_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(\s+(?=['"]))?""")
_ONE = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


def read_list(value: Any) -> Any:
    """Return the list or object that a cell of text holds; what is none comes back as it is."""
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return value
    try:
        return parse_json(text)
    except ValueError:
        pass
    text = re.sub(r"array\((.*?)(?:, dtype=\w+)?\)", r"\1", text, flags=re.DOTALL)
    text = _QUOTED.sub(lambda match: match[1] + "," * bool(match[2]), text)  # NumPy has no commas
    text = re.sub(r"(?<=[\d.])\s+(?=[\d.])", ", ", text) if not _QUOTED.search(text) else text
    try:
        found = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return value
    return sorted(found, key=str) if isinstance(found, set) else (
        list(found) if isinstance(found, tuple) else found)


def label_text(value: Any) -> Any:
    """Return how a label of a table is named: true, 3, 3.0 and "x " are "true", "3", "3", "x"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return value.strip() if isinstance(value, str) else value


def as_one(label: str) -> str:
    """Return what labels have in common that mean one: 1.0 and 1, True and true, １ and 1."""
    text = unicodedata.normalize("NFKC", as_shown(label))
    return re.sub(r"(?i)^(true|false)$", lambda found: found[0].lower(),
                  re.sub(r"^(-?\d+)\.0+$", r"\1", text))


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value: null, empty, or the NaN of a table of numbers."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def label_cell(task: Task, row: dict[str, Any]) -> Any:
    """Return the value of a row's label; None where it has no such column."""
    return row.get(task.columns.get("label", "label"))


def without_label(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without its label, and what goes with it."""
    names = {*task.label_columns, task.columns.get("label", "label"), "label",
             task.columns.get("start", "start")}
    return {name: value for name, value in row.items() if name not in names}


def is_ignored(task: Task, row: dict[str, Any]) -> bool:
    """Return whether the task file says that rows of this label are left out."""
    if not task.ignore_labels:
        return False
    cells = list(map(row.get, task.label_columns)) or [label_cell(task, row)]
    return any(not set(task.ignore_labels).isdisjoint(("", "-1") if is_missing(cell) else
                                                      {text := label_text(cell), as_one(str(text))})
               for cell in cells if not isinstance(cell, list | dict))


def to_line(task: Task, place: str, row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a table's row as a line of `task`: its fields by name, "idx", "label" if it has one.

    What is text in a table and something else in a line (numbers, lists) is converted; what cannot
    be is left for the line's own check.
    """
    line: dict[str, Any] = {"idx": number}
    for field in (*task.texts, *task.choices):
        column = task.columns.get(field, field)
        if column not in row and field in row:
            column = field  # RTE may have SuperGLUE's names, or those of GLUE's table
        if column not in row:
            raise UserError(f"{place}: {no_column(column, row)}")
        line[field] = row[column]
        if (task.head == "tags" and task.words == "list") or task.choices == (field,):
            line[field] = read_list(line[field])
        elif task.words == "text" and isinstance(line[field], str):
            line[field] = line[field].split()
    if (group := task.columns.get("group")) in row:
        line[group] = row[group]
    if task.head == "answer":
        line |= {"id": row["id"]} if type(row.get("id")) in (str, int) else {}
        start = row.get(task.columns.get("start", ""))
        line |= {"start": start} if start not in (None, "") else {}
        if not is_missing(flag := row.get("is_impossible")):
            line["is_impossible"] = _ONE.get(str(label_text(flag)).lower())
            if line["is_impossible"] is None:
                raise UserError(f"{place}: is_impossible must be true or false, found {flag!r}")
    label = _label(task, row, place)
    if task.head == "choice" and (marked := marked_choices(line[task.choices[0]])):
        line[task.choices[0]], marks = marked
        if str(label) in marks:
            label = marks.index(str(label)) + task.first_answer
    return line if label is None else line | {"label": label}


def _label(task: Task, row: dict[str, Any], place: str) -> Any:
    """Return the label of a row in the form of a line, None where it has none."""
    if task.label_columns:
        return _names_of_columns(task, row, place)
    value = label_cell(task, row)
    if task.head == "answer":
        if task.columns.get("label", "label") not in row:
            return None
        found = read_list(value)
        is_list = isinstance(found, list | dict) and "answer_start" in str(value)
        return (found if is_list else value) or []
    if task.head == "multilabel" and value == "":  # none of the labels
        return []
    if is_missing(value):
        return None
    if task.head == "regress":
        return _number_of(value, task.decimal)
    if task.words == "raw":
        return read_list(value)
    if task.head in ("multilabel", "tags"):
        return _names_of(task, value, place)
    if task.head == "classify" and isinstance(found := read_list(value), list):
        if len(found) != 1:
            raise UserError(f'{place}: a list of {len(found)} labels; kind = "multilabel" has such')
        value = found[0]  # as annotation tools write a class
    text = label_text(value)  # of a choice a number also where a table has only text
    is_number = isinstance(text, str) and text.isdecimal() and len(text) < 9
    return int(text) if task.head == "choice" and is_number else text


def marked_choices(value: Any) -> tuple[list, list[str]] | None:
    """Return (answers, the mark of each) of ARC's forms: {text: [...], label: [...]}, or a list of
    {text, label}; None of others.
    """
    value = read_list(value)
    if isinstance(value, list) and value and all(
            isinstance(part, dict) and {"text", "label"} <= part.keys() for part in value):
        value = {key: [part[key] for part in value] for key in ("text", "label")}
    if not isinstance(value, dict) or not {"text", "label"} <= value.keys():
        return None
    return list(value["text"]), list(map(str, value["label"]))


def _names_of(task: Task, value: Any, place: str) -> Any:
    """Return the names in a label of several (also of a sentence's tags), not yet looked up."""
    value = read_list(value)
    if isinstance(value, str):
        if value.strip().startswith("["):
            raise UserError(f"{place}: {value[:40]!r} is no list that can be read; write names in "
                            "quotation marks, with commas between")
        value = value.split() if task.head == "tags" else [
            part for part in value.split(task.separator) if part.strip()]
    if task.vectors and is_vector(value):
        if len(value) != len(task.labels):
            raise UserError(f"{place}: a vector of {len(value)} numbers; the task file names "
                            f"{len(task.labels)} labels")
        return [name for name, one in zip(task.labels, value, strict=True) if one]
    return [label_text(part) for part in value] if isinstance(value, list) else value


def is_vector(value: Any) -> bool:
    """Return whether a label is a list of 0 and 1 alone, as numbers."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(part, int | float) and part in (0, 1) for part in value)


def _names_of_columns(task: Task, row: Mapping[str, Any], place: str) -> list[str] | None:
    """Return the columns in which a row has 1; None for a row without labels."""
    cells = {name: row.get(name) for name in task.label_columns}
    if all(map(is_missing, cells.values())):
        return None
    for name, cell in cells.items():
        if (text := str(label_text(cell)).lower()) not in _ONE:
            left_out = f'; rows without labels are left out by ignore_labels = ["{text}"]'
            raise UserError(f'{place}: column "{name}" must be 0 or 1, found {cell!r}'
                            + left_out * (as_one(text) in NO_LABEL))
    return [name for name, cell in cells.items() if _ONE[str(label_text(cell)).lower()]]


def _number_of(value: Any, decimal: str) -> Any:
    """Return a label as a number; what might be another one (1_000) is left for the check."""
    text = value.strip().replace("\u2212", "-") if isinstance(value, str) else value
    if isinstance(text, str):
        text = re.sub(_THOUSANDS[decimal], "", text)
        if "_" in text or (decimal == "," and "." in text):
            return value
        text = text.replace(decimal, ".")
    try:
        return float(text)
    except (TypeError, ValueError):
        return value


def has_decimal_commas(values: list[str]) -> bool:
    """Return whether numbers have a comma where others have a point, and not between thousands."""
    commas = [value.strip().replace("\u2212", "-") for value in values if "," in value]
    return (bool(commas) and not any("." in value for value in values)
            and all(re.fullmatch(r"[-+]?\d+,\d+", value) for value in commas)
            and not all(re.fullmatch(r"[-+]?\d{1,3},\d{3}", value) for value in commas))


def as_shown(text: str) -> str:
    """Return what texts have in common that look alike: composed, without invisible marks."""
    return "".join(x for x in unicodedata.normalize("NFC", text) if not is_removed(x))


def no_column(name: str, row: Iterable, asked: str = "") -> str:
    """Return the words for a column that is missing, by whom it was `asked`, and what looks so."""
    alike = [column for column in map(str, row)
             if as_shown(column).strip().lower() == as_shown(name).strip().lower()]
    also = f"; {ascii(alike[0])} only looks like {ascii(name)}, write both alike" if alike else ""
    return f"no column {name!r}{asked}; there are {', '.join(map(str, row))}{also}"
