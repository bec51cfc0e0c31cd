"""Convert annotated text into JSON lines that fine-tuning reads (docs/how-to/named-entities.md).

    python examples/convert_annotations.py train.conll --out train.jsonl
    python examples/convert_annotations.py NER-de-train.tsv --word 2 --tag 3 --out train.jsonl
    python examples/convert_annotations.py export.json --out train.jsonl

A word per line becomes {"tokens": [...], "tags": [...]}: CoNLL-2002, 2003, 2012 and CoNLL-U,
GermEval, WNUT, MultiCoNER, KLUE, MasakhaNER, WikiANN. Columns lie between tabs or spaces, a blank
line ends a sentence. The word is in the first column and the tag in the last, unless --word and
--tag say so, the name ends in .conllu (the word and UPOS) or the file is one of CoNLL-2012 (the
word and its named entity). What a comment is, is told by the columns and tags of all other lines.

Exports of annotation tools (.json, .jsonl, .csv, .parquet) keep their columns, with entities as
[[start, end, name], ...]:
    doccano           {"text": "...", "label": [[0, 4, "PER"]]}, or objects in a list "entities"
    spaCy             ["...", {"entities": [[0, 4, "PER"]]}]: columns "text" and "entities"
    Prodigy           {"text": "...", "spans": [{"start": 0, "end": 4, "label": "PER"}], "answer"}:
                      what was not accepted has no label; of a question on one class
                      (textcat.teach) "answer" stays, the label column of that task
    Label Studio      its JSON (the first annotation that was not canceled) and JSON_MIN, also as
                      CSV; classes that were chosen are columns by their names in its interface
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly, tell
from deberta_ds.base.files import write_atomic
from deberta_ds.files.inputs import suffix_of
from deberta_ds.files.tables import TABLE_KINDS, is_pair, read_each, text_lines
from deberta_ds.tasks.metrics import PREFIXED

ENTITIES = ("label", "entities", "spans", "annotations")  # columns that tools write them into
NAMES = ("label", "type", "tag", "entity_group")
_WIKIANN = re.compile(r"([a-z]{2,3}(-[a-z]+)*|simple):[^\t]+\t[^\t]+")
_LOOK_AHEAD = 20  # lines that must look like WikiANN's for a file to be taken as such
_BRACKET = re.compile(r"(?:\(([^()*]+))?\*?(\)?)")  # CoNLL-2012: (PERSON*, *, *), (GPE)
_FIELDS = re.compile(r"\w+=[^|]*(\|\w+=[^|]*)*")
_NO_WORD = re.compile(r"\d+[-.]\d+")  # CoNLL-U: the range of a contraction, an empty node
_CONLLU, _CONLL2012 = {"word": 2, "tag": 4}, {"word": 4, "tag": 11}

Line = tuple[str, str, list[str]]  # file and line, the text, its columns
Sentence = tuple[str, "dict[str, Any] | UserError"]


class _Form(NamedTuple):
    """What all lines of a file say about one of them."""

    word: int  # columns as Python counts them
    tag: int
    width: int  # columns of most lines
    tags: frozenset[str]
    counts_words: bool  # column 1 is 1, 2, 3 ...
    in_brackets: bool


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("table", help="a file with a word per line, or an annotation tool's export")
    parser.add_argument("--out", required=True, help="JSON lines to write")
    parser.add_argument("--word", type=int, help="column of the word, from 1; -1: the last")
    parser.add_argument("--tag", type=int, help="column of the tag")
    parser.add_argument("--key", default="", help="of fields such as SpaceAfter=No|name=B-PER the "
                        "one that is the tag; where it is missing, the tag is O")
    parser.add_argument("--encoding", default="", help="such as cp1252 (default: UTF-8, or UTF-16)")
    parser.add_argument("--texts", default="tokens", help="name of the words in --out")
    parser.add_argument("--label", default="tags", help="name of the tags in --out")
    options = parser.parse_args()
    columns = {name: number for name, number in (("word", options.word), ("tag", options.tag))
               if number is not None}
    rows = rows_of(options.table, columns, options.encoding, options.key)
    names = {"tokens": options.texts, "tags": options.label}
    lines = [json.dumps({names.get(key, key): value for key, value in row.items()},
                        ensure_ascii=False) for row in rows]
    write_atomic(options.out, "\n".join(lines) + "\n")
    tell(f"{options.out}: {len(lines):,} rows")


def rows_of(path: str, columns: Mapping[str, int], encoding: str = "", key: str = ""
            ) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; UserError names the first that cannot be read."""
    suffix = suffix_of(path)
    if suffix in TABLE_KINDS and not columns and not (suffix == ".tsv" and (
            is_wikiann(path, encoding) or has_sentences(path, encoding))):
        found = ((place, converted(place, row)) for place, row in read_each(
            path, class_names=True, encoding=encoding))
    else:
        if key and not columns and suffix == ".conllu":
            columns = {"word": _CONLLU["word"], "tag": -1}
        found = read_sentences(path, columns, encoding)
    is_found = not key
    for _, row in found:
        if isinstance(row, UserError):
            raise row
        if fields := [tag for tag in row.get("tags", ()) if _FIELDS.fullmatch(tag)]:
            if not key:
                keys = sorted({part.split("=")[0] for tag in fields for part in tag.split("|")})
                raise UserError(f"{path}: the tags are fields, such as {fields[0]!r}; name the one "
                                f"to take: --key {' or '.join(keys)}, or --key all for the whole")
            parts = [dict(part.split("=", 1) for part in tag.split("|") if "=" in part)
                     for tag in row["tags"]]
            is_found |= key == "all" or any(key in part for part in parts)
            row["tags"] = row["tags"] if key == "all" else [part.get(key, "O") for part in parts]
        yield row
    if not is_found:
        raise UserError(f"{path}: no tag has a field {key}=; name the column of the fields: --tag "
                        "(-1: the last), or leave --key out")


def converted(place: str, row: Any) -> dict[str, Any] | UserError:
    """Return a row of an annotation tool with entities as [start, end, name], in order."""
    row = {"text": row[0], **row[1]} if is_pair(row) else row
    if not isinstance(row, dict):
        return row if isinstance(row, UserError) else UserError(f"{place}: not a JSON object")
    is_question = isinstance(row.get("label"), str)  # whether a text is of one class
    row = flat(row)
    done = row.get("answer") == "accept" or row.get("annotation_id") not in (None, "")
    if done and not {*ENTITIES, "accept"} & {key for key, value in row.items() if value != ""}:
        row["spans" if "answer" in row else "label"] = []  # annotated, without any entity
    row = {key: value for key, value in row.items()
           if key not in ("_task_hash", "annotation_id") and (key != "answer" or is_question)}
    for key in ENTITIES:
        value = row.get(key)
        if isinstance(value, str) and value[:1] == "[":
            value = json.loads(value)
        if isinstance(value, list) and all(isinstance(one, dict) or (
                isinstance(one, list | tuple) and len(one) == 3) for one in value):
            try:
                row[key] = sorted(entity(row.get("text", ""), one) for one in value)
            except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
                return UserError(f'{place}: field "{key}": {error}')
    return row


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Label Studio's JSON as other tools write one, with the first annotation that
    was not canceled; Prodigy's without what was rejected. Others stay as they are.
    """
    if isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list):
        done = [part for part in row["annotations"]
                if isinstance(part, dict) and not part.get("was_cancelled")]
        entries, chosen = done[0].get("result") if done else None, {}
        if isinstance(entries, list):
            chosen = {str(entry.get("from_name")): entry["value"].get("choices")
                      for entry in entries if isinstance(entry, dict)
                      and entry.get("type") == "choices" and isinstance(entry.get("value"), dict)}
            entries = [entry for entry in entries if not isinstance(entry, dict)
                       or str(entry.get("type", "labels")).endswith("labels")]
        return {"id": row.get("id"), **row["data"], "label": entries, **chosen}
    if row.get("answer") in ("reject", "ignore") and not {"spans", "_task_hash"}.isdisjoint(row):
        return row | {name: None for name in ("spans", "label", "accept") if name in row}
    return row


def entity(text: str, part: Any) -> list:
    """Return [start, end, name] of an entity as any tool writes it."""
    if not isinstance(part, dict):
        return list(part)
    part = part["value"] if isinstance(part.get("value"), dict) else part
    name = next((part[key] for key in NAMES if part.get(key)), (part.get("labels") or [0])[0])
    start, end = part.get("span") or (
        part.get(key, part.get(f"{key}_offset")) for key in ("start", "end"))
    quoted = part.get("text")
    if type(start) is not int or type(end) is not int or not isinstance(name, str) or not name:
        raise ValueError(f"{part!r} is no entity; it has start, end and label")
    if quoted is not None and text[start:end] != quoted:  # a browser counts an emoji as two
        units = text.encode("utf-16-le")
        start, end = (len(units[: 2 * at].decode("utf-16-le", "ignore")) for at in (start, end))
        if text[start:end] != quoted:
            raise ValueError(f"{quoted!r} is not at character {start} of its text")
    return [start, end, name]


def read_sentences(path: str, columns: Mapping[str, int], encoding: str = "") -> Iterator[Sentence]:
    """Yield (place, {"tokens", "tags" if there are}) or (place, UserError) of each sentence."""
    clean = _without_language if is_wikiann(path, encoding) else iter
    form = _form(path, clean(text_lines(path, encoding=encoding)), columns)
    for block in _blocks(clean(text_lines(path, encoding=encoding))):
        # Without the comments before its first word, and what stands for no word.
        width = _width([line for line in block if not line[1].startswith("#")], form.width)
        start = next((number for number, line in enumerate(block)
                      if not _is_comment(line, width, form)), len(block))
        if block := [line for line in block[start:]
                     if not (form.counts_words and _NO_WORD.fullmatch(line[2][0]))]:
            yield _sentence(block, form, len(columns) > 0)


def is_wikiann(path: str, encoding: str = "") -> bool:
    """Return whether the first lines of a file all are LANGUAGE:TOKEN, a tab, TAG."""
    lines = itertools.islice(text_lines(path, encoding=encoding), _LOOK_AHEAD)
    filled = [line for _, line in lines if line.strip()]
    return bool(filled) and all(map(_WIKIANN.fullmatch, filled))


def has_sentences(path: str, encoding: str = "") -> bool:
    """Return whether blank lines part the lines of a file, of which none has a quotation mark that
    may open a cell.
    """
    lines = [line for _, line in itertools.islice(text_lines(path, encoding=encoding), 1000)]
    return any(not line.strip() for line in lines[:-1]) and not any(
        cell.startswith('"') and cell.count('"') == 1 and len(cell) > 1
        for line in lines for cell in line.split("\t"))


def _without_language(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for place, line in lines:
        if line.strip() and not _WIKIANN.fullmatch(line):
            raise UserError(f"{place}: the lines before are WikiANN's, LANGUAGE:TOKEN, a tab, TAG; "
                            f"found {line[:40]!r}")
        yield place, line.partition(":")[2]


def _blocks(lines: Iterable[tuple[str, str]]) -> Iterator[list[Line]]:
    """Yield the lines between blank ones. A no-break or other wide space is part of a column."""
    for is_word, group in itertools.groupby(lines, lambda line: bool(
            line[1].strip() and not line[1].startswith(("-DOCSTART-", "#end document")))):
        stripped = ((place, line.rstrip("\t")) for place, line in group if is_word)
        if block := [(place, line, line.split("\t") if "\t" in line else
                      [cell for cell in line.split(" ") if cell]) for place, line in stripped]:
            yield block


def _width(block: list[Line], default: int) -> int:
    """Return how many columns most lines have."""
    widths = Counter(len(cells) for *_, cells in block)
    return widths.most_common(1)[0][0] if widths else default


def _form(path: str, lines: Iterator[tuple[str, str]], columns: Mapping[str, int]) -> _Form:
    first = next(lines, ("", ""))
    if first[1].startswith("#FORMAT=WebAnno"):
        raise UserError(f"{path}: WebAnno's TSV is not read; export CoNLL 2003 there")
    is_2012 = first[1].startswith("#begin document")
    asked = columns or (_CONLL2012 if is_2012 else
                        _CONLLU if suffix_of(path) == ".conllu" else {})
    word, tag = (number - (number > 0) for number in (asked.get("word", 1), asked.get("tag", -1)))
    widths: Counter[int] = Counter()
    tags: set[str] = set()
    long = counting = constant = untagged = 0
    for block in _blocks(itertools.chain([first], lines)):
        words = [cells for _, _, cells in
                 itertools.dropwhile(lambda line: line[1].startswith("#"), block)]
        widths.update(map(len, words))
        tags.update(cells[tag] for cells in words if -len(cells) <= tag < len(cells))
        untagged += sum(cells[0] != "O" and not PREFIXED.fullmatch(cells[0]) for cells in words)
        numbers = [cells[0] for cells in words if not _NO_WORD.fullmatch(cells[0])]
        if len(numbers) > 1:
            long += 1
            low = int(numbers[0] != "0")
            counting += numbers == [str(n) for n in range(low, low + len(numbers))]
            constant += len(numbers) > 4 and len(set(numbers)) == 1
    width = widths.most_common(1)[0][0] if widths else 1
    for number, what in ((counting, "counts the words (1, 2, 3 ...)"),
                         (constant, "is the same in all lines of a sentence")):
        if word == 0 and number > 0.9 * long:
            example = _CONLLU if width >= 10 else {"word": 2, "tag": min(3, width)}
            raise UserError(
                f"{path}: column 1 {what}, so it is not the word; name the columns of word and "
                "tag, counted from 1 (-1: the last), such as: "
                f"--word {example['word']} --tag {example['tag']}")
    if asked is _CONLLU and width < _CONLLU["tag"]:
        raise UserError(f"{path}: has {width} columns, and CoNLL-U 10; name those of word and tag, "
                        f"such as: --word {min(2, width)} --tag {width}")
    if word == 0 and width > 1 and not untagged:
        raise UserError(f"{path}: column 1 has the tags; say --word 2 --tag 1")
    in_brackets = "*" in tags and all(map(_BRACKET.fullmatch, tags))
    return _Form(word, tag, width, frozenset(tags), counting > 0.9 * long > 0, in_brackets)


def _is_comment(line: Line, width: int, form: _Form) -> bool:
    _, text, cells = line
    if not text.startswith("#") or len(cells) != width:
        return text.startswith("#")
    if width == 1 or not -width <= form.tag < width or cells[form.tag] in form.tags:
        return False
    if all(tag == "O" or PREFIXED.fullmatch(tag) for tag in form.tags):
        return not PREFIXED.fullmatch(cells[form.tag])
    return re.match(r"#+\s", text) is not None


def _sentence(block: list[Line], form: _Form, is_asked: bool) -> Sentence:
    place, width = block[0][0], _width(block, form.width)
    has_tag = -width <= form.tag < width and form.tag % width != form.word % width
    tokens, tags = [], []
    for where, line, cells in block:
        if len(cells) == width - 1 and line.startswith(" "):  # a space between spaces
            cells = [" ", *cells]
        if len(cells) != width:
            return place, UserError(f"{where}: {line[:40]!r} has {len(cells)} columns, most lines "
                                    f"of its sentence have {width}")
        if not -width <= form.word < width or not cells[form.word]:
            return place, UserError(f"{where}: {line[:40]!r} has no word in column "
                                    f"{form.word + (form.word >= 0)}"
                                    + ("; see --word" if is_asked else
                                       "; name the columns of word and tag: --word 1 --tag -1"))
        tokens.append(cells[form.word])
        tags.append(cells[form.tag] if has_tag else "")
    if set(tags) in ({""}, {"_"}):
        return place, {"tokens": tokens}
    if "" in tags:
        return place, UserError(f"{place}: {tags.count('')} of {len(tags)} tokens have no tag; "
                                "either all tokens of a sentence have a tag, or none")
    return place, {"tokens": tokens, "tags": _opened(tags) if form.in_brackets else tags}


def _opened(tags: list[str]) -> list[str]:
    """Return the tags of CoNLL-2012, which bracket an entity, as IOB2."""
    found, inside = [], ""
    for tag in tags:
        match = _BRACKET.fullmatch(tag)
        assert match
        begins, ends = match.groups()
        found.append(f"B-{begins}" if begins else f"I-{inside}" if inside else "O")
        inside = "" if ends else begins or inside
    return found


if __name__ == "__main__":
    exit_cleanly(main)
