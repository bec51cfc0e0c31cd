"""One work unit -> its documents, in order and in bounded memory; bad ones carry their problem."""

import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path

import orjson
import zstandard

from deberta_ds.data.prep.documents import Document, Extent, ReadOptions
from deberta_ds.data.prep.inputs import COMPRESSED_SUFFIXES, open_bytes, open_seekable, open_stream
from deberta_ds.data.prep.warc import read_records
from deberta_ds.errors import UserError, naming

_BLOCK_BYTES = 1 << 18
_EMPTY: dict = {}  # what an empty line of JSON lines stands for


def read_unit(unit: list[Extent], options: ReadOptions) -> Iterator[Document]:
    """Yield the documents of one unit in order; unreadable ones have `problem` set."""
    readers = {"text": _read_lines, "json": _read_lines, "table": _read_table,
               "warc": _read_warc, "parquet": _read_parquet, "arrow": _read_arrow,
               "stream": _read_stream}
    for extent in joined(unit):
        with naming(extent.path):
            try:
                yield from readers[extent.kind](extent, options)
            except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError,
                    RuntimeError) as error:
                if isinstance(error, RuntimeError) and not str(error).startswith("LZ4"):
                    raise  # lz4 has no class of its own for damage
                raise UserError(
                    f"{extent.path}: damaged or cut short ({error}); fetch the file again"
                ) from error


def joined(unit: list[Extent]) -> Iterator[Extent]:
    """Yield the extents of a unit, row groups of a parquet file that follow each other as one: each
    reading of its footer takes as long as all of its groups are many.
    """
    before = None
    for extent in unit:
        if before and extent.kind == "parquet" and (before.path, before.end) == (
                extent.path, extent.start):
            before = replace(before, end=extent.end)
            continue
        if before:
            yield before
        before = extent
    if before:
        yield before


def _directory_label(extent: Extent, options: ReadOptions) -> str:
    return Path(extent.path).parent.name if options.label_from_directory else ""


def _read_lines(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    label = _directory_label(extent, options)
    with open_bytes(extent.path) as file:
        compressed = extent.path.endswith(COMPRESSED_SUFFIXES)
        end = None if compressed else extent.end
        if extent.kind == "json":
            for where, lines, problem in _line_blocks(file, extent.start, end, options):
                yield from _json_documents(extent.path, where, lines, problem, label, options)
        elif options.documents == "file":
            data = file.read(options.max_document_bytes + 1)
            yield _text_document(extent.path, 0, [data], len(data), label, options)
        else:
            yield from _broken_text(file, extent, end, label, options)


def _line_blocks(
    file, start: int, end: int | None, options: ReadOptions
) -> Iterator[tuple[int, list[bytes], str]]:
    """Yield (offset, lines, problem): the lines that start in [start, end), many at a time.

    A line over the size limit is passed over in pieces; it comes alone, as b"" with a problem.
    """
    limit = options.max_document_bytes
    position = start
    if start:
        file.seek(start - 1)
        position += _pass_line(file, limit) - 1
    while end is None or position < end:
        size = min(_BLOCK_BYTES, limit)
        data = file.read(size if end is None else min(size, end - position))
        if not data:
            return
        if not data.endswith(b"\n"):
            data += file.readline(limit)
        lines, where = io.BytesIO(data).readlines(), position
        position += len(data)
        last = lines[-1]
        if len(last) <= limit - (not last.endswith(b"\n")):
            yield where, lines, ""
            continue
        yield where, lines[:-1], ""
        where = position - len(last)
        if not last.endswith(b"\n"):
            position += _pass_line(file, limit)
        yield where, [b""], f"longer than {limit} bytes; raise --max_document_bytes"


def _pass_line(file, limit: int) -> int:
    passed = 0
    while line := file.readline(limit):
        passed += len(line)
        if line.endswith(b"\n"):
            break
    return passed


def _broken_text(
    file, extent: Extent, end: int | None, label: str, options: ReadOptions
) -> Iterator[Document]:
    """Documents that start at a break line inside the extent (or at the start of the file)."""
    is_break = _break_rule(options.documents)
    parts: list[bytes] | None = [] if extent.start == 0 else None  # None: no document is open
    where = position = 0

    def finished() -> Iterator[Document]:
        if parts is None or position == 0:
            return
        document = _text_document(extent.path, where, parts, position - where, label, options)
        if options.documents == "line" or document.problem or document.text.strip():
            yield document

    for position, lines, problem in _line_blocks(file, extent.start, None, options):
        begin = 0
        for index in compress(range(len(lines)), map(is_break, lines)) if not problem else (0,):
            position += _add(parts, lines[begin:index], position - where, options)
            yield from finished()
            if end is not None and position >= end:
                return
            parts, where, begin = [], position, index
            if problem:
                yield Document("", extent.path, position, extent.kind, label, problem)
                parts = None
        position += _add(parts, lines[begin:], position - where, options)
    yield from finished()


def _add(parts: list[bytes] | None, lines: list[bytes], size: int, options: ReadOptions) -> int:
    """Add lines to a document of `size` bytes, if one is open and not too large; return theirs."""
    if parts is not None and size < options.max_document_bytes:
        parts += lines
    return sum(map(len, lines))


def _break_rule(documents: str):
    if documents == "line":
        return lambda line: True
    if documents == "blank_line":
        return lambda line: not line.strip()
    if documents.startswith("match:"):
        try:
            pattern = re.compile(documents.removeprefix("match:"))
        except re.error as error:
            raise UserError(f"--documents {documents}: bad pattern ({error})") from error
        return lambda line: pattern.match(line.decode("utf-8", "replace").replace("\r\n", "\n"))
    raise UserError(f"--documents {documents}: must be file, line, blank_line or match:PATTERN")


def _text_document(
    path: str, where: int, parts: list[bytes], size: int, label: str, options: ReadOptions
) -> Document:
    if size > options.max_document_bytes:
        problem = (
            f"a document longer than {options.max_document_bytes} bytes; split it with --documents "
            "line, blank_line or match:PATTERN, or raise --max_document_bytes"
        )
        return Document("", path, where, "text", label, problem)
    data = b"".join(parts)
    try:
        return Document(data.decode("utf-8"), path, where, "text", label)
    except UnicodeDecodeError as error:
        bad = where + error.start
        problem = f"invalid UTF-8 ({error.reason}) at byte {bad}"
        return Document("", path, bad, "text", label, problem)


def _json_documents(
    path: str, where: int, lines: list[bytes], problem: str, label: str, options: ReadOptions
) -> Iterator[Document]:
    key, loads, new = options.text_key, orjson.loads, tuple.__new__
    usual = not (options.label_key or options.id_key or problem)
    for line in lines:
        try:  # the usual line, in half the time
            text = loads(line)[key] if usual else ""
        except (ValueError, TypeError, KeyError):
            text = ""
        if text.__class__ is str and text:
            yield new(Document, (text, path, where, "json", label, "", ""))
        else:
            yield _json_document(path, where, line, problem, label, options)
        where += len(line)


def _json_document(
    path: str, where: int, line: bytes, problem: str, label: str, options: ReadOptions
) -> Document:
    text = name = ""
    if where == 0:
        line = line.removeprefix(codecs.BOM_UTF8)
    if not problem:
        try:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = _parse_again(line)
            text, problem, label, name = _fields(record, label, options)
            (label + name).encode()
        except UnicodeEncodeError:
            text = label = name = ""
            problem = "half of a surrogate pair in its id or label"
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 ({error.reason}) at byte {where + error.start}"
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({error})"
            if where == 0 and line.strip() in (b"{", b"["):
                problem = "a JSON value over many lines; each line must be an object of its own"
    return Document(text, path, where, "json", label, problem, name)


def _parse_again(line: bytes):
    """Return the value of what orjson refuses."""
    if not line.strip():
        return _EMPTY
    return json.loads(line.decode())  # knows NaN, which Python writes, and names the fault


def _fields(record, label: str, options: ReadOptions) -> tuple[str, str, str, str]:
    """Return (text, problem, label, id) of one record."""
    text = record.get(options.text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "", _why_no_text(record, options), label, ""
    if options.label_key:
        value = record.get(options.label_key)
        label = "" if value is None else str(value)
    if not options.id_key:
        return text, "", label, ""
    name = record.get(options.id_key)
    if name is None or name == "":
        return "", f"no id under {options.id_key!r}; see --id_key", label, ""
    if not isinstance(name, str | int) or isinstance(name, bool):  # two may read the same then
        return "", (f"its id under {options.id_key!r} is neither text nor a whole number of at "
                    "most 64 bits"), label, ""
    return text, "", label, str(name)


def _why_no_text(record, options: ReadOptions) -> str:
    """Return what is wrong with a record without a text; "" if it stands for an empty line."""
    if record is _EMPTY:
        return ""
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, not an object"
    if options.text_key in record:
        value = record[options.text_key]
        kind = "null" if value is None else type(value).__name__
        return f"no string under {options.text_key!r} but {kind}"
    found = ", ".join(map(str, record)) or "nothing"
    return f"no string under {options.text_key!r} (found: {found}); see --text_key"


def _columns(options: ReadOptions, available: list[str], path: str) -> list[str]:
    wanted = [options.text_key] + [key for key in (options.label_key, options.id_key) if key]
    for name in wanted:
        if name not in available:
            raise UserError(f"{path}: no column {name!r} (found: {', '.join(available)})")
    return wanted


def _read_table(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    """Rows of .csv (comma) or .tsv (tab) with a header; quoted fields may hold line ends."""
    label = _directory_label(extent, options)
    csv.field_size_limit(min(options.max_document_bytes, 1 << 31 - 1))
    with (
        open_bytes(extent.path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        rows = _cells(extent.path, text)
        header = next(rows, [])
        if not _is_utf8(header):
            raise UserError(f"{extent.path}: its header is not UTF-8; convert the file")
        wanted = _columns(options, header, extent.path)
        twice = [name for name in wanted if header.count(name) > 1]
        if twice:
            raise UserError(f"{extent.path}: more than one column {twice[0]!r}; rename the others")
        for row, cells in enumerate(rows):
            if len(cells) == len(header):
                record = dict(zip(header, cells, strict=True))
                found, problem, named, name = _fields(record, label, options)
                if not _is_utf8((found, named, name)):
                    found, named, name, problem = "", label, "", "invalid UTF-8"
            else:  # as where a text has a comma and no quotation marks: part of it would be lost
                found, named, name = "", label, ""
                problem = f"{len(cells)} cells, the header names {len(header)}"
            yield Document(found, extent.path, row, extent.kind, named, problem, name)


def _is_utf8(cells: Iterable[str]) -> bool:
    """Return whether cells that were read with "surrogateescape" had no invalid byte."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


def _cells(path: str, text: io.TextIOWrapper) -> Iterator[list[str]]:
    """Yield the cells of each row; lines with nothing in them are none."""
    rows = csv.reader(text, delimiter="\t" if ".tsv" in Path(path).suffixes else ",", strict=True)
    try:
        yield from filter(None, rows)
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num}: {error}; a cell with a quotation mark in it is "
                        'quoted, with "" for the mark, and no cell is longer than '
                        "--max_document_bytes") from error


def _read_warc(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    label = _directory_label(extent, options)
    _columns(options, ["text", "url", "id", "language", "date"], extent.path)
    for number, record, problem in read_records(extent, options):
        found, missing, named, name = _fields(record, label, options)
        yield Document(found, extent.path, number, extent.kind, named, problem or missing, name)


def _read_parquet(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    import pyarrow.parquet

    if extent.start == extent.end:
        return
    with open_seekable(extent.path) as file:
        parquet = pyarrow.parquet.ParquetFile(file)
        columns = _columns(options, parquet.schema_arrow.names, extent.path)
        row = sum(parquet.metadata.row_group(i).num_rows for i in range(extent.start))
        for group in range(extent.start, extent.end):  # one at a time: all would stay in memory
            for batch in parquet.iter_batches(1024, row_groups=[group], columns=columns):
                yield from _read_batch(batch, row, extent, options)
                row += batch.num_rows


def _read_arrow(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    with open_seekable(extent.path) as file:
        names, batches = arrow_batches(file)
        columns = _columns(options, names, extent.path)
        row = 0
        for batch in batches:
            yield from _read_batch(batch.select(columns), row, extent, options)
            row += batch.num_rows


def arrow_batches(file) -> tuple[list[str], Iterator]:
    """Return (names of the columns, record batches) of an Arrow file or stream."""
    import pyarrow.ipc

    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:  # what `datasets` writes
        batches = reader = pyarrow.ipc.open_stream(file)
    return reader.schema.names, batches


def _read_batch(batch, row: int, extent: Extent, options: ReadOptions) -> Iterator[Document]:
    directory = _directory_label(extent, options)
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError:  # in one of them
        records = [_record(batch.slice(offset, 1)) for offset in range(batch.num_rows)]
    for offset, record in enumerate(records):
        if record is None:
            yield Document("", extent.path, row + offset, extent.kind, directory, "invalid UTF-8")
            continue
        text, problem, label, name = _fields(record, directory, options)
        yield Document(text, extent.path, row + offset, extent.kind, label, problem, name)


def _record(row) -> dict | None:
    """Return the one record of a batch; None if its text is invalid UTF-8."""
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError:
        return None


def _read_stream(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    stream = open_stream(extent.path).shard(num_shards=extent.end, index=extent.start)
    for row, record in enumerate(stream):
        text, problem, label, name = _fields(record, "", options)
        place = f"{extent.path} (shard {extent.start})"
        yield Document(text, place, row, "stream", label, problem, name)
