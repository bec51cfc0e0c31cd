"""Tables of any common kind -> lines of the form that layouts.py reads, by column names.

    .jsonl .json .ndjson   one JSON object a line      .csv   quoted, with a header
    .tsv                   GLUE's: no quoting          .parquet .arrow .feather
    .conll .txt            one token a line (token first, tag last), a blank line after a sentence

Rows are read one after another, so a file may be larger than memory (parquet and Arrow by batches).
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from deberta_ds.errors import UserError, naming
from deberta_ds.finetune.tasks import Task

KINDS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".conll",
         ".txt")  # fmt: skip
Row = tuple[str, dict[str, Any]]  # (file and line, values by column)


def read_table(path: str | Path, headless: tuple[str, ...] = (), skip_broken: int = 0
               ) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of a table, told apart by its ending; UserError names the file and the line.

    `headless` are the columns of a .tsv without a header; up to `skip_broken` of its rows may have
    too few columns and are left out.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UserError(f"{path}: unknown kind of table; the ending must be one of "
                        f"{' '.join(KINDS)}")  # fmt: skip
    with naming(path):
        if kind == ".csv":
            yield from _csv(path)
        elif kind in (".parquet", ".arrow", ".feather"):
            yield from _arrow(path)
        else:
            with open(path, "rb") as file:
                lines = text_lines(file, str(path))
                if kind == ".tsv":
                    yield from _tsv(path, lines, headless, skip_broken)
                elif kind in (".conll", ".txt"):
                    yield from _conll(lines)
                else:
                    yield from _json_lines(lines)


def text_lines(file: BinaryIO, source: str) -> Iterator[tuple[str, str]]:
    """Yield (place, line) of UTF-8 bytes; only a line feed ends a line (texts hold U+2028)."""
    for number, line in enumerate(file, start=1):
        place = f"{source}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 text ({error.reason}); save the file as UTF-8"
                            ) from error  # fmt: skip
        yield place, text.removesuffix("\n").removesuffix("\r")


def json_of(place: str, line: str) -> Any:
    """Return the JSON value of a line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise UserError(f"{place}: not a JSON object ({error}); a line cut short means a download "
                        "that stopped") from error  # fmt: skip


def _json_lines(lines: Iterator[tuple[str, str]]) -> Iterator[Row]:
    for place, line in lines:
        if line.strip():
            value = json_of(place, line)
            if not isinstance(value, dict):
                raise UserError(f"{place}: not a JSON object; write one object a line")
            yield place, value


def _csv(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        _check_header(path, header)
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise UserError(f"{path}:{reader.line_num}: {error}; a quote may be missing"
                                ) from error  # fmt: skip
            if row is None:
                return
            place = f"{path}:{reader.line_num}"
            if row:
                _check_width(place, row, header)
                yield place, dict(zip(header, row, strict=True))


def _tsv(path: Path, lines: Iterator[tuple[str, str]], headless: tuple[str, ...],
         skip_broken: int) -> Iterator[Row]:  # fmt: skip
    header = list(headless) or next(lines, ("", ""))[1].split("\t")
    _check_header(path, header)
    skipped = 0
    for place, line in lines:
        row = line.split("\t")
        if not line or (len(row) < len(header) and skipped < skip_broken):
            skipped += bool(line)
            continue
        _check_width(place, row, header)
        yield place, dict(zip(header, row, strict=True))


def _check_header(path: Path, header: list[str]) -> None:
    if not any(header):
        raise UserError(f"{path}:1: no column names; the first line must name the columns")
    if doubled := {name for name in header if header.count(name) > 1}:
        raise UserError(f"{path}:1: column {sorted(doubled)[0]!r} is there twice; rename one")


def _check_width(place: str, row: list[str], header: list[str]) -> None:
    if len(row) != len(header):
        raise UserError(f"{place}: {len(row)} columns, the header has {len(header)}")


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow.ipc
    import pyarrow.parquet

    number = 0
    if path.suffix.lower() == ".parquet":
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096)
    else:
        source = pyarrow.memory_map(str(path))
        try:
            opened = pyarrow.ipc.open_file(source)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        except pyarrow.ArrowInvalid:  # what `datasets` writes is the streaming form
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:{number}", row


def _conll(lines: Iterator[tuple[str, str]]) -> Iterator[Row]:
    tokens: list[str] = []
    tags: list[str] = []
    start = ""
    for place, line in lines:
        if line.strip() and not line.startswith("-DOCSTART-"):
            parts = line.split("\t") if "\t" in line else line.split()
            start = start or place
            tokens.append(parts[0])
            tags.append(parts[-1] if len(parts) > 1 else "")
        elif tokens:
            yield start, _sentence(tokens, tags)
            tokens, tags, start = [], [], ""
    if tokens:
        yield start, _sentence(tokens, tags)


def _sentence(tokens: list[str], tags: list[str]) -> dict[str, Any]:
    return {"tokens": tokens} | ({"tags": tags} if all(tags) else {})


def to_line(task: Task, place: str, row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a table's row as a line of `task`: its fields by name, "idx", "label" if it has one.

    What is text in a table and something else in a line (numbers, lists) is converted.
    """
    line: dict[str, Any] = {"idx": number}
    for field in (*task.texts, *task.choices):
        column = task.columns.get(field, field)
        if column not in row:
            raise UserError(f"{place}: no column {column!r}; there are {', '.join(map(str, row))}")
        line[field] = row[column]
        if task.head == "tags" and isinstance(line[field], str):
            line[field] = line[field].split()
    value = row.get(task.columns.get("label", "label"))
    if task.head == "multilabel" and value == "":  # none of the labels
        value = []
    if value is not None and value != "":
        line["label"] = _label(task, value)
    return line


def _label(task: Task, value: Any) -> Any:
    """Return a label in the form of a line; what cannot be is left for the line's own check."""
    if task.head == "regress":
        try:
            return float(value)
        except (TypeError, ValueError):
            return value
    if task.head in ("multilabel", "tags"):
        if isinstance(value, str):
            value = value.split() if task.head == "tags" else value.split(",")
        return [label_text(part) for part in value] if isinstance(value, list) else value
    if task.head == "choice":
        text = label_text(value)
        return int(text) if text.isdecimal() else text
    return label_text(value)


def label_text(value: Any) -> Any:
    """Return how a label of a table is named: true, 3 and "x " are "true", "3" and "x"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value.strip() if isinstance(value, str) else value
