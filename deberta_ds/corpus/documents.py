"""Files of any size and kind -> work units -> documents, in bounded memory.

Text (.txt, .md), JSON lines (.jsonl), .csv and .tsv, all also as .gz .zst .xz .bz2 or .lz4;
.warc and .wet (also .gz); .parquet; .arrow, .feather and what `datasets` has saved; and Hub
datasets as `hub:NAME[@CONFIG][#SPLIT]`, streamed. Paths may be remote (fsspec). Plain text and
JSON lines are split into byte ranges, so one file of 100 GB keeps all workers busy; small files
share a unit.

A document of a text file is the whole file, a line, a block between blank lines, or what lies
between lines that match a pattern. A line belongs to the byte range in which it starts.
"""

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from deberta_ds.base.errors import UserError, listed, looked_in, naming, tell
from deberta_ds.base.user_code import is_own
from deberta_ds.files.inputs import (
    COMPRESSED_SUFFIXES,
    is_compressed,
    is_json_list,
    line_number,
    open_seekable,
    open_stream,
    revision_of,
    suffix_of,
)
from deberta_ds.files.remote import file_system, reached, stamp_of, state_of
from deberta_ds.files.tables import TABLE_KINDS

# Suffix: kind, as of readers.read_unit.
_KINDS = {".txt": "text", ".md": "text", ".text": "text", ".warc": "warc", ".wet": "warc",
          **TABLE_KINDS}
BAD = "bad"  # the kind of a file that is left out; its state says why
_SMALLEST_UNIT, _LARGEST_UNIT = 1 << 22, 1 << 28


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. `documents`: "file", "line", "blank_line", "match:PATTERN", or
    FILE.py:NAME#SHA256 of a function that returns the texts of a file's bytes.
    `extract_html`: the main text of the pages in .warc files.
    """

    documents: str = "file"
    text_key: str = "text"
    label_key: str = ""
    label_from_directory: bool = False
    max_document_bytes: int = 1 << 26
    id_key: str = ""
    extract_html: bool = False

    @property
    def own_reader(self) -> str:
        """FILE.py:NAME of the function that divides a text file; "" where none is named."""
        value, _, sha256 = self.documents.rpartition("#")
        return value if len(sha256) == 64 and is_own(value) else ""


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of one input: bytes [start, end), or row groups of parquet, or one shard of a stream.

    `state` changes when the input does: its content (units.py), or what a remote file system
    says. `stamp` of a local file: how it looked when the work was planned. `read`: how it is read,
    where work units of several corpora are read in ways of their own.
    """

    path: str
    kind: str
    start: int
    end: int
    state: str = ""
    stamp: str = ""
    read: ReadOptions | None = None

    @property
    def source(self) -> str:
        """Return the input that its documents' places are counted in."""
        return f"{self.path} (shard {self.start})" if self.kind == "stream" else self.path


class Document(NamedTuple):  # made in a third of a dataclass's time, once a document
    """One raw document. `path`: the source of its extent. `where`: its byte offset or row there.
    `problem`: why it cannot be read; there is no text then.
    """

    text: str
    path: str
    where: int
    kind: str
    label: str = ""
    problem: str = ""
    id: str = ""

    def place(self) -> str:
        """Return file:line (or file:row) for messages; counts line ends, so only for errors."""
        if self.kind in ("text", "json"):
            return f"{self.path}:{line_number(self.path, self.where)}"
        return f"{self.path}:row {self.where + 1}"

    def offset(self) -> str:
        """Return the file and the byte (or row, from 0) in it, for reports; it reads nothing."""
        unit = "byte" if self.kind in ("text", "json") else "row"
        return f"{self.path}, {unit} {self.where}"


def plan_units(inputs: list[str], options: ReadOptions, unit_bytes: int = 0,
               bad_files: Mapping[str, str] | None = None) -> list[list[Extent]]:
    """Return the work units of `inputs` (files, directories, patterns, URLs, hub: names), in order.

    `unit_bytes` 0 chooses about a 64th of the input: 4, 16, 64 or 256 MiB. The result depends on
    the inputs and options alone. Whether a small file begins a unit is a matter of its own name and
    size, so that other files, come or gone, leave most units as they are. UserError for a missing,
    empty or unknown input; files of unknown kinds in a directory are skipped and named on stderr.
    `bad_files`, {file: why}, are left out.
    """
    bad_files = bad_files or {}
    extents = [(extent, size) for extent, size in whole_inputs(inputs, options, unit_bytes)
               if extent.path not in bad_files]
    if not extents:
        raise UserError(f"{next(iter(bad_files))}: a bad file, as all others; fetch them again")
    share = min(max(sum(size for _, size in extents) // 64, _SMALLEST_UNIT), _LARGEST_UNIT)
    limit = unit_bytes or 1 << (share.bit_length() - 1) // 2 * 2
    units: list[list[Extent]] = []
    room = 0
    for extent, size in extents:
        name = f"{os.path.basename(extent.path)} {size}".encode()
        if xxhash.xxh3_64_intdigest(name) * limit < size << 64:
            room = -1
        for part, part_size in split(extent, size, limit, options):
            if not units or part_size > room:
                units.append([])
                room = limit
            units[-1].append(part)
            room -= part_size
    units[-1] += [Extent(path, BAD, 0, 0, why) for path, why in bad_files.items()]
    return units


def bad_files_of(units: Iterable[list[Extent]]) -> dict[str, str]:
    """Return {file that is left out: why}."""
    return {extent.path: extent.state for unit in units for extent in unit if extent.kind == BAD}


def whole_inputs(inputs: list[str], options: ReadOptions, unit_bytes: int = 0
                ) -> list[tuple[Extent, int]]:
    """Return (all of an input, its size) for each; errors and notes as of `plan_units`."""
    if unit_bytes < 0 or options.max_document_bytes < 1:
        raise UserError(f"--unit_bytes {unit_bytes} (0: chosen) and --max_document_bytes "
                        f"{options.max_document_bytes}: sizes must be positive")
    skipped: list[str] = []
    given = [list(_whole_inputs(name, options, skipped)) for name in inputs]
    if skipped:
        tell(f"note: {len(skipped)} files of unknown kind skipped: {listed(skipped)}")
    check_named_once([[extent for extent, _ in found] for found in given])
    if not any(given):
        raise UserError(f"no input files in {' '.join(inputs)}")
    return list(itertools.chain.from_iterable(given))


def check_named_once(given: list[list[Extent]]) -> None:
    """Raise UserError if two inputs name one file; within one, names may be links to one."""
    named: dict[str, tuple[int, str]] = {}
    for number, extent in ((number, one) for number, found in enumerate(given) for one in found):
        place = extent.source if "://" in extent.path or extent.kind == "stream" else \
            os.path.realpath(extent.path)
        before, name = named.setdefault(place, (number, extent.path))
        if before != number:
            raise UserError(f"{extent.path}: named twice among the inputs (as {name}); name it "
                            "once")


def _whole_inputs(name: str, options: ReadOptions, skipped: list[str]
                 ) -> Iterator[tuple[Extent, int]]:
    if name.startswith("hub:"):
        if options.label_from_directory:
            raise UserError(f"{name}: a Hub dataset has no directories to count by; give "
                            "--label_key, or one corpus for each dataset")
        revision = revision_of(name)
        count = open_stream(name, revision).num_shards
        for index in range(count):
            yield Extent(name, "stream", index, count, revision), _LARGEST_UNIT
        return
    found = _remote_files(name) if "://" in name else _local_files(name)
    for path, size, state in found:
        if kind := input_kind(path):
            yield Extent(path, kind, 0, size, state, "" if "://" in name else state), size
        elif path == name:
            raise UserError(f"{path}: unknown kind of file; known are {' '.join(_KINDS)}, each "
                            f"also with {' '.join(COMPRESSED_SUFFIXES)}; rename plain text, convert"
                            " others")
        else:
            skipped.append(path)


def _local_files(name: str) -> list[tuple[str, int, str]]:
    """Return (path, size, state) of the files that a local file, directory or pattern names."""
    paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    if not paths:
        raise UserError(f"{name}: no such file or directory{looked_in(name)}")
    found: dict[str, tuple[str, int, str]] = {}  # "**" gives directories and what is in them
    for path in itertools.chain.from_iterable(map(_below, paths)):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UserError(f"{ascii(path)}: its name is not UTF-8; rename the file") from None
        status = os.stat(path)
        found.setdefault(os.path.normpath(path), (path, status.st_size, stamp_of(status)))
    return list(found.values())


def _below(path: str) -> Iterator[str]:
    """Yield a file, or all below a directory but hidden ones."""
    if not os.path.isdir(path):
        yield path
        return
    for name in _data_names(sorted(name for name in os.listdir(path) if name[0] != ".")):
        yield from _below(os.path.join(path, name))


def _data_names(names: list[str]) -> list[str]:
    """Return the names in one directory without those by which save_to_disk describes a dataset."""
    suffix = ".arrow" if {"state.json", "dataset_info.json"} <= set(names) else ""
    return [name for name in names if name.endswith(suffix) and name != "dataset_dict.json"]


def _remote_files(name: str) -> list[tuple[str, int, str]]:
    """Return (URL, size, state) of the files that a remote file, directory or pattern names."""
    with reached(name, "cannot be listed", "check the address and the credentials"):
        filesystem, path = file_system(name)
        root = path.rstrip("/")
        if glob.has_magic(path):
            root = re.split(r"[*?[]", path)[0].rpartition("/")[0]
            paths = [p for p in filesystem.glob(path) if filesystem.isfile(p)]
        else:
            paths = filesystem.find(path) if filesystem.exists(path) else []
            paths = paths if paths == [root] else _without_notes(paths)
        if "/." not in path[len(root):]:  # a pattern may ask for hidden ones
            paths = [p for p in paths if "/." not in p[len(root):]]
        details = [filesystem.info(p) for p in sorted(paths)]
    if not details:
        raise UserError(f"{name}: no such file or directory{looked_in(name)}")
    for detail in details:
        if detail.get("type") == "other":
            raise UserError(f"{detail['name']}: is a pipe or a device; give a file")
        if detail.get("size") is None:
            raise UserError(f"{detail['name']}: its server does not say how long it is; fetch it")
    return [(filesystem.unstrip_protocol(detail["name"]), detail["size"], state_of(detail))
            for detail in details]


def _without_notes(paths: list[str]) -> list[str]:
    """Return the paths whose names `_data_names` keeps."""
    names: dict[str, list[str]] = {}
    for directory, _, name in (path.rpartition("/") for path in paths):
        names.setdefault(directory, []).append(name)
    return [f"{directory}/{name}" for directory, found in names.items()
            for name in _data_names(found)]


def input_kind(path: str) -> str | None:
    """Return the kind of an input by its suffix, None if unknown."""
    return _KINDS.get(suffix_of(path))


def split(extent: Extent, size: int, limit: int, options: ReadOptions
          ) -> Iterator[tuple[Extent, int]]:
    """Yield (extent, its bytes) of the parts, of about `limit` bytes, of a file that can be cut."""
    if extent.kind == "parquet":
        import pyarrow.parquet

        with naming(extent.path), open_seekable(extent.path) as file:
            metadata = pyarrow.parquet.ParquetFile(file).metadata
        if not metadata.num_row_groups:
            yield replace(extent, end=0), 0
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).total_byte_size
            yield replace(extent, start=group, end=group + 1), size
        return
    whole = (is_compressed(extent.path) or extent.kind not in ("text", "json")
             or extent.path.startswith("http"))  # not every server gives a part of a file
    if whole or size <= limit or (
            extent.kind == "text" and (options.documents == "file" or options.own_reader)) or (
            is_json_list(extent.path)):
        yield extent, size
        return
    parts = -(-size // limit)
    edges = [size * part // parts for part in range(parts + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        yield replace(extent, start=start, end=end), end - start
