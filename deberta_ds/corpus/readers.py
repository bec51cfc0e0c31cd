"""One work unit -> its documents, in order and in bounded memory; bad ones carry their problem.

Of web archives, .warc and .wet files (package fastwarc), a record of type `conversion` is text, as
Common Crawl's .wet files hold it. Pages as they were fetched (`response` records: HTTP 200, HTML)
become documents if `extract_html` asks for it: their main text, by resiliparse. All other records
are no text, and are skipped.
"""

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
from deberta_ds.base.errors import UserError, naming, of_extra
from deberta_ds.corpus.documents import BAD, Document, Extent, ReadOptions
from deberta_ds.corpus.units import check_unchanged
from deberta_ds.files.inputs import is_compressed, is_json_list, open_bytes, open_stream
from deberta_ds.files.tables import Row, check_columns, read_rows

_BLOCK_BYTES = 1 << 18
_EMPTY_LINE: dict = {}  # what an empty line of JSON lines stands for
_HTML = ("text/html", "application/xhtml+xml")
_END = b"\r\n\r\n"  # of every record of a web archive


def read_unit(unit: list[Extent], read: ReadOptions) -> Iterator[Document]:
    """Yield the documents of one unit in order; unreadable ones have `problem` set. `read`: how the
    extents are read that do not say so themselves.
    """
    for extent in _joined(unit):
        options = extent.read or read
        label = Path(extent.path).parent.name if options.label_from_directory else ""
        with naming(extent.path):
            if extent.kind == "json" and is_json_list(extent.path):
                yield from _read_records(replace(extent, kind="list"), label, options)
            elif extent.kind in ("text", "json"):
                yield from _read_lines(extent, label, options)
            elif extent.kind != BAD and (extent.start < extent.end or extent.kind != "parquet"):
                yield from _read_records(extent, label, options)
        check_unchanged([extent])


def _joined(unit: list[Extent]) -> list[Extent]:
    """Return the extents of a unit, row groups of a parquet file that follow each other as one: its
    footer, which grows with the number of all groups, is read once for each extent.
    """
    joined: list[Extent] = []
    for extent in unit:
        last = joined[-1] if joined and extent.kind == "parquet" else None
        if last and (last.path, last.end) == (extent.path, extent.start):
            joined[-1] = replace(last, end=extent.end)
        else:
            joined.append(extent)
    return joined


def _read_lines(extent: Extent, label: str, options: ReadOptions) -> Iterator[Document]:
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


def _line_blocks(file, start: int, end: int | None, options: ReadOptions
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


def _broken_text(file, extent: Extent, end: int | None, label: str, options: ReadOptions
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


def _text_document(path: str, where: int, parts: list[bytes], size: int, label: str,
                   options: ReadOptions) -> Document:
    if size > options.max_document_bytes:
        problem = (f"a document longer than {options.max_document_bytes} bytes; split it with "
                   "--documents line, blank_line or match:PATTERN, or raise --max_document_bytes")
        return Document("", path, where, "text", label, problem)
    try:
        return Document(b"".join(parts).decode("utf-8"), path, where, "text", label)
    except UnicodeDecodeError as error:
        where += error.start
        problem = f"invalid UTF-8 ({error.reason}) at byte {where}"
        return Document("", path, where, "text", label, problem)


def _json_documents(path: str, where: int, lines: list[bytes], problem: str, label: str,
                    options: ReadOptions) -> Iterator[Document]:
    if problem:
        yield Document("", path, where, "json", label, problem)
        return
    key, loads, new = options.text_key, orjson.loads, tuple.__new__
    usual = not (options.label_key or options.id_key)
    for line in lines:
        try:  # the usual line, in half the time
            text = loads(line)[key] if usual else ""
        except (ValueError, TypeError, KeyError):
            text = ""
        if text.__class__ is str and text:
            yield new(Document, (text, path, where, "json", label, "", ""))
        else:
            yield _json_document(path, where, line, label, options)
        where += len(line)


def _json_document(path: str, where: int, line: bytes, label: str, options: ReadOptions
                  ) -> Document:
    text = name = ""
    line = line.removeprefix(codecs.BOM_UTF8) if where == 0 else line
    try:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:  # json knows NaN, which Python writes, and names the fault
            record = json.loads(line.decode()) if line.strip() else _EMPTY_LINE
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


def _read_records(extent: Extent, directory: str, options: ReadOptions) -> Iterator[Document]:
    """Yield the documents of a format that has records: tables, web archives, streams."""
    wanted = [options.text_key, *filter(None, (options.label_key, options.id_key))]
    for number, _, values, problem in _records_of(extent, options, list(dict.fromkeys(wanted))):
        text, label, name = "", directory, ""
        if not problem:
            text, problem, label, name = _fields_of(values, directory, options)
        yield Document(text, extent.source, number, extent.kind, label, problem, name)


def _records_of(extent: Extent, options: ReadOptions, columns: list[str]) -> Iterable[Row]:
    if extent.kind == "stream":
        stream = open_stream(extent.path, extent.state).shard(
            num_shards=extent.end, index=extent.start)
        return (Row(number, 0, values) for number, values in enumerate(stream))
    if extent.kind == "warc":
        check_columns(columns, ["text", "url", "id", "language", "date"], extent.path)
        return _web_records(extent, options)
    groups = range(extent.start, extent.end) if extent.kind == "parquet" else None
    if extent.kind == "list":
        return read_rows(extent.path)
    return read_rows(extent.path, columns=columns, groups=groups, quoted=True,
                     longest=min(options.max_document_bytes, 1 << 30))


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


def _web_records(extent: Extent, options: ReadOptions) -> Iterator[Row]:
    """Yield the records of a web archive: text, url, id, language and date.

    UserError for a file that is cut short, and for one that holds pages where texts are wanted.
    """
    with of_extra("archives", extent.path):
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    pages, texts = 0, 0
    with open_bytes(extent.path) as file:
        stream = _Stream(file)
        for number, record in enumerate(ArchiveIterator(stream, parse_http=False)):
            is_page = record.record_type == WarcRecordType.response
            pages += is_page
            try:
                if record.record_type != WarcRecordType.conversion and not (
                        is_page and options.extract_html and _is_html(record)):
                    continue
            except OSError as error:
                yield Row(number, 0, {}, f"damaged HTTP headers ({error})")
                continue
            texts += 1
            data = record.reader.read(options.max_document_bytes + 1)
            length = record.headers.get("Content-Length", "")
            if not is_page and (not length.isdecimal() or len(data) < min(
                    int(length), options.max_document_bytes)):
                raise EOFError(f"record {number + 1} has no end")
            yield Row(number, 0, *_web_fields(record, data, is_page, options))
    if stream.last and not stream.last.endswith(_END):
        raise EOFError("the last record has no end")
    if pages and not texts and not options.extract_html:
        raise UserError(f"{extent.path}: holds {pages} pages and no text; give --extract_html, or "
                        "the .wet file of these pages")


def _web_fields(record, data: bytes, is_page: bool, options: ReadOptions) -> tuple[dict, str]:
    headers = record.headers
    fields = {"url": headers.get("WARC-Target-URI", ""), "id": headers.get("WARC-Record-ID", ""),
              "language": headers.get("WARC-Identified-Content-Language", "").partition(",")[0],
              "date": headers.get("WARC-Date", ""), "text": ""}
    if len(data) > options.max_document_bytes:
        return fields, (f"a record longer than {options.max_document_bytes} bytes; raise "
                        "--max_document_bytes")
    if is_page:
        return fields | {"text": _main_text(data, record.http_charset)}, ""
    try:
        return fields | {"text": data.decode("utf-8")}, ""
    except UnicodeDecodeError as error:
        return fields, f"invalid UTF-8 ({error.reason}) at byte {error.start} of the record"


def _is_html(record) -> bool:
    record.parse_http(auto_decode="all")
    return (record.is_http_parsed and record.http_headers.status_code == 200
            and record.http_content_type in _HTML)


def _main_text(data: bytes, charset: str | None) -> str:
    with of_extra("archives", "--extract_html"):
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    text = bytes_to_str(data, charset or detect_encoding(data))
    return extract_plain_text(text, main_content=True, alt_texts=False)


class _Stream:
    """A file whose last bytes are remembered: fastwarc ends in silence where a header is cut."""

    def __init__(self, file):
        self._file, self.last = file, b""

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.last = (self.last + data)[-len(_END):]
        return data

    def tell(self) -> int:
        return self._file.tell()
