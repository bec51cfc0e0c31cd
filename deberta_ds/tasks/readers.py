"""Task files -> examples: official directories and zips, parquet files and the Hugging Face Hub.

A split is whole or it is an error: the number of predictions must be the official one (a download
that stopped early is otherwise a good file with fewer lines), unless the caller says that the data
is a sample.
"""

import io
import os
import random
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import xxhash

from deberta_ds.base.errors import UserError
from deberta_ds.files import tables
from deberta_ds.tasks.answer_texts import language_of
from deberta_ds.tasks.labels import is_ignored, to_line, without_label
from deberta_ds.tasks.layouts import Example, examples_of
from deberta_ds.tasks.line import line_format
from deberta_ds.tasks.tables import Faults, each_row, stamps_of
from deberta_ds.tasks.task import TASK_NAMES, NoSplitError, TableForm, Task
from deberta_ds.tokenizer.text import normalize, normalize_all

# RuntimeError: encrypted, or packed in a way that Python cannot unpack.
ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)
# The Hub's tables are flat: MultiRC has one row per answer, ReCoRD one per query, labels are class
# numbers and a label of -1 means none. Source: huggingface/datasets datasets/super_glue.
HUB = "hub"
_EMPTY = {*"nan NaN None null NULL <NA> NA N/A #N/A \\N".split()}  # stand for an empty cell
_LEFT_OUT = object()  # no line: one that ignore_labels leaves out
_MOST_BYTES = 1 << 30  # of a table in a zip; the largest official one has a quarter
_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def hub_split(task: Task, split: str) -> str:
    """Return what the Hub calls a split."""
    return task.hub_splits.get(split, _SPLITS[split])


def read_hub(task: Task, split: str) -> list[tuple[str, dict]]:
    """Return (place, row) of a split downloaded from the Hub; needs network once."""
    from datasets import load_dataset

    name = hub_split(task, split)
    try:
        table = load_dataset(task.hub_repository, task.hub, split=name)
    except (OSError, ValueError) as error:
        is_unknown = isinstance(error, ValueError) and "Unknown split" in str(error)
        raise (NoSplitError if is_unknown else UserError)(
            f"{task.hub_repository} {task.hub} {name}: cannot be read from the Hub ({error}); "
            "download the official zip and pass its directory") from error
    return [(f"hub:{task.hub_repository}/{task.hub}/{name}:row {number}", row)
            for number, row in enumerate(table, start=1)]


def official_lines(task: Task, rows: list[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    """Yield (place, object in the format of the official JSON lines) for the Hub's rows."""
    convert = {"multirc": _multirc, "record": _record}.get(task.layout, partial(_flat, task))
    try:
        for number, (place, row) in enumerate(rows):
            answers = task.layout == "answers"
            yield place, to_line(task, place, row, number) if answers else convert(row)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UserError(
            f"{place}: not the Hub's {task.hub} table ({type(error).__name__}: {error}); its "
            f"columns are {', '.join(row)}") from error


def _flat(task: Task, row: dict) -> dict:
    line = {name: value for name, value in row.items() if name != "label"}
    for field, column in task.columns.items():  # GLUE's RTE has other names than SuperGLUE's
        if field not in row and column in row:
            line[field] = row[column]
    if task.name == "WSC":
        names = ("span1_index", "span1_text", "span2_index", "span2_text")
        line["target"] = {name: line.pop(name) for name in names}
    if (number := row["label"]) == -1:
        return line
    if task.head == "regress":
        return line | {"label": float(number)}
    if type(number) is not int or not 0 <= number < len(task.labels):
        raise ValueError(f"label {number!r} is no class number")
    number = task.labels.index((task.hub_labels or task.labels)[number])
    return line | {"label": (task.values or task.labels)[number]}


def _multirc(row: dict) -> dict:
    """Return a line of one question with one answer."""
    idx = row["idx"]
    answer = {"text": row["answer"], "idx": idx["answer"]}
    answer |= {"label": row["label"]} if row["label"] != -1 else {}
    question = {"question": row["question"], "idx": idx["question"], "answers": [answer]}
    return {"idx": idx["paragraph"], "version": 1.1,
            "passage": {"text": row["paragraph"], "questions": [question]}}


def _record(row: dict) -> dict:
    """Return a line of one query."""
    spans = row["entity_spans"]
    # The Hub's spans are end-exclusive, the official files count the last character in.
    entities = [{"start": start, "end": end - 1}
                for start, end in zip(spans["start"], spans["end"], strict=True)]
    qa = {"query": row["query"], "idx": row["idx"]["query"]}
    if row["answers"]:
        qa["answers"] = [{"text": text} for text in row["answers"]]
    # The Hub removes the newlines around @highlight; offsets are kept.
    return {"passage": {"text": row["passage"], "entities": entities}, "qas": [qa],
            "idx": row["idx"]["passage"]}


@dataclass(frozen=True)
class Split:
    """The examples of one split, in file order, and where they came from."""

    task: Task
    source: str
    examples: tuple[Example, ...]
    left_out: str = ""  # what is said of rows that are not among the examples

    @cached_property  # train is compared with every other split
    def text_keys(self) -> list[bytes]:
        """A digest of the texts of each example: tokenizers read normalized ones."""
        texts = iter(normalize_all([text for example in self.examples
                                    for texts in example.sequences for text in texts])[0])
        return [xxhash.xxh3_128_digest("\1".join(
            "\0".join(next(texts) for _ in sequence) for sequence in example.sequences).encode())
            for example in self.examples]


def read_split(task: Task, data: str | Path, split: str, *, any_size: bool = False,
               faults: Faults | None = None) -> Split:
    """Return `split` ("train", "val" or "test") of `task` under `data`.

    `data` is a directory with TASK/split.jsonl, TASK.zip, combined.zip or CONFIG/split-*.parquet,
    a zip, or "hub". Raises UserError naming the files, lines and the expected format of all rows
    that cannot be used, unless `faults` allows them; and, unless `any_size`, when the number of
    predictions is not the official one.
    """
    source, lines = _open(task, data, split)
    examples: list[Example] = []
    seen: dict[int | str | tuple[int, ...], str] = {}
    faults = faults or Faults()
    total = ignored = impossible = 0
    for place, value in lines:
        total += 1
        impossible += isinstance(value, dict) and "is_impossible" in value and (
            value["is_impossible"] == bool(value.get("label")))
        ignored += value is _LEFT_OUT
        try:
            if isinstance(value, UserError):
                raise value
            found = [] if value is _LEFT_OUT else examples_of(task, place, value, split)
            for example in found:
                name = _name(task, example, split)
                if name in seen:
                    what = "id" if name == example.id else "idx"
                    raise UserError(f"{place}: {what} {name} was already used at {seen[name]}; each"
                                    " needs its own, under which its prediction is filed")
                seen[name] = place
            examples += found
        except UserError as error:
            faults.add(place, error)
    labeled = [example for example in examples if example.label is not None]
    if split == "test" and task.ignore_labels and labeled:
        ignored, examples = ignored + len(examples) - len(labeled), labeled
    left_out = f"{ignored:,} of {total:,} rows are left out by ignore_labels" if ignored else ""
    notes = [faults.check(total), left_out]
    if impossible:
        notes.append(f"{impossible:,} of {total:,} questions have answers that contradict "
                     "is_impossible; is_impossible = true counts as without an answer")
    empty = Counter(text for example in examples for part in example.sequences for text in part
                    if text in _EMPTY)
    if empty and task.name not in TASK_NAMES:
        notes.append(f"{empty.total():,} texts are {' or '.join(map(repr, sorted(empty)))}, which "
                     "tables write for an empty cell, and are learned as words")
    if task.layout == "answers" and not task.language:
        contexts = Counter(language_of(example.sequences[0][1]) for example in examples)
        language = max(contexts, key=contexts.__getitem__, default="")
        if language:
            examples = [replace(example, language=language) for example in examples]
            notes.append(f'answers are compared by the rule of language = "{language}"')
    official = task.count(split)
    if not examples:
        why = next((f". The first of {total:,} rows: {one}" for one in faults.errors.values()),
                   f"\n  expected format: {line_format(task)}")
        raise UserError(f"{source}: not a single example in it{why}")
    if official is not None and len(examples) != official and not any_size:
        raise UserError(
            f"{source}: {len(examples)} predictions, but the official {task.name} {split} has "
            f"{official}: the file is truncated or of another release. Fetch it again, or pass "
            "--any_size if this is a sample on purpose")
    if "gender_parity" in task.metrics:
        for first, second in zip(examples[0::2], [*examples[1::2], None], strict=False):
            if second is None or first.sequences[0][1] != second.sequences[0][1]:  # no pair
                raise UserError(
                    f"{first.place}: this line and the next must be a pair with one hypothesis; a "
                    "line is missing or out of order, fetch the file again")
    return Split(task, source, tuple(examples), "; ".join(filter(None, notes)))


def _name(task: Task, example: Example, split: str) -> int | str | tuple[int, ...]:
    """Return what no two examples may share: an id under which a prediction is filed, or the key"""
    if example.id and split != "train":
        return example.id
    return example.key[0] if task.layout == "record" else example.key


def count_shared(first: Split, second: Split) -> tuple[int, str]:
    """Return (how many examples of `second` have the texts of one of `first`, the first's place)"""
    known = set(first.text_keys)
    places = [example.place for example, key in zip(second.examples, second.text_keys, strict=True)
              if key in known]
    return len(places), places[0] if places else ""


def check_targets(split: Split) -> None:
    """Raise UserError unless a labeled split has something to learn, or to be scored by."""
    head, labels = split.task.head, [example.label for example in split.examples]
    if head == "multilabel" and not any(any(label) for label in labels):
        problem = "no row has any of the labels, so F1 is not defined"
    elif head == "tags" and "O" in split.task.labels and \
            {tag for row in labels for tag in row} == {split.task.labels.index("O")}:
        problem = "every word is tagged O, so F1 is not defined"
    elif head == "regress" and len(set(labels)) == 1:
        problem = f"every label is {labels[0]}, so no correlation is defined"
    else:
        return
    raise UserError(f"{split.source}: not a single target in {len(labels)} rows: {problem}; give "
                    "more rows, or look at the label column")


def has_split(task: Task, data: str | Path, split: str) -> bool:
    """Return whether `split` of `task` is under `data`; UserError if what is there is damaged."""
    try:
        _open(task, data, split)
    except NoSplitError:
        return False
    return True


def carve(val: Split, train_share: float, seed: int) -> tuple[Split, Split]:
    """Return (train, val) cut from a labeled split, no passage in both; a function of `seed`.

    For a set whose train file is not at hand. Rows that share their passage (the first text, of
    SQuAD the second) stay together.
    """
    groups: dict[str, list[Example]] = {}
    for example in val.examples:
        text = normalize(example.sequences[0][val.task.long_text])
        groups.setdefault(text, []).append(example)
    texts = sorted(groups)
    random.Random(seed).shuffle(texts)
    train: list[Example] = []
    for text in texts:
        if len(train) >= train_share * len(val.examples):
            break
        train.extend(groups.pop(text))
    kept = tuple(example for group in groups.values() for example in group)
    if not train or not kept:
        raise UserError(f"{val.source}: too few different texts to carve a train and a val split "
                        "from; give more, or a table for each")
    names = Counter(example.id for example in kept if example.id)
    if names and (twice := names.most_common(1)[0])[1] > 1:
        raise UserError(f"{val.source}: {twice[1]} rows have the id {twice[0]!r}; each that is "
                        "evaluated needs its own, under which its prediction is filed")
    note = f"{val.source} split by its first text, seed {seed}"
    return (Split(val.task, note, tuple(train)),
            Split(val.task, note, tuple(sorted(kept, key=lambda example: example.key))))


def _open(task: Task, data: str | Path, split: str) -> tuple[str, Iterable[tuple[str, Any]]]:
    """Return where the split lies and its (place, JSON object) pairs."""
    if task.name not in TASK_NAMES:  # a user's own, whose file names its tables: no other is read
        if split not in task.files:
            raise NoSplitError(f"{task.name}: its task file names no {split} table")
        return task.files[split], table_lines(task, task.files[split], split)
    if str(data) == HUB:
        return f"hub:{task.hub}/{split}", official_lines(task, read_hub(task, split))
    root = Path(data)
    shards = f"{root / task.hub}/{hub_split(task, split)}-*.parquet"
    name = f"{task.name}/{task.name if task.predicted_by else split}.jsonl"
    tried = []
    if root.is_file() and root.suffix == ".zip":
        archives = [root]
    elif root.is_dir():
        file = root / name
        if file.is_file():
            return str(file), tables.read_each(file)
        tried.append(str(file))
        if split in task.files:
            also = (task.files[split],) if task.layout == "answers" else task.also_at
            for place in (f"{task.name}/{task.files[split]}", *also):
                if os.path.exists(table := os.path.normpath(root / place)):
                    return table, table_lines(task, table, split)
                tried.append(table)
        archives = [root / f"{task.name}.zip", root / "combined.zip"]
        if task.hub and (parquet := sorted(Path(shards).parent.glob(Path(shards).name))):
            rows = [row for shard in parquet for row in tables.read_table(shard)]
            return shards, official_lines(task, rows)
    else:
        raise UserError(f"{root}: no such directory or zip of task data; name the one that holds "
                        f"{name}, or download it with --data hub")
    for archive in archives:
        tried.append(f"{archive}!{name}")
        if archive.is_file() and (found := _member(archive, name)) is not None:
            return f"{archive}!{name}", tables.read_each(f"{archive}!{name}", io.BytesIO(found))
    raise NoSplitError(
        f"{task.name} {split} is not there: looked for {', '.join(tried)} and {shards}. Unpack the "
        f"official {task.name}.zip there, or use --data {HUB} on a machine with network\n"
        f"  expected format: {line_format(task)}")


def table_lines(task: Task, table: str | Path, split: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, line) of a table: the UserError of one that cannot be read, _LEFT_OUT for one
    that is (of a test table: a line without label). GLUE's test tables have a header.
    """
    if split == "train" and task.stamps and stamps_of(str(table)) != task.stamps:
        raise UserError(f"{table}: changed since its labels were read; run the same command again "
                        "when nothing writes to it any more")
    headless = task.headless if split != "test" else ()
    broken = task.broken_rows if split == "train" else 0
    form = TableForm(quoted=False) if task.name in TASK_NAMES else task.form
    for number, (place, row) in enumerate(each_row(table, headless, broken, form)):
        try:
            if isinstance(row, UserError):
                raise row
            if is_ignored(task, row):
                if split != "test":
                    yield place, _LEFT_OUT
                    continue
                row = without_label(task, row)
            yield place, to_line(task, place, row, number)
        except UserError as error:
            yield place, error


def _member(archive: Path, name: str) -> bytes | None:
    """Return the bytes of the archive member whose path ends in `name`, None if there is none."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in opened.namelist():
                if member == name or member.endswith("/" + name):
                    if (size := opened.getinfo(member).file_size) > _MOST_BYTES:
                        raise UserError(f"{archive}!{member}: has {size:,} bytes, and at most "
                                        f"{_MOST_BYTES:,} are read; unpack it")
                    return opened.read(member)
    except ZIP_DAMAGE as error:
        raise UserError(f"{archive}: not a whole zip file ({error}); fetch it again") from error
    return None
