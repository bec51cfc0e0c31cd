"""One work unit -> its documents, in order and in bounded memory; bad ones carry their problem."""

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path

import orjson

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError, naming
from deberta_ds.corpus.documents import BAD, Document, Extent, ReadOptions
from deberta_ds.corpus.identity import check_unchanged
from deberta_ds.corpus.warc import read_records
from deberta_ds.files.inputs import is_compressed, is_json_list, open_bytes, open_stream
from deberta_ds.files.tables import Row, check_columns, read_rows

_BLOCK_BYTES = 1 << 18
_EMPTY_LINE: dict = {}  # what an empty line of JSON lines stands for


def read_unit(unit: list[Extent], read: ReadOptions) -> Iterator[Document]:
    """Yield the documents of one unit in order; unreadable ones have `problem` set. `read`: how the
    extents are read that do not say so themselves.
    """
    for extent in _joined(unit):
        options = extent.read or read
        with naming(extent.path):
            if extent.kind == "json" and is_json_list(extent.path):
                yield from _read_records(replace(extent, kind="list"), options)
            elif extent.kind in ("text", "json"):
                yield from _read_lines(extent, options)
            elif extent.kind != BAD and (extent.start < extent.end or extent.kind != "parquet"):
                yield from _read_records(extent, options)
        check_unchanged([extent])


def _joined(unit: list[Extent]) -> Iterator[Extent]:
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


def _read_lines(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    label = _directory_label(extent, options)
    with open_bytes(extent.path) as file:
        end = None if is_compressed(extent.path) else extent.end
        if extent.kind == "json":
            for where, lines, problem in _line_blocks(file, extent.start, end, options):
                yield from _json_documents(extent.path, where, lines, problem, label, options)
        elif options.documents == "file":
            data = file.read(options.max_document_bytes + 1)
            yield _text_document(extent.path, 0, [data], len(data), label, options)
        elif reader := options.own_reader:
            read = user_code.load("documents", reader, ("data",))
            texts = user_code.call(lambda data: list(read(data)), reader, file.read())
            for number, text in enumerate(texts):
                if not isinstance(text, str):
                    raise UserError(f"documents: {reader} returned {type(text).__name__} for "
                                    f"{extent.path}; it must return the texts of a file")
                data = text.encode(errors="surrogatepass")
                yield _text_document(extent.path, number, [data], len(data), label, options
                                     )._replace(kind="own")
        else:
            with open_bytes(extent.path) as again:
                start = again.read(_BLOCK_BYTES)
            if b"\r" in start and b"\n" not in start:  # lines as on old Macs
                file = io.BytesIO(file.read().replace(b"\r", b"\n"))
            yield from _broken_text(file, extent, end, label, options)


def _line_blocks(
    file, start: int, end: int | None, options: ReadOptions
) -> Iterator[tuple[int, list[bytes], str]]:
    """Yield (offset, lines, problem): the lines that start in [start, end), many at a time.

    A line over the size limit is skipped in pieces; it comes alone, as b"" with a problem.
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
    raise UserError(f"--documents {documents}: must be file, line, blank_line, match:PATTERN or "
                    "FILE.py:NAME")


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
            text, problem, label, name = _fields_of(record, label, options)
            (label + name).encode()
        except UnicodeEncodeError:
            text = label = name = ""
            problem = "half of a surrogate pair in its id or label"
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 ({error.reason}) at byte {where + error.start}"
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({error})"
            if where == 0 and line.strip() == b"{":
                problem = "a JSON value over many lines, not one on each; jq -c writes it so"
    return Document(text, path, where, "json", label, problem, name)


def _parse_again(line: bytes):
    """Return the value of what orjson rejects."""
    if not line.strip():
        return _EMPTY_LINE
    return json.loads(line.decode())  # knows NaN, which Python writes, and names the fault


def _read_records(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    """Yield the documents of a format that has records: tables, web archives, streams."""
    wanted = [options.text_key, *filter(None, (options.label_key, options.id_key))]
    place, rows = extent.source, _records_of(extent, options, list(dict.fromkeys(wanted)))
    directory = _directory_label(extent, options)
    for number, _, values, problem in rows:
        text = name = ""
        label = directory
        if not problem:
            text, problem, label, name = _fields_of(values, directory, options)
        yield Document(text, place, number, extent.kind, label, problem, name)


def _records_of(extent: Extent, options: ReadOptions, columns: list[str]) -> Iterable[Row]:
    if extent.kind == "stream":
        stream = open_stream(extent.path, extent.state).shard(
            num_shards=extent.end, index=extent.start)
        return (Row(number, 0, values) for number, values in enumerate(stream))
    if extent.kind == "warc":
        check_columns(columns, ["text", "url", "id", "language", "date"], extent.path)
        return (Row(number, 0, fields, problem)
                for number, fields, problem in read_records(extent, options))
    groups = range(extent.start, extent.end) if extent.kind == "parquet" else None
    if extent.kind == "list":
        return read_rows(extent.path)
    return read_rows(extent.path, columns=columns, groups=groups, quoted=True,
                     longest=min(options.max_document_bytes, 1 << 30))


def _directory_label(extent: Extent, options: ReadOptions) -> str:
    return Path(extent.path).parent.name if options.label_from_directory else ""


def _fields_of(record, label: str, options: ReadOptions) -> tuple[str, str, str, str]:
    """Return (text, problem, label, id) of one record."""
    text = _value(record, options.text_key) if isinstance(record, dict) else None
    if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
        text = "\n\n".join(text)  # paragraphs
    if isinstance(text, bytes):  # as some programs write strings to parquet
        text = text.decode("utf-8", "surrogateescape")
    if not isinstance(text, str):
        return "", _why_no_text(record, options), label, ""
    if options.label_key:
        value = _value(record, options.label_key)
        label = "" if value is None else str(value)
    if not options.id_key:
        return text, "", label, ""
    name = _value(record, options.id_key)
    if name is None or name == "":
        return "", f"no id under {options.id_key!r}; see --id_key", label, ""
    if not isinstance(name, str | int) or isinstance(name, bool):  # two may read the same then
        return "", (f"its id under {options.id_key!r} is neither text nor a whole number of at "
                    "most 64 bits"), label, ""
    return text, "", label, str(name)


def _value(record: dict, key: str):
    """Return what a record has under a key; "meta.text" is also the key text under meta."""
    if key in record or "." not in key:
        return record.get(key)
    first, _, rest = key.partition(".")
    inner = record.get(first)
    return _value(inner, rest) if isinstance(inner, dict) else None


def _why_no_text(record, options: ReadOptions) -> str:
    """Return what is wrong with a record without a text; "" if it stands for an empty line."""
    if record is _EMPTY_LINE:
        return ""
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, not an object"
    value = _value(record, options.text_key)
    if isinstance(value, dict):
        record = [f"{options.text_key}.{key}" for key in value]
    elif options.text_key in record or value is not None:
        kind = "null" if value is None else type(value).__name__
        return f"no string under {options.text_key!r} but {kind}"
    found = ", ".join(map(str, record)) or "nothing"
    return f"no string under {options.text_key!r} (found: {found}); see --text_key"
