"""Tables of any common kind -> lines of the form that layouts.py reads, by column names.

What data.prep.tables reads, and on top of that the layouts of fine-tuning's own:
    .json                  a SQuAD document
    .conll .txt .bio .iob2 eng.train eng.testa eng.testb
                           one token a line (token first, tag last), a blank line after a sentence
    no ending, or those and .tsv    WikiANN's, known by its lines: en:token, a tab, the tag
    a directory            RACE's: a JSON document a file, with an article and its questions
"""

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.json_files import read_json
from deberta_ds.corpus.tables import TABLE_KINDS, read_rows, row_place, suffix_of, text_lines
from deberta_ds.finetune.tasks import Task
from deberta_ds.tokenizer.text import is_removed

_COLUMNS = (".conll", ".txt", ".bio", ".iob2", ".train", ".testa", ".testb")
_KINDS = " ".join((*TABLE_KINDS, *_COLUMNS))
_WIKIANN = re.compile(r"[a-z]{2,3}(-[a-z]+)*:[^\t]+\t[^\t]+")
_LOOK_AHEAD = 20  # lines that must look like WikiANN's for a file to be taken as such
Row = tuple[str, dict[str, Any]]  # (file and line, values by column)


def read_table(path: str | Path, headless: tuple[str, ...] = (), skip_broken: int = 0
               ) -> Iterator[Row]:
    """Yield the rows of a table, told apart by its ending; UserError names the file and the line.

    `headless` are the columns of a .tsv without a header; up to `skip_broken` of its rows may have
    too few columns and are left out.
    """
    path = Path(path)
    if path.is_dir():
        yield from _race(path)
        return
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    suffix = suffix_of(path)
    if suffix in ("", ".tsv", *_COLUMNS):
        lines = text_lines(path)
        first = list(itertools.islice(lines, _LOOK_AHEAD))
        lines = itertools.chain(first, lines)
        if _is_wikiann(first):
            yield from _conll(_without_language(lines))
            return
        if suffix in _COLUMNS:
            yield from _conll(lines)
            return
    if suffix == "":
        raise UserError(f"{path}:1: a file without an ending is read as WikiANN's, whose lines are "
                        "LANGUAGE:TOKEN, a tab, TAG; give it an ending that says what it is, of "
                        f"{_KINDS}")
    if suffix not in TABLE_KINDS:
        raise UserError(f"{path}: unknown kind of table; the ending must be one of {_KINDS}")
    for row in read_rows(path, names=headless, class_names=True):
        if row.problem and skip_broken:
            skip_broken -= 1
            continue
        place = row_place(path, row)
        if row.number == 0 and _is_squad(row.values):
            yield from squad_rows(place, row.values["data"])
        elif not isinstance(row.values, dict):
            raise UserError(f"{place}: not a JSON object; write one object a line")
        else:
            yield place, row.values


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
                    yield where, row
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"after {where}: not a SQuAD document ({type(error).__name__}: {error}); "
                        "it is {data: [{paragraphs: [{context, qas: [{id, question, answers}]}]}]}"
                        ) from error


def _race(directory: Path) -> Iterator[Row]:
    """Yield the questions of RACE's documents in a directory, in the form that the Hub has."""
    documents = sorted(file for file in directory.rglob("*.txt") if file.is_file())
    if not documents:
        raise UserError(f"{directory}: a directory is read as RACE's, and there is no document "
                        "(.txt) in it; name a table, or RACE/train, RACE/dev, RACE/test")
    for path in documents:
        value = read_json(path)
        try:
            questions, options, name = value["questions"], value["options"], value["id"]
            answers = value.get("answers", [None] * len(questions))
            asked = list(zip(questions, options, answers, strict=True))
            article = value["article"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a RACE document ({type(error).__name__}: {error}); it is "
                            "{article, questions: [...], options: [[...]], answers: [...], id}"
                            ) from error
        for number, (question, choices, answer) in enumerate(asked):
            row = {"example_id": name, "article": article, "question": question,
                   "options": choices}
            yield f"{path}, question {number}", row | ({"answer": answer} if answer else {})


def _is_wikiann(lines: list[tuple[str, str]]) -> bool:
    """Return whether the first lines of a file all are LANGUAGE:TOKEN, a tab, TAG."""
    filled = [line for _, line in lines if line.strip()]
    return bool(filled) and all(map(_WIKIANN.fullmatch, filled))


def _without_language(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for place, line in lines:
        if line.strip() and not _WIKIANN.fullmatch(line):
            raise UserError(f"{place}: the lines before are WikiANN's, LANGUAGE:TOKEN, a tab, TAG; "
                            f"found {line[:40]!r}")
        yield place, line.partition(":")[2]


def _conll(lines: Iterator[tuple[str, str]]) -> Iterator[Row]:
    tokens: list[str] = []
    tags: list[str] = []
    start = ""
    for place, line in lines:
        if line.strip() and not line.startswith("-DOCSTART-"):
            # Spaces and tabs part columns; a no-break or other wide space is part of a token.
            parts = line.split("\t") if "\t" in line else [p for p in line.split(" ") if p]
            start = start or place
            tokens.append(parts[0])
            tags.append(parts[-1] if len(parts) > 1 else "")
            if bool(tags[-1]) != bool(tags[0]):
                raise UserError(f"{place}: {line[:40]!r} has {len(parts)} columns; either all "
                                "tokens of a sentence have a tag, or none")
        elif tokens:
            yield start, _sentence(tokens, tags)
            tokens, tags, start = [], [], ""
    if tokens:
        yield start, _sentence(tokens, tags)


def _sentence(tokens: list[str], tags: list[str]) -> dict[str, Any]:
    return {"tokens": tokens} | ({"tags": tags} if tags[0] else {})


def to_line(task: Task, place: str, row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a table's row as a line of `task`: its fields by name, "idx", "label" if it has one.

    What is text in a table and something else in a line (numbers, lists) is converted.
    """
    line: dict[str, Any] = {"idx": number}
    for field in (*task.texts, *task.choices):
        column = task.columns.get(field, field)
        if column not in row and field in row:  # RTE: SuperGLUE's names, and those of GLUE's table
            column = field
        if column not in row:
            raise UserError(f"{place}: {no_column(column, row)}")
        line[field] = row[column]
        if task.head == "tags" and isinstance(line[field], str):
            line[field] = line[field].split()
    if (group := task.columns.get("group", "")) in row and group:
        line[group] = row[group]
    column = task.columns.get("label", "label")
    value = row.get(column)
    if task.head == "answer":
        line |= {"id": row["id"]} if type(row.get("id")) in (str, int) else {}
        start = row.get(task.columns.get("start", ""))
        line |= {"start": start} if start not in (None, "") else {}
        return line | ({"label": value or []} if column in row else {})
    if task.head == "multilabel" and value == "":  # none of the labels
        value = []
    if value is not None and value != "":
        line["label"] = _label(task, value)
    return line


def _label(task: Task, value: Any) -> Any:
    """Return a label in the form of a line; what cannot be is left for the line's own check."""
    if task.head == "regress":
        try:  # to Python 1_000 is a number, to whoever wrote the table perhaps a slip
            return value if isinstance(value, str) and "_" in value else float(value)
        except (TypeError, ValueError):
            return value
    if task.head in ("multilabel", "tags"):
        if isinstance(value, str):
            value = value.split() if task.head == "tags" else value.split(",")
        return [label_text(part) for part in value] if isinstance(value, list) else value
    if task.head == "choice":
        return choice_label(value)
    return label_text(value)


def choice_label(value: Any) -> Any:
    """Return the label of a choice: a number also where a table has only text."""
    text = label_text(value)
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 9 else text


def label_text(value: Any) -> Any:
    """Return how a label of a table is named: true, 3 and "x " are "true", "3" and "x"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value.strip() if isinstance(value, str) else value


def as_shown(text: str) -> str:
    """Return what texts have in common that look alike: composed, without invisible marks."""
    return "".join(x for x in unicodedata.normalize("NFC", text) if not is_removed(x))


def no_column(name: str, row: Iterable, asked: str = "") -> str:
    """Return the words for a column that is missing, by whom it was `asked`, and what looks so."""
    alike = [column for column in map(str, row) if as_shown(column) == as_shown(name)]
    also = f"; {ascii(alike[0])} only looks like {ascii(name)}, write both alike" if alike else ""
    return f"no column {name!r}{asked}; there are {', '.join(map(str, row))}{also}"
