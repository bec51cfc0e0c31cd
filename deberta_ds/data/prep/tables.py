"""The rows of tables as documents: CSV and TSV, Parquet, Arrow."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deberta_ds.data.prep.documents import Document, Extent, ReadOptions
from deberta_ds.data.prep.fields import columns_of, directory_label, fields_of
from deberta_ds.data.prep.inputs import open_bytes, open_seekable
from deberta_ds.errors import UserError


def read_table(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    """Rows of .csv (comma) or .tsv (tab) with a header; quoted cells may hold line ends.

    UserError for rows of a .tsv, of two columns or more, that are one with quotation marks and
    several without.
    """
    label = directory_label(extent, options)
    csv.field_size_limit(min(options.max_document_bytes, 1 << 31 - 1))
    with (
        open_bytes(extent.path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        rows = _cells(extent.path, text)
        header = next(rows, [])
        if not _is_utf8(header):
            raise UserError(f"{extent.path}: its header is not UTF-8; convert the file")
        wanted = columns_of(options, header, extent.path)
        twice = [name for name in wanted if header.count(name) > 1]
        if twice:
            raise UserError(f"{extent.path}: more than one column {twice[0]!r}; rename the others")
        for row, cells in enumerate(rows):
            if len(cells) == len(header):
                record = dict(zip(header, cells, strict=True))
                found, problem, named, name = fields_of(record, label, options)
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
    is_tsv, tabs, width = ".tsv" in Path(path).suffixes, _Tabs(), 0
    source = tabs.counted(text) if is_tsv else text
    rows = csv.reader(source, delimiter="\t" if is_tsv else ",", strict=True)
    try:
        for cells in rows:
            width = width or len(cells)
            if tabs.lines > 1 and tabs.first == tabs.last == width - 1 > 0:
                raise UserError(
                    f"{path}:{rows.line_num - tabs.lines + 1}: quotation marks make one row of "
                    f"{tabs.lines} lines, of which the first and the last would be rows without "
                    "them; give .jsonl, .parquet or .csv, which leave no doubt")
            tabs.lines = 0
            if cells:
                yield cells
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num}: {error}; a cell with a quotation mark in it is "
                        'quoted, with "" for the mark, and no cell is longer than '
                        "--max_document_bytes") from error


@dataclass
class _Tabs:
    """The lines of a row, and the tabs of the first and the last of them."""

    lines: int = 0
    first: int = 0
    last: int = 0

    def counted(self, text: io.TextIOWrapper) -> Iterator[str]:
        """Yield the lines of a file; whoever begins a row sets `lines` to 0."""
        for line in text:
            self.last = line.count("\t")
            self.first = self.first if self.lines else self.last
            self.lines += 1
            yield line


def read_parquet(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    import pyarrow.parquet

    if extent.start == extent.end:
        return
    with open_seekable(extent.path) as file:
        parquet = pyarrow.parquet.ParquetFile(file)
        columns = columns_of(options, parquet.schema_arrow.names, extent.path)
        row = sum(parquet.metadata.row_group(i).num_rows for i in range(extent.start))
        for group in range(extent.start, extent.end):  # one at a time: all would stay in memory
            for batch in parquet.iter_batches(1024, row_groups=[group], columns=columns):
                yield from _read_batch(batch, row, extent, options)
                row += batch.num_rows


def read_arrow(extent: Extent, options: ReadOptions) -> Iterator[Document]:
    with open_seekable(extent.path) as file:
        names, batches = arrow_batches(file)
        columns = columns_of(options, names, extent.path)
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
    directory = directory_label(extent, options)
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError:  # in one of them
        records = [_record(batch.slice(offset, 1)) for offset in range(batch.num_rows)]
    for offset, record in enumerate(records):
        if record is None:
            yield Document("", extent.path, row + offset, extent.kind, directory, "invalid UTF-8")
            continue
        text, problem, label, name = fields_of(record, directory, options)
        yield Document(text, extent.path, row + offset, extent.kind, label, problem, name)


def _record(row) -> dict | None:
    """Return the one record of a batch; None if its text is invalid UTF-8."""
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError:
        return None
