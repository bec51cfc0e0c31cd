"""JSON that somebody else may have written: one parser, which takes nothing for good that is not.

Rejected beyond what `json` rejects: a key that is written twice (Python would take the last one),
NaN and infinities (JSON has none), numbers that overflow, half characters, brackets without end.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import ReadFile, read_file

_LARGEST = 1 << 100  # what a double, and so every computation with it, takes without overflow


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Return the value of JSON text (bytes: UTF-8, a byte order mark may lead); else ValueError.

    `strict=False` leaves NaN, infinities and half characters to a caller who can name their key.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_int=_whole_number,
                            parse_constant=_refuse if strict else None,
                            parse_float=_finite if strict else None)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
    # The half of a pair: no file name and no output takes it.
    if strict and ("\\ud" in text or "\\uD" in text):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, {error.object[error.start]!a}") from None
    return values


def read_json(path: str | Path | ReadFile) -> dict:
    """Return the JSON object of a file; UserError if it is missing, damaged or something else."""
    try:
        file = path if isinstance(path, ReadFile) else read_file(path)
        values = parse_json(file.data)
    except UserError as error:
        raise UserError(f"{path}: cannot be read ({str(error).removeprefix(f'{path}: ')})"
                        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values


def typed(form: Any, values: Any) -> Any:
    """Return JSON values as a dataclass (or another type), strict about types; else ValueError."""
    try:
        return _adapter(form).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


@cache
def _adapter(form: Any) -> TypeAdapter:
    """Return what checks a form: it takes 5 ms to make, and a mixture opens many manifests."""
    return TypeAdapter(form)


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Return {"section.key": value} for nested tables; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'"{twice}" is written twice')
    return found


def _refuse(text: str):
    raise ValueError(f"{text} is no number of JSON")


def _whole_number(text: str) -> int:
    """Return the number of JSON's digits; ValueError where no double takes it."""
    if len(text) > 40 or abs(int(text)) > _LARGEST:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return value
