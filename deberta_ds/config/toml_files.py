"""TOML files and dotted overrides: what a run file, settings and task files have in common.

Also data.corpus of a run file, a directory that data_prep/build.py has made: its corpus.json stands
for data.sources, data.heldout and data.tokenizer, with paths from there.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deberta_ds.base import command_line
from deberta_ds.base.errors import ConfigError, UserError, looked_in, refuse_pipe
from deberta_ds.base.files import flatten, read_json, typed

BUILT = "corpus.json"


def read_toml(path: str | Path, what: str, example: str) -> dict:
    """Return the tables of a TOML file; `what` and `example` help a user who named no such file."""
    refuse_pipe(path)
    try:
        with open(command_line.find(path), "rb") as file:
            values = tomllib.loads(file.read().decode("utf-8-sig"))  # editors may begin with a mark
            flatten(values)  # RecursionError
            return values
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}{looked_in(path)}; name a TOML file, such "
                          f"as {example}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a {what} is a TOML file, "
                          f"such as {example}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save "
                          "the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # TOML, thousands of digits or brackets
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def read_with_overrides(path: Path, overrides: Iterable[str], what: str, example: str
                        ) -> tuple[dict, dict[str, str]]:
    """Return (tables of a TOML file under `--section.key=value` overrides, origin of each value).
    """
    values = read_toml(path, what, example)
    origins = {key: str(path) for key in flatten(values)}
    for override in overrides:
        key, value = parse_override(override)
        try:
            set_value(values, key, value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        origins = {name: origin for name, origin in origins.items()
                   if not name.startswith(f"{key}.")}  # a table takes the place of the whole
        origins |= dict.fromkeys(flatten({key: value}), "command line")
    return values, origins


def parse_override(text: str) -> tuple[str, Any]:
    """Return (dotted key, TOML value) of "--section.key=value"; what is no TOML is a string."""
    key, separator, value = text.removeprefix("--").partition("=")
    if text.startswith("--") and not separator:
        raise ConfigError(f"{text}: a value follows an equals sign, not a space: {text}=VALUE")
    if not text.startswith("--") or not separator or not all(key.split(".")):
        raise ConfigError(f"{text!r}: not an option; overrides are written --section.key=value")
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python shows such bytes
        raise ConfigError(f"{text!r}: is not UTF-8")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key, value  # a bare string


def as_override(key: str, value: Any) -> str:
    """Return what `parse_override` reads as this key and value."""
    return f"--{key}={as_toml(value)}"


def as_toml(value: Any) -> str:
    """Return a value as it stands in a TOML file; a path is its text."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {as_toml(one)}"
                                for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    # NumPy's numbers and arrays have tolist.
    return json.dumps(value, ensure_ascii=False,
                      default=lambda one: getattr(one, "tolist", one.__str__)())


def _toml_key(key: str) -> str:
    """Return a key of a table, in quotation marks where a dot or the like would say more."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def set_value(values: dict, key: str, value: Any) -> None:
    """Set the value at a dotted key in nested tables, making those that are missing."""
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if isinstance(values, list):
            raise ConfigError(f"--{key}: {section} is a list; give it whole, as in the file")
        if not isinstance(values, dict):
            raise ConfigError(f"--{key}: {section} is a value, not a section; write it as a "
                              "table, [section]")
    values[last] = value


@dataclass(frozen=True)
class Built:
    """Keys of [data]; `sources` {path: weight}."""

    sources: dict[str, float]
    heldout: dict[str, str]
    tokenizer: str


def read_built(directory: str) -> dict:
    """Return the keys of [data] that a built directory stands for."""
    path = Path(directory) / BUILT
    if not path.is_file():
        raise ConfigError(f"{path}: no such file{looked_in(path)}; data.corpus must be a local "
                          "directory that data_prep/build.py has finished")
    try:
        built = typed(Built, read_json(path))
    except (UserError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}); run data_prep/build.py again") from None
    heldout = {name: os.path.join(directory, one) for name, one in built.heldout.items()}
    return {"sources": [{"path": os.path.join(directory, one), "weight": weight}
                        for one, weight in built.sources.items()],
            "heldout": heldout if len(heldout) > 1 else "".join(heldout.values()),
            "tokenizer": os.path.join(directory, built.tokenizer)}


def apply_built(data: dict, origins: dict) -> None:
    """Put what data.corpus stands for into `data`; other keys may choose from its sources alone.

    One of the command line wins over these keys of the file.
    """
    directory, origin = data.pop("corpus"), origins.pop("data.corpus", "")  # none of a table
    built = read_built(str(directory))
    for key in built:
        given_by = {by for name, by in origins.items() if f"{name}.".startswith(f"data.{key}.")}
        if origin == "command line" not in given_by:
            data.pop(key, None)
    known, given = [source["path"] for source in built["sources"]], data.get("sources")
    wrong = [f"data.{key}" for key in ("tokenizer", "heldout") if key in data] + [
        f"data.sources ({one.get('path')})" for one in (given if isinstance(given, list) else ())
        if isinstance(one, dict) and one.get("path") not in known]
    if wrong:
        raise ConfigError(f"{origin}: data.corpus = {directory!r} has its own tokenizer, held-out "
                          f"corpora and sources ({', '.join(known)}), so {' and '.join(wrong)} must"
                          " be left out; or write all three without data.corpus")
    for key in [key for key in built if key not in data]:
        data[key] = built[key]
        origins |= dict.fromkeys(flatten({"data": {key: built[key]}}), f"data.corpus {directory}")
