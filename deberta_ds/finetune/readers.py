"""Task files -> examples: official directories and zips, parquet files and the Hugging Face Hub.

A split is whole or it is an error: the number of predictions must be the official one (a download
that stopped early is otherwise a good file with fewer lines), unless the caller says that the data
is a sample.
"""

import json
import random
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deberta_ds.errors import UserError
from deberta_ds.finetune.hub import HUB, official_lines, read_hub, read_parquet
from deberta_ds.finetune.layouts import Example, examples_of
from deberta_ds.finetune.tasks import MNLI, Task

_COMBINED = "combined.zip"


@dataclass(frozen=True)
class Split:
    """The examples of one split, in file order, and where they came from."""

    task: Task
    split: str
    source: str
    examples: tuple[Example, ...]


def read_split(task: Task, data: str | Path, split: str, *, any_size: bool = False) -> Split:
    """Return `split` ("train", "val" or "test") of `task` under `data`.

    `data` is a directory with TASK/split.jsonl, TASK.zip, combined.zip or CONFIG/split-*.parquet,
    a zip, or "hub". Raises UserError naming the file, the line and the expected format; and,
    unless `any_size`, when the number of predictions is not the official one.
    """
    source, lines = _open(task, data, split)
    examples: list[Example] = []
    seen: dict[int | tuple, str] = {}
    for place, value in lines:
        for example in examples_of(task, place, value, split):
            name = example.key[0] if task.layout == "record" else example.key
            if name in seen:
                raise UserError(f"{place}: idx {name} was already used at {seen[name]}")
            seen[name] = place
            examples.append(example)
    official = task.count(split)
    if not examples:
        raise UserError(f"{source}: the file is empty\n  expected format: {task.line}")
    if official is not None and len(examples) != official and not any_size:
        raise UserError(
            f"{source}: {len(examples)} predictions, but the official {task.name} {split} has "
            f"{official}: the file is truncated or of another release. Fetch it again, or pass "
            "--any_size if this is a sample on purpose"
        )
    if "gender_parity" in task.metrics:
        _check_pairs(examples)
    return Split(task, split, source, tuple(examples))


def _check_pairs(examples: list[Example]) -> None:
    """Raise UserError unless lines 2k and 2k+1 are minimal pairs: gender parity compares them."""
    for first, second in zip(examples[0::2], [*examples[1::2], None], strict=False):
        if second is None or first.sequences[0][1] != second.sequences[0][1]:
            raise UserError(f"{first.place}: this line and the next must be a pair with one "
                            "hypothesis; a line is missing or out of order, fetch the file again")


def has_split(task: Task, data: str | Path, split: str) -> bool:
    """Return whether `split` of `task` exists under `data` (without reading it)."""
    try:
        _open(task, data, split)
    except UserError:
        return False
    return True


def carve(val: Split, train_share: float, seed: int) -> tuple[Split, Split]:
    """Return (train, val) cut from a labelled split, no passage in both; a function of `seed`.

    For a set whose train file is not at hand. Rows that share their first text stay together.
    """
    groups: dict[str, list[Example]] = {}
    for example in val.examples:
        groups.setdefault(example.sequences[0][0], []).append(example)
    texts = sorted(groups)
    random.Random(seed).shuffle(texts)
    train: list[Example] = []
    for text in texts:
        if len(train) >= train_share * len(val.examples):
            break
        train.extend(groups.pop(text))
    kept = tuple(example for group in groups.values() for example in group)
    if not train or not kept:
        raise UserError(f"{val.source}: too few passages to carve a train split from")
    note = f"{val.source} carved by passage, seed {seed}"
    return (
        Split(val.task, "train", note, tuple(train)),
        Split(val.task, "val", note, tuple(sorted(kept, key=lambda example: example.key))),
    )


def _open(task: Task, data: str | Path, split: str) -> tuple[str, Iterable[tuple[str, Any]]]:
    """Return where the split lies and its (place, JSON object) pairs."""
    if str(data) == HUB:
        return f"hub:{task.hub}/{split}", official_lines(task, read_hub(task, split))
    root = Path(data)
    name = f"{task.name}/{task.name if task.predicted_by else split}.jsonl"
    tried = []
    if root.is_file() and root.suffix == ".zip":
        archives = [root]
    elif root.is_dir():
        file = root / name
        if file.is_file():
            return str(file), _jsonl(str(file), _read(file))
        tsv = root / task.name / _MNLI_FILES.get(split, "")
        if task is MNLI and tsv.is_file():
            return str(tsv), _mnli_tsv(tsv)
        tried.append(str(file))
        archives = [root / f"{task.name}.zip", root / _COMBINED]
        parquet = sorted((root / task.hub).glob(f"{_PARQUET[split]}-*.parquet"))
        if parquet:
            place = f"{root / task.hub}/{_PARQUET[split]}-*.parquet"
            return place, official_lines(task, read_parquet(parquet, place))
    else:
        raise UserError(f"{root}: no such directory or zip of SuperGLUE data")
    for archive in archives:
        tried.append(f"{archive}!{name}")
        if archive.is_file() and (found := _member(archive, name)) is not None:
            return f"{archive}!{name}", _jsonl(f"{archive}!{name}", found)
    raise UserError(
        f"{task.name} {split} is not there: looked for {', '.join(tried)} and "
        f"{root / task.hub}/{_PARQUET[split]}-*.parquet. Unpack "
        f"https://dl.fbaipublicfiles.com/glue/superglue/data/v2/{task.name}.zip there, or use "
        f"--data {HUB} on a machine with network\n  expected format: {task.line}"
    )


_PARQUET = {"train": "train", "val": "validation", "test": "test"}
_MNLI_FILES = {"train": "train.tsv", "val": "dev_matched.tsv", "test": "test_matched.tsv"}


def _member(archive: Path, name: str) -> bytes | None:
    """Return the bytes of the archive member whose path ends in `name`, None if there is none."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in opened.namelist():
                if member == name or member.endswith("/" + name):
                    return opened.read(member)
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error, RuntimeError) as error:
        # RuntimeError: encrypted, or packed in a way that Python cannot unpack.
        raise UserError(f"{archive}: not a whole zip file ({error}); fetch it again") from error
    return None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def _jsonl(source: str, data: bytes) -> Iterator[tuple[str, Any]]:
    text = _decoded(source, data)
    # Not splitlines(): a passage may hold U+2028, which is no line end in JSON lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{source}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
                raise UserError(
                    f"{source}:{number}: not a JSON object ({error}); a line cut short means a "
                    "download that stopped"
                ) from error


def _decoded(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{source}:{line}: not UTF-8 text ({error.reason}); save the file as "
                        "UTF-8") from error  # fmt: skip


def _mnli_tsv(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield GLUE's MNLI file as lines of the premise/hypothesis format (last column: the label)."""
    lines = _decoded(str(path), _read(path)).removesuffix("\n").split("\n")
    rows = (line.removesuffix("\r").split("\t") for line in lines)  # GLUE's files quote nothing
    header = next(rows)
    if "sentence1" not in header or "sentence2" not in header:
        raise UserError(f"{path}:1: no columns sentence1 and sentence2; this is not GLUE's MNLI")
    first, second = header.index("sentence1"), header.index("sentence2")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise UserError(f"{path}:{number}: {len(row)} columns, the header has {len(header)}")
        line = {"premise": row[first], "hypothesis": row[second], "idx": number - 2}
        if header[-1] == "gold_label":
            line["label"] = row[-1]
        yield f"{path}:{number}", line
