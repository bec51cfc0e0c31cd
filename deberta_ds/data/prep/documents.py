"""Files of any size and kind -> work units -> documents, in bounded memory.

Text (.txt, .md), JSON lines (.jsonl), both also as .gz or .zst; .parquet; .arrow; and Hub datasets
as `hub:NAME[@CONFIG][#SPLIT]`, streamed. Paths may be remote (fsspec). Plain text and JSON lines
are split into byte ranges, so one file of 100 GB keeps all workers busy; small files share a unit.

A document of a text file is the whole file, a line, a block between blank lines, or what lies
between lines that match a pattern. A line belongs to the byte range in which it starts.
"""

import glob
import gzip
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import zstandard

from deberta_ds.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".text")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSED_SUFFIXES = (".gz", ".zst")
_SMALLEST_UNIT, _LARGEST_UNIT = 1 << 20, 1 << 28


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. `documents`: "file", "line", "blank_line" or "match:PATTERN"."""

    documents: str = "file"
    text_key: str = "text"
    label_key: str = ""
    label_from_directory: bool = False
    max_document_bytes: int = 1 << 26


@dataclass(frozen=True)
class Span:
    """Part of one input: bytes [start, end), or row groups of parquet, or one shard of a stream."""

    path: str
    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """One raw document. `where`: its byte offset or row. `problem`: why it cannot be read."""

    text: str
    path: str
    where: int
    kind: str
    label: str = ""
    problem: str = ""

    def place(self) -> str:
        """Return file:line (or file:row) for messages; counts line ends, so only for errors."""
        if self.kind in ("text", "json"):
            return f"{self.path}:{_line_number(self.path, self.where)}"
        return f"{self.path}:row {self.where + 1}"


def plan_units(inputs: list[str], options: ReadOptions, unit_bytes: int = 0) -> list[list[Span]]:
    """Return the work units of `inputs` (files, directories, patterns, URLs, hub: names), in order.

    `unit_bytes` 0 chooses a 64th of the input, between 1 and 256 MiB. The result depends on the
    inputs and options alone. UserError for a missing, empty or unknown input.
    """
    spans = [span for name in inputs for span in _whole_inputs(name)]
    if not spans:
        raise UserError(f"no input files in {' '.join(inputs)}")
    total = sum(size for _, size in spans)
    limit = unit_bytes or min(max(total // 64, _SMALLEST_UNIT), _LARGEST_UNIT)
    units: list[list[Span]] = []
    room = 0
    for span, size in spans:
        for part, part_size in _split(span, size, limit, options):
            if part_size > room:
                units.append([])
                room = limit
            units[-1].append(part)
            room -= part_size
    return units


def read_unit(unit: list[Span], options: ReadOptions) -> Iterator[Document]:
    """Yield the documents of one unit in order; unreadable ones have `problem` set."""
    for span in unit:
        if span.kind in ("text", "json"):
            yield from _read_lines(span, options)
        elif span.kind == "parquet":
            yield from _read_parquet(span, options)
        elif span.kind == "arrow":
            yield from _read_arrow(span, options)
        else:
            yield from _read_stream(span, options)


def _whole_inputs(name: str) -> Iterator[tuple[Span, int]]:
    if name.startswith("hub:"):
        count = _open_stream(name).num_shards
        for index in range(count):
            yield Span(name, "stream", index, count), _LARGEST_UNIT
        return
    if "://" in name:
        filesystem, path = fsspec.core.url_to_fs(name)
        if not filesystem.exists(path):
            raise UserError(f"{name}: no such file or directory")
        found = sorted(filesystem.find(path))
        sizes = [(filesystem.unstrip_protocol(p), filesystem.size(p)) for p in found]
    else:
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not paths:
            raise UserError(f"{name}: no such file or directory")
        sizes = [item for path in paths for item in _local_files(path)]
    for path, size in sizes:
        kind = input_kind(path)
        if kind is None:
            if path == name:
                raise UserError(
                    f"{path}: unknown kind of file; known are .txt .md .jsonl (each also .gz "
                    "and .zst), .parquet and .arrow"
                )
            continue
        yield Span(path, kind, 0, size), size


def _local_files(path: str) -> Iterator[tuple[str, int]]:
    if not os.path.isdir(path):
        yield path, os.path.getsize(path)
        return
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.name.startswith("."):
                yield from _local_files(entry.path)


def input_kind(path: str) -> str | None:
    """Return "text", "json", "parquet" or "arrow" by the suffix of `path`, None if unknown."""
    stem, suffix = os.path.splitext(path)
    if suffix in COMPRESSED_SUFFIXES:
        suffix = os.path.splitext(stem)[1]
    if suffix in TEXT_SUFFIXES:
        return "text"
    if suffix in JSON_SUFFIXES:
        return "json"
    return suffix[1:] if suffix in (".parquet", ".arrow") else None


def _split(
    span: Span, size: int, limit: int, options: ReadOptions
) -> Iterator[tuple[Span, int]]:
    if span.kind == "parquet":
        yield from _split_parquet(span)
        return
    whole = span.path.endswith(COMPRESSED_SUFFIXES) or span.kind not in ("text", "json")
    if whole or size <= limit or (span.kind == "text" and options.documents == "file"):
        yield span, size
        return
    parts = -(-size // limit)
    edges = [size * part // parts for part in range(parts + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        yield Span(span.path, span.kind, start, end), end - start


def _split_parquet(span: Span) -> Iterator[tuple[Span, int]]:
    import pyarrow.parquet

    with _open(span.path) as file:
        metadata = pyarrow.parquet.ParquetFile(file).metadata
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).total_byte_size
            yield Span(span.path, span.kind, group, group + 1), size


def _open(path: str):
    """Open for reading bytes, decompressing by suffix; local files without detour."""
    raw = fsspec.open(path, "rb").open() if "://" in path else open(path, "rb")
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return zstandard.open(raw, "rb")
    return raw


def _read_lines(span: Span, options: ReadOptions) -> Iterator[Document]:
    label = Path(span.path).parent.name if options.label_from_directory else ""
    with _open(span.path) as file:
        compressed = span.path.endswith(COMPRESSED_SUFFIXES)
        end = None if compressed else span.end
        if span.kind == "json":
            for where, line, problem in _lines(file, span.start, end, options):
                yield _json_document(span.path, where, line, problem, label, options)
        elif options.documents == "file":
            data = file.read(options.max_document_bytes + 1)
            yield _text_document(span.path, 0, [data], len(data), label, options)
        else:
            yield from _broken_text(file, span, end, label, options)


def _lines(
    file, start: int, end: int | None, options: ReadOptions
) -> Iterator[tuple[int, bytes, str]]:
    """Yield (offset, line, problem) of each line that starts in [start, end); a line over the size
    limit is passed over in pieces and reported.
    """
    limit = options.max_document_bytes
    position = start
    if start:
        file.seek(start - 1)
        position += _pass_line(file, limit) - 1
    while end is None or position < end:
        line = file.readline(limit)
        if not line:
            return
        where, problem = position, ""
        position += len(line)
        if len(line) == limit and not line.endswith(b"\n"):
            position += _pass_line(file, limit)
            line, problem = b"", f"longer than {limit} bytes; raise --max_document_bytes"
        yield where, line, problem


def _pass_line(file, limit: int) -> int:
    passed = 0
    while line := file.readline(limit):
        passed += len(line)
        if line.endswith(b"\n"):
            break
    return passed


def _broken_text(
    file, span: Span, end: int | None, label: str, options: ReadOptions
) -> Iterator[Document]:
    """Documents that start at a break line inside the span (or at the start of the file)."""
    is_break = _break_rule(options.documents)
    keep_empty = options.documents == "line"
    parts: list[bytes] | None = [] if span.start == 0 else None
    size, where = 0, 0
    for position, line, problem in _lines(file, span.start, None, options):
        if problem or is_break(line):
            if parts is not None and (size or where):
                document = _text_document(span.path, where, parts, size, label, options)
                if keep_empty or document.problem or document.text.strip():
                    yield document
            if end is not None and position >= end:
                return
            parts, size, where = [], 0, position
            if problem:
                yield Document("", span.path, position, span.kind, label, problem)
                parts = None
                continue
        if parts is not None:
            size += len(line)
            if size <= options.max_document_bytes:
                parts.append(line)
    if parts:
        document = _text_document(span.path, where, parts, size, label, options)
        if keep_empty or document.problem or document.text.strip():
            yield document


def _break_rule(documents: str):
    if documents == "line":
        return lambda line: True
    if documents == "blank_line":
        return lambda line: not line.strip()
    if documents.startswith("match:"):
        try:
            return re.compile(documents.removeprefix("match:").encode()).match
        except re.error as error:
            raise UserError(f"--documents {documents}: bad pattern ({error})") from error
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


def _json_document(
    path: str, where: int, line: bytes, problem: str, label: str, options: ReadOptions
) -> Document:
    text = ""
    if not problem:
        try:
            record = json.loads(line.decode("utf-8")) if line.strip() else {options.text_key: ""}
            text, problem, label = _fields(record, label, options)
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 ({error.reason}) at byte {where + error.start}"
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({error})"
    return Document(text, path, where, "json", label, problem)


def _fields(record, label: str, options: ReadOptions) -> tuple[str, str, str]:
    """Return (text, problem, label) of one record."""
    if not isinstance(record, dict):
        return "", f"a JSON {type(record).__name__}, not an object", label
    text = record.get(options.text_key)
    if not isinstance(text, str):
        found = ", ".join(map(str, record)) or "nothing"
        return "", f"no string under {options.text_key!r} (found: {found}); see --text_key", label
    if options.label_key:
        label = str(record.get(options.label_key, ""))
    return text, "", label


def _columns(options: ReadOptions, available: list[str], path: str) -> list[str]:
    wanted = [options.text_key] + ([options.label_key] if options.label_key else [])
    for name in wanted:
        if name not in available:
            raise UserError(f"{path}: no column {name!r} (found: {', '.join(available)})")
    return wanted


def _read_parquet(span: Span, options: ReadOptions) -> Iterator[Document]:
    import pyarrow.parquet

    with _open(span.path) as file:
        parquet = pyarrow.parquet.ParquetFile(file)
        columns = _columns(options, parquet.schema_arrow.names, span.path)
        row = sum(parquet.metadata.row_group(i).num_rows for i in range(span.start))
        groups = list(range(span.start, span.end))
        for batch in parquet.iter_batches(1024, row_groups=groups, columns=columns):
            yield from _read_batch(batch, row, span, options)
            row += batch.num_rows


def _read_arrow(span: Span, options: ReadOptions) -> Iterator[Document]:
    import pyarrow

    with _open(span.path) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = reader = pyarrow.ipc.open_stream(file)
        columns = _columns(options, reader.schema.names, span.path)
        row = 0
        for batch in batches:
            yield from _read_batch(batch.select(columns), row, span, options)
            row += batch.num_rows


def _read_batch(batch, row: int, span: Span, options: ReadOptions) -> Iterator[Document]:
    for offset, record in enumerate(batch.to_pylist()):
        text, problem, label = _fields(record, "", options)
        yield Document(text, span.path, row + offset, span.kind, label, problem)


def _open_stream(name: str):
    import datasets

    match = re.fullmatch(r"hub:([^@#]+)(?:@([^#]+))?(?:#(.+))?", name)
    if match is None:
        raise UserError(f"{name}: write hub:NAME, hub:NAME@CONFIG or hub:NAME@CONFIG#SPLIT")
    path, config, split = match.groups()
    try:
        return datasets.load_dataset(path, config, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be opened ({str(error).splitlines()[0]})") from error


def _read_stream(span: Span, options: ReadOptions) -> Iterator[Document]:
    stream = _open_stream(span.path).shard(num_shards=span.end, index=span.start)
    for row, record in enumerate(stream):
        text, problem, label = _fields(record, "", options)
        place = f"{span.path} (shard {span.start})"
        yield Document(text, place, row, "stream", label, problem)


def _line_number(path: str, offset: int) -> int:
    """Return the 1-based line in which byte `offset` of the (decompressed) file lies."""
    lines, left = 1, offset
    with _open(path) as file:
        while left > 0 and (chunk := file.read(min(left, 1 << 22))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
    return lines
