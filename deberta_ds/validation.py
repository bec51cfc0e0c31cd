"""What is wrong with a config: strict validation, and every problem in one error.

An unknown key names the nearest known one, whole or by its last part.
"""

import difflib
import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deberta_ds.errors import UserError
from deberta_ds.options import options_of


class ConfigError(UserError):
    """One or more problems in a run config or a DeepSpeed JSON."""

    on_every_rank = True


def raise_problems(place: str, problems: list[str]) -> None:
    """Raise one ConfigError that lists every problem found in `place`; return if there is none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} in {place}\n  " + "\n  ".join(problems))


def validate(cls: type, values: dict, place: str) -> Any:
    """Return the `cls` of `values`; raises ConfigError with every problem found in `place`."""
    try:
        return _validated(cls, values)
    except ValidationError as error:
        raise_problems(place, _problems(error, cls))


_BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "above"),
           "less_than_equal": ("le", "at most"), "less_than": ("lt", "below")}


def problems_of(cls: type, values: dict) -> list[str]:
    """Return every problem of `values` as a `cls`."""
    try:
        _validated(cls, values)
        return []
    except ValidationError as error:
        return _problems(error, cls)


def _validated(cls: type, values: dict) -> Any:
    # JSON mode: strict about types, but arrays become tuples.
    return TypeAdapter(cls).validate_json(json.dumps(values, default=str))


def _problems(error: ValidationError, cls: type) -> list[str]:
    items = error.errors()
    places = [item["loc"] for item in items]
    # A list with a bad entry is also called too short: its entry says why.
    return [_problem(item, cls) for item in items if item["type"] != "too_short"
            or not any(item["loc"] == deeper[:len(item["loc"])] != deeper for deeper in places)]


def _problem(item: dict, cls: type) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "file"
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where}: unknown key{nearest(where, [o.key for o in options_of(cls)])}"
    if item["type"].startswith("missing"):
        return f"{where}: missing; this key has no default"
    if item["type"] == "value_error":
        return f"{where}: {item['ctx']['error']}"
    given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
    meaning = _meaning(item["loc"], cls)
    if item["type"] in _BOUNDS:
        limit, words = _BOUNDS[item["type"]]
        return f"{where}{given}: must be {words} {item['ctx'][limit]}{meaning}"
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
