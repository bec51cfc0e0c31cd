"""Rows of tables in all common formats, one after another. Everything that takes tables reads here.

    .csv .tsv                   a header, then one record per row; the header tells the delimiter
    .jsonl .ndjson .json        one JSON value per line, or one JSON list over the whole file
    .parquet .arrow .feather    also what `datasets` and pandas save

Each may be compressed (.gz .zst .xz .bz2 .lz4) or remote. A row that cannot be read carries its
problem; what makes the rows behind it unreadable is a UserError. Tables may be larger than memory;
only JSON lists, and compressed .parquet and .arrow, are held in it.
"""

import codecs
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO, NamedTuple

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.files import parse_json
from deberta_ds.files.inputs import open_bytes, open_seekable, suffix_of
from deberta_ds.tokenizer.text import TO_UTF8

TABLE_KINDS = {".csv": "table", ".tsv": "table", ".jsonl": "json", ".ndjson": "json",
               ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_DELIMITERS = ",;\t|"
_LONGEST_CELL = 1 << 26  # characters, also of a line; the csv module's own limit is 128 Ki
_LONGEST_DOCUMENT = 1 << 30  # bytes of a line of a .json, which may be all of it
_JSON_REMEDIES = {"NaN": "write null", "is written twice": "name each key once",
                  "half a character": "write the text as UTF-8, or escape whole pairs",
                  "in double quotes": "write names and texts in double quotes, no comma at the end",
                  "Invalid": "write backslashes, tabs and line ends as \\\\, \\t and \\n",
                  "Extra data": "write one object a line, without a comma behind it"}
_BATCH_ROWS = 1024
_BAD_UTF8 = "invalid UTF-8"
_UTF16 = ((r"\xff\xfe", "utf-16"), (r"\xfe\xff", "utf-16"), (r"\0.", "utf-16-be"),
          (r".\0", "utf-16-le"))  # by the first two bytes; the last two are without a mark


class Row(NamedTuple):
    """One record. `values`: by column name; of JSON whatever is there. `problem`: why there are
    none. `number` counts rows from 0, `line` counts lines from 1 (0 in files without lines).
    """

    number: int
    line: int
    values: Any
    problem: str = ""


def read_table(path: str | Path, file: BinaryIO | None = None, **options
               ) -> Iterator[tuple[str, Any]]:
    """Yield (file and line, values) of each row; UserError for the first that cannot be read.

    `file`: the opened table, where `path` only names it (in an archive). Options: see `read_rows`.
    """
    for place, values in read_each(path, file, **options):
        if isinstance(values, UserError):
            raise values
        yield place, values


def read_each(path: str | Path, file: BinaryIO | None = None, **options
              ) -> Iterator[tuple[str, Any]]:
    """As `read_table`, but a row that cannot be read comes as its UserError, and others follow."""
    for row in read_rows(path, file, **options):
        place = f"{path}:{row.line}" if row.line else f"{path}:row {row.number + 1}"
        remedy = f"; {TO_UTF8}" if row.problem.startswith(_BAD_UTF8) else ""
        yield place, UserError(f"{place}: {row.problem}{remedy}") if row.problem else row.values


def read_rows(path: str | Path, file: BinaryIO | None = None, *,
              columns: Sequence[str] | None = None, names: Sequence[str] | None = (),
              header: bool = True, groups: range | None = None, quoted: bool | None = None,
              delimiter: str = "", encoding: str = "", class_names: bool = False,
              longest: int = _LONGEST_CELL) -> Iterator[Row]:
    """Yield the rows of a table, told apart by its suffix; bad ones have `problem` set.

    columns: those that are read (None: all). names: the columns of a .csv or .tsv without a header;
    None: rows are lists of cells, of any number. header: False: without names they are called 1, 2,
    ... groups: row groups of .parquet. quoted: cells of a .csv or .tsv may be quoted, as the csv
    module writes them (None: of a .csv; GLUE's tables have no quoting). delimiter: of a .csv or
    .tsv, if its header has it. encoding: see `as_utf8`. class_names: class numbers that `datasets`
    wrote with their names become these names. longest: characters of a cell.
    """
    path = str(path)
    suffix = suffix_of(path)
    kind = TABLE_KINDS[suffix]
    opener = open_seekable if kind in ("parquet", "arrow") else open_bytes
    with naming(path), nullcontext(file) if file else opener(path) as opened:
        if kind in ("json", "table"):
            opened = as_utf8(path, opened, encoding)
        if kind == "json":
            longest = _LONGEST_DOCUMENT if suffix == ".json" else _LONGEST_CELL
            yield from _json_rows(_lines(path, opened, longest), opened)
        elif kind == "table":
            is_raw = not (suffix == ".csv" if quoted is None else quoted)
            text = _lines(path, io.TextIOWrapper(
                opened, encoding="utf-8-sig", errors="surrogateescape",
                newline="\n" if is_raw else ""), max(longest, _LONGEST_CELL))
            first = next(text, "")
            before = int(first.startswith("sep="))  # Excel's line on the delimiter
            if before:
                delimiter = first[4:5]
            elif not delimiter or delimiter not in first:
                delimiter = "\t" if suffix == ".tsv" else max(
                    _DELIMITERS, key=re.sub('"[^"]*"', "", first).count)
            lines = text if before else chain([first], text)
            rows = _unquoted(lines, before, delimiter) if is_raw else _quoted(
                path, lines, before, delimiter, longest)
            yield from _separated(path, rows, columns, names, header)
        else:
            yield from _arrow_rows(path, opened, kind, columns, groups, class_names)


def as_utf8(path: str | Path, file: BinaryIO, encoding: str = "") -> BinaryIO:
    """Return a file of text as UTF-8; of another `encoding`, or where it begins as UTF-16 does, it
    is held in memory. UserError if it is not of that encoding.
    """
    if not encoding:
        if hasattr(file, "peek"):
            start = file.peek(8)[:8]
        else:
            start = file.read(8)
            file.seek(0)
        if start.startswith((b"PK\3\4", b"\xd0\xcf\x11\xe0")):
            raise UserError(f"{path}: an Excel file or a ZIP archive under another name; save it "
                            "as CSV (UTF-8), or unpack it")
        encoding = next((name for mark, name in _UTF16
                         if re.match(mark.encode(), start, re.DOTALL)), "")
    if not encoding:
        return file
    text = file.read()
    with suppress(UnicodeError):  # only UTF-8 is read as such: this table has it after all
        if not encoding.lower().startswith("utf") and not text.isascii() and text.decode():
            return io.BytesIO(text)
    try:
        return io.BytesIO(text.decode(encoding).encode())
    except (UnicodeError, LookupError) as error:
        raise UserError(f"{path}: is not of the encoding {encoding} ({error}); name the one it was "
                        "saved in, such as cp1252 (Windows) or utf-16 (Excel's Unicode text)"
                        ) from None


def is_quoted(path: str | Path, **options) -> bool:
    """Return whether quotation marks in a .tsv enclose cells, as the csv module and pandas write
    them, and none is only a character. Options: see `read_rows`.
    """
    marks = first = width = inner = enclosed = 0
    try:
        with open_bytes(str(path)) as file:
            for line in _lines(path, as_utf8(path, file, options.get("encoding", ""))):
                marks += line.count(b'"')
                first = first or marks + 1
        for row in read_rows(path, names=None, quoted=True, **options) if marks else ():
            width = width or len(row.values)
            if len(row.values) not in (0, width):
                return False
            inner += sum(cell.count('"') for cell in row.values)
            enclosed += sum(bool(re.search('["\t\n]', cell)) for cell in row.values)
    except UserError:
        return False
    return (enclosed > 0 or first - 1 == 2 * width > 0) and marks >= 2 * (inner + enclosed)


def check_columns(wanted: Iterable[str], available: Sequence[str], path: str) -> None:
    """UserError if a column is not among those `available`, or more than once."""
    for name in wanted:
        if name not in available:
            raise UserError(f"{path}: no column {name!r}; name one of {', '.join(available)}")
        if available.count(name) > 1:
            raise UserError(f"{path}: more than one column {name!r}; rename the others")


def text_lines(path: str | Path, file: BinaryIO | None = None, encoding: str = ""
               ) -> Iterator[tuple[str, str]]:
    """Yield (place, line) of UTF-8 text; only a line feed ends a line (texts hold U+2028)."""
    with naming(path), nullcontext(file) if file else open_bytes(str(path)) as opened:
        for number, line in enumerate(_lines(path, as_utf8(path, opened, encoding)), start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: {_BAD_UTF8} ({error.reason}); {TO_UTF8}"
                                ) from None
            yield f"{path}:{number}", text.removesuffix("\n").removesuffix("\r")


def _json_rows(lines: Iterator[bytes], file: BinaryIO) -> Iterator[Row]:
    """Yield the values of `lines`, those of `file`; all of it is one value where it begins so."""
    number = 0
    for line_number, line in enumerate(lines, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
        if not line.strip():
            continue
        value, problem = _parsed(line)
        if problem and number == 0 and (line.strip() == b"{" or line.lstrip().startswith(b"[")):
            value, problem = _parsed(line + file.read())  # one value on many lines
        if number == 0 and isinstance(value, list) and not is_pair(value):
            yield from (Row(entry, 0, part) for entry, part in enumerate(value))
        else:
            yield Row(number, line_number, value, problem)
        number += 1


def _parsed(line: bytes) -> tuple[Any, str]:
    """Return (value, "") or (None, what is wrong)."""
    try:
        return parse_json(line), ""
    except UnicodeDecodeError as error:
        return None, f"{_BAD_UTF8} ({error.reason})"
    except ValueError as error:
        remedy = next((remedy for sign, remedy in _JSON_REMEDIES.items() if sign in str(error)),
                      "a line cut short means a download that stopped")
        return None, f"not a JSON object ({error}); {remedy}"


def is_pair(value: Any) -> bool:
    """Return whether a JSON value is a text and what is said of it, as spaCy has them."""
    return isinstance(value, list) and [type(part) for part in value] == [str, dict]


def _separated(path: str, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str] | None,
               names: Sequence[str] | None, has_header: bool) -> Iterator[Row]:
    """Yield a Row for each (line, cells); without cells (blank lines) there is none."""
    if names is None:
        for number, (line, cells) in enumerate(rows):
            yield Row(number, line, cells, "" if _is_utf8(cells) else _BAD_UTF8)
        return
    header = list(names)
    if not header:
        line, header = next(((line, cells) for line, cells in rows if cells), (0, []))
        if not has_header:
            rows = chain([(line, header)], rows)
            header = [str(number) for number in range(1, len(header) + 1)]
    if not _is_utf8(header):
        raise UserError(f"{path}: its header is not UTF-8; {TO_UTF8}")
    if not any(header):
        raise UserError(f"{path}:1: no column names; the first line must name the columns")
    check_columns(columns or header, header, path)
    places = [(name, header.index(name)) for name in columns or header]
    number = blank = 0
    for line, cells in rows:
        if not cells:
            blank = blank or line
            continue
        if blank and len(header) == 1 and columns is None:  # who reads whole rows counts them
            yield Row(number, blank, None, f"an empty line, in a table of one column {header[0]!r};"
                      " fill it in or delete it, or the rows behind it would be counted wrongly")
        values, problem = None, ""
        if len(cells) != len(header):
            problem = f"{len(cells)} columns, the header has {len(header)}"
        else:
            values = {name: cells[place] for name, place in places}
            problem = "" if _is_utf8(values.values()) else _BAD_UTF8
        yield Row(number, line, values, problem)
        number += 1


def _is_utf8(cells: Iterable[str]) -> bool:
    """Return whether cells that were read with "surrogateescape" had no invalid byte."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(path: str | Path, file: IO[AnyStr], longest: int = 0) -> Iterator[AnyStr]:
    """Yield lines; UserError for one that could fill the memory."""
    number, longest = 0, longest or _LONGEST_CELL
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            unit = "bytes" if isinstance(line, bytes) else "characters"
            raise UserError(f"{path}:{number}: a line of more than {longest:,} {unit}; fix its "
                            "line ends, or give the file as .parquet")
        yield line


def _unquoted(lines: Iterable[str], before: int, delimiter: str
              ) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of lines in which a quotation mark is only a character."""
    for number, line in enumerate(lines, start=before + 1):
        line = line.removesuffix("\n").removesuffix("\r")
        yield number, line.split(delimiter) if line else []


def _quoted(path: str, lines: Iterable[str], before: int, delimiter: str, longest: int
            ) -> Iterator[tuple[int, list[str]]]:
    """Yield (last line, cells) of rows whose cells may be quoted, and hold line ends then.

    `before`: lines that were read already. UserError for tab-separated rows, of two columns or
    more, that are one with quotation marks and several without.
    """
    csv.field_size_limit(longest)
    pending: list[str] = []  # lines of the row that is read, between tabs

    def kept_lines() -> Iterator[str]:
        for line in lines:
            pending.append(line)
            yield line

    rows = csv.reader(kept_lines() if delimiter == "\t" else lines, delimiter=delimiter,
                      strict=True)
    width = 0
    try:
        for cells in rows:
            width = width or len(cells)
            if len(pending) > 1 and width > 1 and (
                    pending[0].count("\t") == pending[-1].count("\t") == width - 1):
                raise UserError(
                    f"{path}:{before + rows.line_num - len(pending) + 1}: quotation marks make one "
                    f"row of {len(pending)} lines, of which the first and the last would be rows "
                    "without them; give .jsonl, .parquet or .csv, which leave no doubt")
            pending.clear()
            yield before + rows.line_num, cells
    except csv.Error as error:
        raise UserError(
            f"{path}:{before + rows.line_num}: {error}; a cell with a quotation mark in it is "
            f'quoted, with "" for the mark, and no cell is longer than {longest:,} characters'
        ) from error


def _arrow_rows(path: str, file: BinaryIO, kind: str, columns: Sequence[str] | None,
                groups: range | None, class_names: bool) -> Iterator[Row]:
    import pyarrow.ipc
    import pyarrow.parquet

    number = 0
    if kind == "parquet":
        parquet = pyarrow.parquet.ParquetFile(file)
        schema = parquet.schema_arrow
        groups = range(parquet.num_row_groups) if groups is None else groups
        number = sum(parquet.metadata.row_group(group).num_rows for group in range(groups.start))
        batches: Iterable = chain.from_iterable(  # one group at a time: all would stay in memory
            parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
            for group in groups)
    else:
        is_stream = file.read(6) != b"ARROW1"  # a stream is what `datasets` writes
        file.seek(0)
        reader = pyarrow.ipc.open_stream(file) if is_stream else pyarrow.ipc.open_file(file)
        schema = reader.schema
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    columns = columns and list(dict.fromkeys(  # of meta.text it is meta
        name if name in schema.names else name.partition(".")[0] for name in columns))
    check_columns(columns or schema.names, schema.names, path)
    classes = _class_names(schema.metadata) if class_names else {}
    classes = {name: classes[name] for name in columns or schema.names if name in classes}
    for batch in batches:
        for values in _records(batch.select(columns or schema.names)):
            if values and classes:
                values |= {column: named(values[column], names, f"{path}:row {number + 1}")
                           for column, names in classes.items()}
            yield Row(number, 0, values, _BAD_UTF8 if values is None else "")
            number += 1


def _records(batch) -> list[dict | None]:
    """Return the rows of a record batch, None for those with invalid UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [record for row in range(batch.num_rows) for record in _records(batch.slice(row, 1))]


def _class_names(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return {column: names by number} of class labels (also in lists) that `datasets` wrote."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
        inner = {name: feature.get("feature", feature) for name, feature in features.items()}
        return {name: list(feature["names"]) for name, feature in inner.items()
                if feature.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, ValueError, AttributeError):  # written by something else
        return {}


def named(value: Any, names: list[str], place: str) -> Any:
    """Return the name of a class number, in lists too; -1 means that there is no label."""
    if isinstance(value, list):
        return [named(part, names, place) for part in value]
    if value is None or value == -1:
        return None
    if not 0 <= value < len(names):
        raise UserError(f"{place}: class {value}, but the file names {len(names)} classes")
    return names[value]
