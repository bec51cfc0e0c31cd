"""Files of any size and kind -> work units -> documents, in bounded memory.

Text (.txt, .md), JSON lines (.jsonl), both also as .gz or .zst; .parquet; .arrow; and Hub datasets
as `hub:NAME[@CONFIG][#SPLIT]`, streamed. Paths may be remote (fsspec). Plain text and JSON lines
are split into byte ranges, so one file of 100 GB keeps all workers busy; small files share a unit.

A document of a text file is the whole file, a line, a block between blank lines, or what lies
between lines that match a pattern. A line belongs to the byte range in which it starts.
"""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import fsspec

from deberta_ds.data.prep.inputs import COMPRESSED_SUFFIXES, line_number, open_bytes, open_stream
from deberta_ds.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".text")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SMALLEST_UNIT, _LARGEST_UNIT = 1 << 22, 1 << 28


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. `documents`: "file", "line", "blank_line" or "match:PATTERN"."""

    documents: str = "file"
    text_key: str = "text"
    label_key: str = ""
    label_from_directory: bool = False
    max_document_bytes: int = 1 << 26


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of one input: bytes [start, end), or row groups of parquet, or one shard of a stream."""

    path: str
    kind: str
    start: int
    end: int


class Document(NamedTuple):  # made in a third of a dataclass's time, once a document
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
            return f"{self.path}:{line_number(self.path, self.where)}"
        return f"{self.path}:row {self.where + 1}"


def plan_units(inputs: list[str], options: ReadOptions, unit_bytes: int = 0) -> list[list[Extent]]:
    """Return the work units of `inputs` (files, directories, patterns, URLs, hub: names), in order.

    `unit_bytes` 0 chooses a 64th of the input, between 4 and 256 MiB. The result depends on the
    inputs and options alone. UserError for a missing, empty or unknown input.
    """
    extents = [extent for name in inputs for extent in _whole_inputs(name)]
    if not extents:
        raise UserError(f"no input files in {' '.join(inputs)}")
    total = sum(size for _, size in extents)
    limit = unit_bytes or min(max(total // 64, _SMALLEST_UNIT), _LARGEST_UNIT)
    units: list[list[Extent]] = []
    room = 0
    for extent, size in extents:
        for part, part_size in _split(extent, size, limit, options):
            if not units or part_size > room:
                units.append([])
                room = limit
            units[-1].append(part)
            room -= part_size
    return units


def _whole_inputs(name: str) -> Iterator[tuple[Extent, int]]:
    if name.startswith("hub:"):
        count = open_stream(name).num_shards
        for index in range(count):
            yield Extent(name, "stream", index, count), _LARGEST_UNIT
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
        yield Extent(path, kind, 0, size), size


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
    extent: Extent, size: int, limit: int, options: ReadOptions
) -> Iterator[tuple[Extent, int]]:
    if extent.kind == "parquet":
        yield from _split_parquet(extent)
        return
    whole = extent.path.endswith(COMPRESSED_SUFFIXES) or extent.kind not in ("text", "json")
    if whole or size <= limit or (extent.kind == "text" and options.documents == "file"):
        yield extent, size
        return
    parts = -(-size // limit)
    edges = [size * part // parts for part in range(parts + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        yield Extent(extent.path, extent.kind, start, end), end - start


def _split_parquet(extent: Extent) -> Iterator[tuple[Extent, int]]:
    import pyarrow.parquet

    with open_bytes(extent.path) as file:
        metadata = pyarrow.parquet.ParquetFile(file).metadata
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).total_byte_size
            yield Extent(extent.path, extent.kind, group, group + 1), size
