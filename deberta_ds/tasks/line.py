"""One line of a task file, whose fields are read with a check of their type; words and entities of
its text.

Every error names the file and the line, the field, and the format that is expected.

Of a text with entities, {"text": "...", "label": [[0, 4, "PER"]]}, every character has a tag: that
of its token, of which the model learns one (features.py). So entities may begin and end inside
words, as Korean and German ones do.
"""

import math
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NoReturn

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.labels import as_one
from deberta_ds.tasks.task import TASK_NAMES, Task
from deberta_ds.tokenizer.words import UNSPACED_SCRIPTS, is_unspaced

_WIDE = (*UNSPACED_SCRIPTS, (0x3001, 0x303F), (0xFF01, 0xFFEF))


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

    def entities(self) -> list[tuple[int, int, str]]:
        """Return the entities that the label of a text names, as characters [start, end) with a
        name, in order and without spaces at their ends; none without a label.
        """
        text, where = self.get(self.task.texts[0], str), f'field "{self.named("label")}": '
        found: list[tuple[int, int, str]] = []
        for one in self.get("label", list) if self.has_label else []:
            start, end, name = one if isinstance(one, list | tuple) and len(one) == 3 else (0, 0, 0)
            if type(start) is not int or type(end) is not int or not name or type(name) is not str:
                self.fail(f"{where}{one!r} is no entity; it is [start, end, label]. Convert exports"
                          " of annotation tools with examples/convert_annotations.py")
            part = text[start:end].strip()
            if not 0 <= start < end <= len(text) or not part:
                self.fail(f"{where}{name} [{start}, {end}) is no part of a text of {len(text)} "
                          "characters, which are counted from 0, not bytes or units of UTF-16")
            start = text.index(part, start)
            found.append((start, start + len(part), name))
        for (_, end, name), (start, _, other) in pairwise(found := sorted(found)):
            if start < end:
                self.fail(f"{where}{name} and {other} overlap at character {start}; a word has one "
                          "tag, so remove one of them")
        return found


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


def is_entities(value: Any) -> bool:
    """Return whether a label is a list of entities (none of them: of nothing at all)."""
    return isinstance(value, list) and all(
        isinstance(part, dict) or (isinstance(part, list | tuple) and len(part) == 3)
        for part in value)


def words_in(text: str) -> list[tuple[int, int]]:
    """Return the characters [start, end) of every word: a run of letters, digits and marks, another
    character, or one of a script without spaces."""
    found: list[tuple[int, int]] = []
    goes_on = False  # the last word takes letters
    for place, character in enumerate(text):
        kind = unicodedata.category(character)
        letter = (kind[0] in "LN" or character == "_") and not is_unspaced(character)
        touches = bool(found) and found[-1][1] == place
        if touches and (kind[0] == "M" or kind == "Cf" or (letter and goes_on)):
            found[-1] = (found[-1][0], place + 1)
        elif not character.isspace():
            found.append((place, place + 1))
            goes_on = letter
    return found


def glued(words: list[str], spaces: bool) -> tuple[str, list[tuple[int, int]]]:
    """Return (words as one text, the characters of each): with spaces between, but for words of
    scripts without spaces; `spaces = False`: the words hold the spaces themselves."""
    text, places = "", []
    for word in words:
        if text and spaces and not (_is_wide(text[-1]) and _is_wide(word[:1])):
            text += " "
        places.append((len(text), len(text) + len(word)))
        text += word
    return text, places


def _is_wide(character: str) -> bool:
    """Return whether a script without spaces has this character, or its punctuation."""
    return any(low <= ord(character or " ") <= high for low, high in _WIDE)


def hold_spaces(words: Mapping[str, int]) -> bool:
    """Return whether words, with their counts, are all that a text is of: spaces are words too, or
    each is one character of a script that has none."""
    total = sum(words.values())
    blank = sum(count for word, count in words.items() if word.isspace())
    single = sum(count for word, count in words.items() if len(word) == 1)
    wide = sum(count for word, count in words.items() if _is_wide(word[:1]))
    return blank > 0.05 * total or (single == total and wide > total / 2)
