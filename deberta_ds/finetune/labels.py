"""Labels as tables write them -> their names: numbers, lists, vectors of 0 and 1, columns.

A cell of text may hold a list as JSON, pandas or NumPy write one: ["a"], ['a', 'b'], ['a' 'b'],
[1 0 0], {'text': array(['x'], dtype=object)}.
"""

import ast
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.json_files import parse_json
from deberta_ds.finetune.tasks import Task

NO_LABEL = ("-", "-1", "-100", "nan", "?")  # what tables write where there is none
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


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value: null, empty, or the NaN of a table of numbers."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def is_sentence(task: Task, row: Iterable) -> bool:
    """Return whether a row is of a file with a word per line, whose columns have no names."""
    return task.head == "tags" and set(row) in ({"tokens"}, {"tokens", "tags"})


def label_cell(task: Task, row: dict[str, Any]) -> Any:
    """Return the value of a row's label; None where it has no such column."""
    column = task.columns.get("label", "label")
    return row.get("tags" if column not in row and is_sentence(task, row) else column)


def without_label(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without its label, and what goes with it."""
    names = {*task.label_columns, task.columns.get("label", "label"), "label",
             task.columns.get("start", "start"), "tags" if is_sentence(task, row) else "label"}
    return {name: value for name, value in row.items() if name not in names}


def is_ignored(task: Task, row: dict[str, Any]) -> bool:
    """Return whether the task file says that rows of this label are left out."""
    if not task.ignore_labels:
        return False
    cells = list(map(row.get, task.label_columns)) or [label_cell(task, row)]
    return any(not set(task.ignore_labels).isdisjoint(("", "-1") if is_missing(cell) else
                                                      (label_text(cell),))
               for cell in cells if not isinstance(cell, list | dict))


def names_of(task: Task, value: Any, place: str) -> Any:
    """Return the names in a label of several (also of a sentence's tags), not yet looked up.

    What is no list of any form is left as it is, for the check of the line.
    """
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


def names_of_columns(task: Task, row: Mapping[str, Any], place: str) -> list[str] | None:
    """Return the columns in which a row has 1; None for a row without labels."""
    cells = {name: row.get(name) for name in task.label_columns}
    if all(map(is_missing, cells.values())):
        return None
    found = []
    for name, cell in cells.items():
        text = str(label_text(cell)).lower()
        if text not in _ONE:
            raise UserError(f'{place}: column "{name}" must be 0 or 1, found {cell!r}; rows that '
                            f'have no labels are left out by ignore_labels = ["{text}"]')
        found += [name] if _ONE[text] else []
    return found


def number_of(value: Any, decimal: str) -> Any:
    """Return a label as a number; what might be another one (1_000) is left for the check."""
    text = value.strip().replace("\u2212", "-") if isinstance(value, str) else value
    try:
        if isinstance(text, str):
            if "_" in text or (decimal == "," and "." in text):
                return value
            text = text.replace(decimal, ".")
        return float(text)
    except (TypeError, ValueError):
        return value


def has_decimal_commas(values: list[str]) -> bool:
    """Return whether numbers have a comma where others have a point, and not between thousands."""
    commas = [value for value in values if "," in value]
    return bool(commas) and all(re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value) for value in commas) \
        and not any("." in value for value in values) \
        and not all(re.fullmatch(r"\s*[-+]?\d{1,3},\d{3}\s*", value) for value in commas)
