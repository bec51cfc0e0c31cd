"""One line of a task file, whose fields are read with a check of their type.

Every error names the file and the line, the field, and the format that is expected.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from deberta_ds.base.errors import UserError
from deberta_ds.finetune.tasks import TASK_NAMES, Task


class Line:
    """One JSON object with its place, whose fields are read with a check of their type."""

    def __init__(self, task: Task, place: str, value: Any, key: str = ""):
        self.task, self.place, self.key = task, place, key
        if not isinstance(value, Mapping):
            self.fail(f"expected a JSON object, found {show(value)}")
        self.value: Mapping[str, Any] = value

    def fail(self, problem: str) -> NoReturn:
        raise UserError(f"{self.place}: {problem}\n  expected format: {line_format(self.task)}")

    def named(self, name: str) -> str:
        """Return what the user calls field `name`: of a task of one's own, its column."""
        is_own = self.task.name not in TASK_NAMES
        return self.key + (self.task.columns.get(name, name) if is_own else name)

    def get(self, name: str, kind: type, may_be_blank: bool = False) -> Any:
        """Return field `name`, which must be of exactly `kind` (a bool is not an int)."""
        where = self.named(name)
        if name not in self.value:
            self.fail(f'field "{where}" is missing{self.without_label(name)}')
        value = self.value[name]
        if type(value) is not kind:
            self.fail(f'field "{where}" must be {_NAMES[kind]}, found {show(value)}')
        if kind is str:
            self.check_text(where, self.value[name], may_be_blank or name == "word")
        return value

    def without_label(self, name: str) -> str:
        """Return what can be done about a row of a task of one's own that has no label."""
        if name != "label" or self.task.name in TASK_NAMES:
            return ""
        return '; rows without a label are left out by ignore_labels = [""] in the task file'

    def check_text(self, where: str, text: str, may_be_blank: bool = False) -> None:
        """Fail on a text that is blank, or that no tokenizer can read."""
        if not may_be_blank and not text.strip():
            self.fail(f'field "{where}" is empty')
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                self.fail(f'field "{where}" has half a character ({text[error.start]!a} at '
                          f"{error.start}); write the text as UTF-8, or escape whole pairs")

    def index(self) -> int:
        """Return "idx"; AX-b writes it as a string of digits."""
        value = self.value.get("idx")
        if self.task.name == "AX-b" and isinstance(value, str) and value.isdecimal():
            return int(value)
        return self.get("idx", int)

    def inside(self, name: str, position: int = -1) -> "Line":
        """Return the object in field `name` (of a list: at `position`) as a Line of its own."""
        if position < 0:
            return Line(self.task, self.place, self.get(name, dict), f"{self.key}{name}.")
        values = self.get(name, list)
        return Line(self.task, self.place, values[position], f"{self.key}{name}[{position}].")

    def label(self, needed: bool) -> int | float | None:
        """Return field "label" as class index or number; None if absent and not `needed`."""
        if "label" not in self.value and not needed:
            return None
        if self.task.head == "regress":
            value: Any = self.value.get("label")
            where = self.named("label")
            if type(value) not in (int, float) or not math.isfinite(value):
                if isinstance(value, str) and "," in value:
                    self.fail(f'field "{where}" must be a number, found {show(value)}; if the comma'
                              ' is a decimal mark everywhere, say decimal = "," in the task file')
                self.get("label", float)
                self.fail(f'field "{where}" must be a finite number, found {show(value)}')
            return float(value)
        return self.class_index(self.value.get("label"))

    def class_index(self, value: Any) -> int:
        """Return the class index of a label; of several, of one of them."""
        values, where = self.task.values or self.task.labels, self.named("label")
        if "label" not in self.value:
            self.fail(f'field "{where}" is missing{self.without_label("label")}')
        if type(value) is not type(values[0]):
            self.fail(f'field "{where}" must be {_NAMES[type(values[0])]}, found {show(value)}')
        if value not in values:
            wanted = ", ".join(show(known) for known in values)
            more = "" if self.task.name in TASK_NAMES else (
                "; labels that train has not are named by labels = [...] in the task file, those "
                "of rows to leave out by ignore_labels = [...]")
            self.fail(f'field "{where}" must be one of {wanted}, found {show(value)}{more}')
        return values.index(value)


_NAMES = {str: "a string", float: "a number", int: "an integer", bool: "true or false",
          list: "a list", dict: "a JSON object"}


def line_format(task: Task) -> str:
    """Return a line in the format that is expected."""
    if task.line:
        return task.line
    fields = [task.columns.get(name, name) for name in (*task.texts, *task.choices, "label")]
    return ", ".join(fields)


def show(value: Any) -> str:
    """Return a value as it is quoted in an error: JSON's words, and not too long."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
