"""One line of a task file, whose fields are read with a check of their type.

Every error names the file and the line, the field, and the format that is expected.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.labels import as_one
from deberta_ds.tasks.task import TASK_NAMES, Task


class Line:
    """One JSON object with its place. Labels are `needed`, or may be absent."""

    def __init__(self, task: Task, place: str, value: Any, needed: bool, key: str = ""):
        self.task, self.place, self.needed, self.key = task, place, needed, key
        self.is_own = task.name not in TASK_NAMES
        if not isinstance(value, Mapping):
            self.fail(f"expected a JSON object, found {show(value)}")
        self.value: Mapping[str, Any] = value
        self.has_label = needed or "label" in value

    def fail(self, problem: str) -> NoReturn:
        """Raise UserError with the place, the problem and the format that is expected."""
        raise UserError(f"{self.place}: {problem}\n  expected format: {line_format(self.task)}")

    def named(self, name: str) -> str:
        """Return what the user calls field `name`: of a task of one's own, its column."""
        return self.key + (self.task.columns.get(name, name) if self.is_own else name)

    def get(self, name: str, kind: type = object, may_be_blank: bool = False) -> Any:
        """Return field `name`, which must be of exactly `kind` (a bool is not an int)."""
        where = self.named(name)
        if name not in self.value:
            self.fail(f'field "{where}" is missing{self.without_label(name)}')
        value = self.value[name]
        if type(value) is not kind and kind is not object:
            lists = [self.named(key) for key, found in self.value.items()
                     if isinstance(found, list) and len(found) == len(value)
                     ] if kind is str and isinstance(value, list) and self.is_own else []
            self.fail(f'field "{where}" must be {_NAMES[kind]}, found {show(value)}' + bool(lists)
                      * f"; write one text, or a row for each (in pandas: explode({lists}))")
        if kind is str:
            self.check_text(where, value, may_be_blank or name == "word")
        return value

    def strings(self, name: str) -> list[str]:
        """Return field `name`, a list of texts; spaces may be words of tags."""
        values = self.get(name, list)
        for text in values:
            if not isinstance(text, str):
                self.fail(f'field "{name}" must be a list of strings')
            self.check_text(name, text, self.task.head == "tags" and text.isspace())
        return values

    def without_label(self, name: str) -> str:
        """Return what can be done about a row of a task of one's own that has no label."""
        return '; rows without a label are left out by ignore_labels = [""] in the task file' if (
            self.is_own and name == "label") else ""

    def check_text(self, where: str, text: str, may_be_blank: bool = False) -> None:
        """Fail on a text that is blank, or that no tokenizer can read."""
        if not may_be_blank and not text.strip():
            self.fail(f'field "{where}" is empty')
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

    def inside(self, name: str) -> "Line":
        """Return the object in field `name` as a Line of its own."""
        return Line(self.task, self.place, self.get(name, dict), self.needed, f"{self.key}{name}.")

    def each(self, name: str) -> Iterator["Line"]:
        """Yield the objects in field `name`, a list, as Lines of their own."""
        for number, value in enumerate(self.get(name, list)):
            key = f"{self.key}{name}[{number}]."
            yield Line(self.task, self.place, value, self.needed, key)

    def label(self) -> int | float | tuple[int, ...] | None:
        """Return field "label" in the form of `Example.label`; None if absent and not `needed`."""
        if not self.has_label:
            return None
        value = self.get("label", list if self.task.head == "multilabel" else object)
        if self.task.head == "multilabel":
            chosen = {self.class_index(part) for part in value}
            return tuple(int(number in chosen) for number in range(len(self.task.labels)))
        if self.task.head != "regress":
            return self.class_index(value)
        is_number = type(value) in (int, float)
        if is_number and math.isfinite(value):
            return float(value)
        more = '; if the comma is a decimal mark everywhere, say decimal = "," in the task file' \
            if isinstance(value, str) and "," in value and self.task.decimal != "," else ""
        self.fail(f'field "{self.named("label")}" must be a {"finite " * is_number}number, found '
                  f"{show(value)}{more}")

    def class_index(self, value: Any) -> int:
        """Return the class index of a label; of several, of one of them."""
        values, where = self.task.values or self.task.labels, self.named("label")
        if type(value) is not type(values[0]):
            self.fail(f'field "{where}" must be {_NAMES[type(values[0])]}, found {show(value)}')
        if value not in values and self.is_own:
            value = next((x for x in values if as_one(str(x)) == as_one(str(value))), value)
        if value not in values:
            wanted = ", ".join(show(known) for known in values)
            more = ("; labels that train has not are named by labels = [...] in the task file, "
                    "those of rows to leave out by ignore_labels = [...]") if self.is_own else ""
            self.fail(f'field "{where}" must be one of {wanted}, found {show(value)}{more}')
        return values.index(value)


_NAMES = {str: "a string", float: "a number", int: "an integer", bool: "true or false",
          list: "a list", dict: "a JSON object"}


def line_format(task: Task) -> str:
    """Return a line in the format that is expected."""
    return task.line or ", ".join(
        task.columns.get(name, name) for name in (*task.texts, *task.choices, "label"))


def show(value: Any) -> str:
    """Return a value as it is quoted in an error: JSON's words, and not too long."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
