"""Tables of any common kind -> rows, by column names.

What files/tables.py reads, and on top of that the layouts of fine-tuning's own:
    .json                  a SQuAD document
    DIR/train-*.parquet    several tables, in the order of their names
    hub:NAME@CONFIG#SPLIT  a data set of the Hub, streamed
"""

import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError, looked_in
from deberta_ds.base.files import write_atomic
from deberta_ds.cluster import dist
from deberta_ds.files.inputs import open_stream, revision_of, suffix_of
from deberta_ds.files.remote import stamp_of
from deberta_ds.files.tables import TABLE_KINDS, is_pair, is_quoted, named, read_each
from deberta_ds.tasks.task import TableForm, Task
from deberta_ds.tokenizer.text import TO_UTF8

HUB_TABLE = "hub:"
_KINDS = " ".join(TABLE_KINDS)
_ENCODING = (", or name its encoding, such as cp1252 (encoding in the task file, --encoding of "
             "predict.py)")
_CELLS = ("; put quotation marks around cells with the separator in them, or name another, such "
          'as delimiter = ";" in the task file')
_EXPORTED = (".ann", ".spacy", ".xlsx", ".xls", ".ods")  # of brat, spaCy, spreadsheets
_ENTITY = {"start", "start_offset", "span", "result"}  # keys of an object that is one
_MOST_SHOWN = 10  # rows that cannot be used
Row = tuple[str, dict[str, Any]]  # (file and line, values by column)


def read_table(path: str | Path, form: TableForm | None = None) -> Iterator[Row]:
    """Yield the rows of a table; UserError for the first that cannot be read. See `each_row`."""
    for place, row in each_row(path, form=form):
        if isinstance(row, UserError):
            raise row
        yield place, row


def each_row(path: str | Path, headless: tuple[str, ...] = (), skip_broken: int = 0,
             form: TableForm | None = None) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
    """Yield (file and line, row) of a table, told apart by its ending; a row that cannot be read is
    its UserError. `form`: what a task file says of its tables.

    `headless` are the columns of a .tsv without a header; up to `skip_broken` of its rows may have
    too few columns and are left out.
    """
    form = form or TableForm()
    name, path = str(path), Path(path)
    if name.startswith(HUB_TABLE):
        yield from _hub_rows(name)
    elif glob.has_magic(name) and not path.exists():
        for file in files_like(name):
            yield from each_row(file, headless, skip_broken, form)
    elif path.is_dir():
        raise UserError(f"{path}: is a directory; name a table in it, or several by a pattern, "
                        f"such as {path}/train-*.parquet")
    elif not path.is_file():
        raise UserError(f"{path}: no such file{looked_in(path)}")
    else:
        stamp = stamp_of(os.stat(path))
        try:
            yield from _file_rows(path, headless, skip_broken, form)
        except UserError as error:
            raise _with_remedy(error) from None
        if (now := stamp_of(os.stat(path))) != stamp:
            raise UserError(f"{path}: changed while it was read (from {stamp} to {now}); run the "
                            "same command again when nothing writes to it any more")


def files_like(pattern: str) -> list[str]:
    """Return the files that a pattern such as DIR/train-*.parquet names, in order."""
    if files := sorted(glob.glob(pattern)):
        return files
    raise UserError(f"{pattern}: no file is called so")


def stamps_of(table: str) -> dict[str, str]:
    """Return {file: stamp} of a table that lies in files."""
    if table.startswith(HUB_TABLE):
        return {}
    files = [table] if os.path.exists(table) else files_like(table)
    return {file: stamp_of(os.stat(file)) for file in files}


def _with_remedy(error: UserError) -> UserError:
    text = str(error)
    more = _ENCODING * text.endswith(TO_UTF8) + _CELLS * ("columns, the header has" in text)
    return UserError(text + more) if more else error


def without_header(task: Task, table: str) -> str:
    """Return what to say of a column that a table does not have."""
    return ("; if its first line is no header, the task file may have names = [...], a name for "
            "each column, or header = false: they are 1, 2, ... then") * (
        task.form.header and not task.form.names and suffix_of(table) in (".csv", ".tsv"))


def _hub_rows(name: str) -> Iterator[Row]:
    stream = open_stream(name, revision_of(name))
    classes = {column: names for column, feature in (stream.features or {}).items()
               if (names := getattr(getattr(feature, "feature", feature), "names", None))}
    for number, row in enumerate(stream, start=1):
        place = f"{name}:row {number}"
        yield place, row | {column: named(row[column], names, place)
                            for column, names in classes.items()}


def _file_rows(path: Path, headless: tuple[str, ...], skip_broken: int, form: TableForm
               ) -> Iterator[tuple[str, dict[str, Any] | UserError]]:
    suffix = suffix_of(path)
    if suffix in _EXPORTED:
        raise UserError(f"{path}: a {suffix} is not read; export it as CSV (UTF-8) or JSON lines")
    if suffix not in TABLE_KINDS:
        raise UserError(f"{path}: unknown kind of table; the ending must be one of {_KINDS}. A text"
                        " per line: put the name of its column before the first, and call it .tsv. "
                        f"A word per line (CoNLL, ...): {convert(path)}")
    how: dict[str, Any] = {"delimiter": form.delimiter, "encoding": form.encoding}
    how["quoted"] = is_quoted(path, **how) if form.quoted is None and suffix == ".tsv" and (
        not headless) else form.quoted
    how |= {"names": headless or form.names, "header": form.header or bool(headless)}
    for number, (place, row) in enumerate(read_each(path, class_names=True, **how)):
        if isinstance(row, UserError):
            if skip_broken:
                skip_broken -= 1
            else:
                yield place, _with_remedy(row)
        elif number == 0 and _is_squad(row):
            yield from squad_rows(place, row["data"])
        elif _is_of_a_tool(row):
            raise UserError(f"{place}: a row of an annotation tool; {convert(path)}")
        elif not isinstance(row, dict):
            yield place, UserError(f"{place}: not a JSON object; write one object a line")
        else:
            yield place, with_inner(row)


def with_inner(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what its objects hold as columns, too: {"labels": {"a": 1}} has labels.a"""
    inner = {f"{name}.{key}": found for name, value in row.items() if isinstance(value, dict)
             for key, found in with_inner(value).items()}
    return row | inner if inner else row


def convert(path: Path) -> str:
    """Return what to do about a table that fine-tuning does not read."""
    out = path.with_name(f"{path.stem}.converted.jsonl")
    return ("convert it once: python examples/convert_annotations.py "
            f"{shlex.quote(str(path))} --out {shlex.quote(str(out))}")


def _is_of_a_tool(row: Any) -> bool:
    """Return whether Prodigy, Label Studio, spaCy or doccano wrote a row, with entities as objects
    or with what was rejected.
    """
    if not isinstance(row, dict) or not {"annotation_id", "_task_hash"}.isdisjoint(row):
        return is_pair(row) or isinstance(row, dict)
    entities = [one for key in ("label", "entities", "spans", "annotations")
                if isinstance(row.get(key), list) for one in row[key][:1]]
    return any(isinstance(one, dict) and not _ENTITY.isdisjoint(one) for one in entities)


def _is_squad(value: Any) -> bool:
    articles = value.get("data") if isinstance(value, dict) else None
    return (isinstance(articles, list) and bool(articles) and isinstance(articles[0], dict)
            and "paragraphs" in articles[0])


def squad_rows(place: str, articles: list) -> Iterator[Row]:
    """Yield the questions of a SQuAD document (v1.1 or v2.0) in the form that the Hub has."""
    where = place
    try:
        for a, article in enumerate(articles):
            for p, paragraph in enumerate(article["paragraphs"]):
                for q, qa in enumerate(paragraph["qas"]):
                    where = f"{place.rpartition(':')[0]}: data[{a}].paragraphs[{p}].qas[{q}]"
                    row = {"id": qa["id"], "title": article.get("title", ""),
                           "context": paragraph["context"], "question": qa["question"]}
                    if "answers" in qa:
                        row["answers"] = list(qa["answers"])
                    if "is_impossible" in qa:
                        row["is_impossible"] = qa["is_impossible"]
                    yield where, row
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"after {where}: not a SQuAD document ({type(error).__name__}: {error}); "
                        "it is {data: [{paragraphs: [{context, qas: [{id, question, answers}]}]}]}"
                        ) from error


def longer(task: Task, option: str, length: str) -> str:
    """Return what can be done about texts that are too long."""
    cut = f"{option}truncation=longest_first, which cuts the longest text, or "
    return f"Set {cut * task.is_cut}{length}"


class Faults:
    """What is wrong with rows that cannot be used, by their place: all are named at once.

    Up to `most` may be left out. `file` lists all.
    """

    def __init__(self, most: int = 0, file: Path | None = None):
        self.most, self.file = most, file
        self.errors: dict[str, str] = {}
        self.needed = 0  # tokens of the longest that is too long

    def add(self, place: str, error: UserError) -> None:
        """Count a row."""
        self.errors.setdefault(place, str(error))
        self.needed = max(self.needed, getattr(error, "needed", 0))

    def fit(self, task: Task, option: str) -> str:
        """Return what can be done about texts that are too long; "" if there are none."""
        return longer(task, option, f"{option}max_length={self.needed}") if self.needed else ""

    def check(self, total: int, remedy: str = "") -> str:
        """Return what is said of them, "" for none; UserError if they are too many.

        `total`: rows that were read. `remedy`: another one than to leave them out.
        """
        lines = [error.partition("\n")[0] for error in self.errors.values()]
        if self.file and dist.is_main():
            self.file.unlink(missing_ok=True)  # of another run
        if not lines:
            return ""
        remedy = f". {remedy}" if remedy else ""
        if len(lines) == 1 and not self.most:
            raise UserError(lines[0] + remedy if remedy else next(iter(self.errors.values())))
        text = f"{len(lines):,} of {total:,} rows cannot be used:\n  " + "\n  ".join(
            lines[:_MOST_SHOWN])
        if self.file:
            if dist.is_main():
                write_atomic(self.file, "\n".join(lines) + "\n")
            text += f"\n  (all in {self.file})"
        if len(lines) <= self.most:
            return text
        _, _, form = next(iter(self.errors.values())).partition("\n")
        raise UserError(f"{text}\n  Correct them, or leave out up to N rows with --max_bad N"
                        f"{remedy}\n{form}".rstrip())
