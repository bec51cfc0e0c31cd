"""metrics.jsonl: one JSON object a line, `kind` train, eval or event, `step`, and numbers.

Appended by rank 0 only. A resumed run first cuts what comes after its checkpoint, so that the file
holds what an unbroken run would have written, plus the event lines, which are the run's history.
"""

import json
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.files import write_atomic
from deberta_ds.base.json_files import parse_json

METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "eval", "event")
_TEXT_KEYS = ("kind", "event", "detail", "kernels")
_LARGEST = 1e300  # beyond it means and sums of doubles overflow


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in file order; UserError on a line that breaks it.

    A last line that a kill or a crash of the host cut short, so that it has no end, is left out.
    """
    return [parse(Path(path), number, line)
            for number, line in enumerate(_whole_lines(Path(path)), start=1)]


def corpora_of(record: dict[str, Any]) -> list[str]:
    """Return the names of the held-out corpora that an eval record has scores "SCORE/NAME" of."""
    return list(dict.fromkeys(key.partition("/")[2] for key in record if "/" in key))


def append(path: Path, record: dict[str, Any]) -> None:
    """Write one record; a non-finite number becomes null (JSON has none, and fp16 skips steps).

    UserError if the file cannot be written; nothing is then lost but this record.
    """
    line = json.dumps(finite(record), allow_nan=False)
    parse(path, 0, line)
    with naming(path), open(path, "ab", buffering=0) as file:
        whole_bytes, rest = file.tell(), line.encode() + b"\n"
        try:
            while rest:
                rest = rest[file.write(rest):]
        except OSError:
            # Half a line would spoil the next one; cutting needs no room on the disk.
            file.truncate(whole_bytes)
            raise


def truncate(path: Path, step: int) -> None:
    """Cut what comes after `step`: train and eval records, and a half-written last line.

    Event records stay.
    """
    kept = []
    for number, line in enumerate(_whole_lines(path), start=1):
        record = parse(path, number, line)
        if record["kind"] == "event" or record["step"] <= step:
            kept.append(line + "\n")
    write_atomic(path, "".join(kept))


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with null for what is not finite, or is too large to be added up.

    The perplexity of a run that diverges is.
    """
    return {key: None if isinstance(value, float) and not abs(value) < _LARGEST else value
            for key, value in record.items()}


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file; the last one may lack its end, if it lacks nothing else."""
    with naming(path):
        *lines, tail = path.read_bytes().decode("utf-8").split("\n")
    return [*lines, tail] if tail and _is_whole(tail) else lines


def _is_whole(text: str) -> bool:
    """Return whether a text can be a line that lacks nothing but its end."""
    try:
        parse_json(text, strict=False)
    except json.JSONDecodeError:
        return False
    except ValueError:  # `parse` says what is wrong
        pass
    return True


def parse(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the record of line `number`; UserError names the rule that it breaks."""
    place = f"{path}, line {number}"
    try:
        record = parse_json(line, strict=False)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not a whole JSON object ({error.msg}, column {error.colno}); "
                        "delete the line") from None
    except ValueError as error:
        raise UserError(f"{place}: not a record ({error}); delete the line") from None
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise UserError(f'{place}: must be an object with "kind" one of {", ".join(KINDS)}')
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise UserError(f'{place}: "step" must be a whole number >= 0, it is {step!r:.40}')
    if record["kind"] == "event" and "event" not in record:
        raise UserError(f'{place}: an event must say which "event" it is')
    for key, value in record.items():
        if key in _TEXT_KEYS:
            if not isinstance(value, str):
                raise UserError(f'{place}: "{key}" must be text')
        elif value is not None and not (  # JSON's true is no number, nor is Python's NaN
                type(value) in (int, float) and -_LARGEST < value < _LARGEST):
            raise UserError(f'{place}: "{key}" must be a number or null (not {value!r:.40})')
    return record
