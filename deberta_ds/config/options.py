"""Every option of a config class: its key, type, default, limits and meaning.

Read from the classes themselves, so that `--explain`, docs/reference/configuration.md and the error
of a value outside its limits cannot say something else than the code does.
"""

import dataclasses
import difflib
import json
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from deberta_ds.base import user_code
from deberta_ds.base.command_line import as_typed, columns
from deberta_ds.base.errors import MOST_PROBLEMS, ConfigError, raise_problems
from deberta_ds.base.numbers import fill
from deberta_ds.base.user_code import is_own

# Of every config class: numbers are finite, types are exact, unknown keys are errors.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below",
           "min_length": "length at least"}


def option(meaning: str, default: Any = ..., **limits: Any) -> Any:
    """Return a field with what it means and its limits (ge, gt, le, lt); without default: required.

    The meaning stands in docs/reference/configuration.md and in the errors of wrong values.
    """
    return Field(default=default, description=meaning, **limits)


@dataclass(frozen=True)
class OneOfOrOwn:
    """Of a text: one of `known`, or FILE.py:NAME (base/user_code.py); a `module` may lack NAME."""

    known: tuple[str, ...] = ()
    module: bool = False

    @property
    def own(self) -> str:
        """How code of one's own is named in this option."""
        return "FILE.py or FILE.py:NAME" if self.module else "FILE.py:NAME"

    def __get_pydantic_core_schema__(self, source, handler):
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if value not in self.known and not (
                is_own(value) and (self.module or user_code.split(value)[1])):
            known = f"one of {', '.join(self.known)}, or {self.own}" if self.known else self.own
            raise ValueError(f"{value!r} is unknown{nearest(value, self.known)}; write {known}")
        return value


@dataclass(frozen=True)
class Option:
    """One key of a config file; `default` is None where `required`.

    `follows` says in words what a key takes its value from where nobody writes it.
    """

    key: str
    kind: str
    required: bool
    default: Any
    limits: str
    meaning: str
    follows: str = ""


def options_of(cls: Any, prefix: str = "") -> list[Option]:
    """Return the options of a config class in their order, nested ones as "section.key"."""
    found = []
    for name, info in cls.__pydantic_fields__.items():
        key, kind = prefix + name, info.annotation
        if hasattr(kind, "__pydantic_fields__"):
            found += options_of(kind, f"{key}.")
            continue
        required = info.is_required()
        found.append(Option(key, _kind(info.rebuild_annotation()), required,
                            None if required else info.default,
                            _limits([*info.metadata, *_inner_metadata(kind)]),
                            info.description or ""))
        for inner in get_args(kind):
            if hasattr(inner, "__pydantic_fields__"):  # a list of sections
                found += options_of(inner, f"{key}[].")
    return found


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Annotated and isinstance(inner[1], OneOfOrOwn):
        return " | ".join([*(f'"{value}"' for value in inner[1].known), inner[1].own])
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if part is types.NoneType else _kind(part) for part in inner)
    if origin is dict:
        return f"table of {_kind(inner[1])}"
    if origin is tuple:
        parts = [_kind(part) for part in inner if part is not Ellipsis]
        return f"list of {parts[0]}" if Ellipsis in inner else f"[{', '.join(parts)}]"
    return "section" if dataclasses.is_dataclass(annotation) else annotation.__name__


def _inner_metadata(annotation: Any) -> list:
    """Return the constraints inside an annotation, such as those of a tuple's elements."""
    found = list(getattr(annotation, "metadata", []))  # of Annotated: [FieldInfo(metadata=...)]
    if isinstance(annotation, FieldInfo):
        return found
    for part in [*found, *get_args(annotation)]:
        found += _inner_metadata(part)
    return list(dict.fromkeys(item for item in found if not isinstance(item, FieldInfo)))


def _limits(metadata: list) -> str:
    """Return "at least 1, at most 8" of pydantic's constraints, or ""."""
    parts = []
    for name, words in _LIMITS.items():
        values = [getattr(item, name) for item in metadata if hasattr(item, name)]
        parts += [f"{words} {_shown(values[0])}"] if values else []
    return ", ".join(parts)


def _shown(value: float) -> str:
    """Return a limit as people write it: 2^62 rather than nineteen digits."""
    if not isinstance(value, int) or value < 10_000:
        return f"{value:g}"
    power = value.bit_length() - 1
    return f"2^{power}" if value == 1 << power else f"{value:,}"


def describe(options: list[Option], word: str = "") -> list[str]:
    """Return lines for a terminal that explain the options whose key contains `word`."""
    lines = []
    for option in options:
        if word in option.key:
            default = "required" if option.required and not option.follows else \
                f"default {option.follows or shown_default(option)}"
            limits = f", {option.limits}" if option.limits else ""
            lines += [option.key, f"    {option.meaning}", f"    {option.kind}; {default}{limits}"]
    return lines


def explain(options: list[Option], word: str, what: str) -> None:
    """Print the options of a file whose key contains `word`; ConfigError if there is none."""
    lines = describe(options, word)
    if not lines:
        raise ConfigError(f"--explain {word}: no key of a {what} has this in its name"
                          f"{nearest(word, [option.key for option in options])}")
    for line in lines:
        print(fill(as_typed(line), columns() - 1, hanging=4))


def shown_default(option: Option) -> str:
    """Return a default as it is written in a TOML file."""
    if option.default is None:
        return "none"
    value = list(option.default) if isinstance(option.default, tuple) else option.default
    return json.dumps(value)


def validate(cls: type, values: dict, place: str) -> Any:
    """Return the `cls` of `values`; raises ConfigError with every problem found in `place`."""
    try:
        return _validated(cls, values)
    except ValidationError as error:
        raise_problems(place, _problems(error, cls))


_BOUNDS = {"greater_than_equal": "ge", "greater_than": "gt", "less_than_equal": "le",
           "less_than": "lt"}  # pydantic's types of errors: keys of _LIMITS


def problems_of(cls: type, values: dict) -> list[str]:
    """Return every problem of `values` as a `cls`."""
    try:
        _validated(cls, values)
        return []
    except ValidationError as error:
        return _problems(error, cls)


def check_names(cls: type, values: dict, place: str) -> None:
    """Raise ConfigError if a key is unknown, with all problems but keys that may still come."""
    problems = problems_of(cls, values)
    if any("unknown key" in line for line in problems):
        raise_problems(place, [line for line in problems if ": missing;" not in line])


def _validated(cls: type, values: dict) -> Any:
    # JSON mode: strict about types, but arrays become tuples.
    return TypeAdapter(cls).validate_json(json.dumps(values, default=str))


def _problems(error: ValidationError, cls: type) -> list[str]:
    items = error.errors()
    places = [item["loc"] for item in items]
    # A list with a bad entry is also called too short: its entry says why.
    return [_problem(item, cls) for item in items[:MOST_PROBLEMS] if item["type"] != "too_short"
            or not any(item["loc"] == deeper[:len(item["loc"])] != deeper for deeper in places)
            ] + [f"{len(items) - MOST_PROBLEMS:,} more"] * (len(items) > MOST_PROBLEMS)


def _problem(item: ErrorDetails, cls: type) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "file"
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where}: unknown key{nearest(where, [o.key for o in options_of(cls)])}"
    if item["type"].startswith("missing"):
        parts = [(*one.key.rpartition("."), one.required) for one in options_of(cls)]
        inside = ", ".join(name for table, _, name, needed in parts if needed and table == where)
        return f"{where}: missing; " + (f"a table [{where}] with at least: {inside}" if inside
                                        else "this key has no default")
    if item["type"] == "value_error":
        return f"{where}: {item['ctx']['error']}"
    given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
    meaning = _meaning(item["loc"], cls)
    if item["type"] in _BOUNDS:
        limit = _BOUNDS[item["type"]]
        return f"{where}{given}: must be {_LIMITS[limit]} {item['ctx'][limit]}{meaning}"
    if item["type"] in ("too_short", "string_too_short"):
        return f"{where}{given}: must not be empty{meaning}"
    return f"{where}{given}: {item['msg'][0].lower()}{item['msg'][1:]}{meaning}"


def _meaning(location: tuple, cls: type) -> str:
    """Return " (what the option means)" of the option at a place in a file, or ""."""
    options = {option.key: option for option in options_of(cls)}
    key = ""
    for part in location:
        key = f"{key}[]" if isinstance(part, int) else f"{key}.{part}".lstrip(".")
        if key in options and options[key].meaning:
            return f" ({options[key].meaning})"
    return ""


def nearest(word: str, known) -> str:
    """Return "; did you mean X?" for the known key nearest to `word`, whole or by its last part."""
    known = list(known)
    last_parts = {key.rsplit(".", 1)[-1]: key for key in known}
    match = difflib.get_close_matches(word, known, 1, 0.75)
    if not match:
        last = difflib.get_close_matches(word.rsplit(".", 1)[-1], last_parts, 1, 0.6)
        match = [last_parts[last[0]]] if last else []
    return f"; did you mean {match[0]}?" if match else ""
