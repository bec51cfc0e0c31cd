"""Predictions -> the leaderboard's zip, and a validator that reads a zip back.

The server wants exactly ten files with one line per test prediction in idx order; label strings
differ per task ("true" for BoolQ and WiC, "True" for WSC, an int for COPA). Source: jiant
evaluate.py SUPERGLUE_NAME_MAP and jiant scripts/benchmarks/benchmarks.py, which agree.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deberta_ds.base.errors import UserError, refuse_pipe
from deberta_ds.base.files import atomic_path
from deberta_ds.base.json_files import parse_json
from deberta_ds.finetuning.layouts import Example, class_of, classes_of
from deberta_ds.finetuning.metrics import Prediction, spans_of
from deberta_ds.finetuning.tasks import GLUE, SUBMITTED_FILES, TASKS, Task

# RuntimeError: encrypted, or packed in a way that Python cannot unpack.
ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # what a zip says of the hour would differ each time


def render(task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]) -> str:
    """Return the text of one submission file: JSON lines in idx order."""
    pairs = sorted(zip(examples, predictions, strict=True), key=lambda pair: pair[0].key)
    if task.layout == "multirc":
        lines = _nest(task, pairs)
    else:
        lines = [
            {"idx": example.key[0], "label": as_written(task, prediction)}
            for example, prediction in pairs
        ]
    if task.words == "raw":  # entities, as the training table has them
        for line, (example, _) in zip(lines, pairs, strict=True):
            line["label"] = [[example.spans[first].start, example.spans[end - 1].end, name]
                             for name, first, end in spans_of(line["label"])]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def as_written(task: Task, prediction: Prediction) -> Any:
    """Return a prediction as the leaderboard, or the task's own files, write it."""
    names = task.submitted or task.labels
    if task.head == "tags":
        return [names[tag] for tag in classes_of(prediction)]
    if task.head == "multilabel":
        return [name for name, chosen in zip(names, classes_of(prediction), strict=True) if chosen]
    if task.head in ("mentions", "answer"):
        return prediction
    if task.head == "regress":
        return float(f"{prediction:.7g}")  # what fp32 holds
    return names[class_of(prediction)]


def _nest(task: Task, pairs: Sequence[tuple[Example, Prediction]]) -> list[dict]:
    passages: dict[int, dict[int, list[dict]]] = {}
    for example, prediction in pairs:
        passage, question, answer = example.key
        answers = passages.setdefault(passage, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": as_written(task, prediction)})
    return [
        {
            "idx": passage,
            "passage": {
                "questions": [{"idx": q, "answers": answers} for q, answers in questions.items()]
            },
        }
        for passage, questions in passages.items()
    ]


def write_zip(
    path: str | Path,
    texts: Mapping[str, str],
    tests: Mapping[str, Sequence[Example]],
    left_out: Sequence[str] = (),
    places: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write the zip of {task name: file text} at `path`, once every file has passed `check_file`.

    `left_out` names the tasks that may be missing; any other missing one is a UserError. `places`
    are the files that the texts come from, for errors.
    """
    missing = [task.name for task in TASKS if task.name not in texts]
    refuse_partial(missing, left_out, str(path))
    entries = {}
    for task in TASKS:
        if task.name in texts:
            name = f"{task.name}.jsonl"
            entries[name] = texts[task.name]
            check_file(task, entries[name], tests[task.name], str(places.get(task.name, name)))
    write_entries(path, entries)


def write_entries(path: str | Path, entries: Mapping[str, str]) -> None:
    """Write the zip of {name: text}; the same texts give the same zip, byte for byte."""
    with atomic_path(path) as temporary:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in entries.items():
                entry = zipfile.ZipInfo(name, _FIXED_TIME)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, text)


def refuse_partial(missing: Sequence[str], left_out: Sequence[str], place: str) -> None:
    """Raise UserError unless exactly the tasks in `left_out` are `missing`."""
    unnamed = [name for name in missing if name not in left_out]
    if unnamed:
        raise UserError(
            f"{place}: no predictions for {', '.join(unnamed)}; the leaderboard takes all "
            f"files or none. For a partial zip, name them: --leave_out {' '.join(unnamed)}"
        )
    present = [name for name in left_out if name not in missing]
    if present:
        raise UserError(f"{place}: --leave_out names {', '.join(present)}, which is there")


def check_zip(
    path: str | Path, tests: Mapping[str, Sequence[Example]], left_out: Sequence[str] = ()
) -> None:
    """Raise UserError unless the zip at `path` is one the leaderboard takes.

    `tests` holds the official test examples of every task: file set, line counts, idx order, label
    strings and MultiRC's nesting are compared with them.
    """
    refuse_pipe(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            _check_names(path, names, left_out)
            broken = archive.testzip()
            if broken:
                raise UserError(f"{path}!{broken}: the checksum is wrong; make the zip again")
            contents = {name: archive.read(name) for name in names}
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except ZIP_DAMAGE as error:
        raise UserError(f"{path}: not a whole zip file ({error}); make the zip again") from error
    for task in TASKS:
        name = f"{task.name}.jsonl"
        if name in contents:
            try:
                text = contents[name].decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}!{name}: not UTF-8 text ({error.reason})") from error
            check_file(task, text, tests[task.name], f"{path}!{name}")


def _check_names(path: str | Path, names: Sequence[str], left_out: Sequence[str]) -> None:
    for name in names:
        if name not in SUBMITTED_FILES:
            wanted = ", ".join(SUBMITTED_FILES)
            raise UserError(f"{path}: unexpected file {name!r}; the files must be exactly {wanted}")
        if names.count(name) > 1:
            raise UserError(f"{path}: {name} is there {names.count(name)} times")
    missing = [task.name for task in TASKS if f"{task.name}.jsonl" not in names]
    refuse_partial(missing, left_out, str(path))


def check_file(task: Task, text: str, test: Sequence[Example], place: str) -> None:
    """Raise UserError naming the first line of `text` that is not what the test set asks for."""
    lines = text.split("\n")
    if lines[-1]:
        raise UserError(f"{place}:{len(lines)}: the last line has no line end; it may be cut short")
    lines.pop()
    wanted = _wanted(task, test)
    for number, (line, expected) in enumerate(zip(lines, wanted, strict=False), start=1):
        _check_line(task, line, expected, f"{place}:{number}")
    if len(lines) != len(wanted):
        raise UserError(f"{place}: {len(lines)} lines, the test set asks for {len(wanted)}")


def _wanted(task: Task, test: Sequence[Example]) -> list[Any]:
    """Return the frame of every line: its idx (and MultiRC's questions, ReCoRD's entities)."""
    ordered = sorted(test, key=lambda example: example.key)
    if task.layout == "multirc":
        return _nest(task, [(example, 0) for example in ordered])
    return [(example.key[0], example.names) for example in ordered]


def _check_line(task: Task, line: str, expected: Any, place: str) -> None:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: not a JSON object ({error})") from error
    if task.layout == "multirc":
        _check_same(task, value, expected, place, "")
        return
    idx, names = expected
    _check_keys(value, {"idx", "label"}, place, "")
    if type(value["idx"]) is not int or value["idx"] != idx:
        found = value["idx"]
        raise UserError(f"{place}: idx must be {idx} here (an int, in order), found {found!r}")
    _check_label(task, value["label"], names, place)


def _check_keys(value: Any, keys: set[str], place: str, where: str) -> None:
    if not isinstance(value, dict) or set(value) != keys:
        found = ", ".join(sorted(value)) if isinstance(value, dict) else repr(value)
        raise UserError(
            f"{place}: {where or 'the line'} must hold exactly {', '.join(sorted(keys))}; "
            f"found {found}"
        )


def _check_label(task: Task, label: Any, names: Sequence[str], place: str) -> None:
    if task.layout == "record":
        if type(label) is not str or label not in names:
            raise UserError(f"{place}: label {label!r} is not an entity of the query's passage")
        return
    if not any(type(label) is type(known) and label == known for known in task.submitted):
        wanted = " or ".join(json.dumps(known) for known in task.submitted)
        raise UserError(f"{place}: label must be {wanted}, found {label!r}")


def _check_same(task: Task, value: Any, expected: Any, place: str, where: str) -> None:
    """Compare a nested MultiRC line with its frame; labels are free, everything else is fixed."""
    if isinstance(expected, dict):
        _check_keys(value, set(expected), place, where)
        for key, part in expected.items():
            if key == "label":
                _check_label(task, value[key], (), place)
            else:
                _check_same(task, value[key], part, place, f"{where}.{key}".lstrip("."))
    elif isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            found = len(value) if isinstance(value, list) else repr(value)
            raise UserError(f"{place}: {where} must have {len(expected)} entries, found {found}")
        for position, part in enumerate(expected):
            _check_same(task, value[position], part, place, f"{where}[{position}]")
    elif type(value) is not type(expected) or value != expected:
        raise UserError(f"{place}: {where} must be {expected!r} here (in order), found {value!r}")


# Predictions -> the zip of GLUE's leaderboard: one table a test set, "index" and "prediction".
#
# Source: the leaderboard's instructions (gluebenchmark.com/faq) and jiant evaluate.py
# GLUE_NAME_MAP: 11 files; CoLA, SST-2, MRPC, QQP and WNLI with numbers, STS-B with a decimal, the
# others with names.
_HEADER = "index\tprediction"


def file_name(task: Task) -> str:
    """Return what the leaderboard calls the predictions of `task`."""
    return f"{'MNLI-m' if task.name == 'MNLI' else task.name}.tsv"


def table_of(lines: str, place: str) -> str:
    """Return the table of a run's submission/TASK.jsonl."""
    rows = [_HEADER]
    for number, line in enumerate(lines.splitlines(), start=1):
        try:
            value = parse_json(line)
            rows.append(f"{value['idx']}\t{value['label']}")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{place}:{number}: not a prediction ({error}); run the task again"
                            ) from error
    return "\n".join(rows) + "\n"


def check_table(task: Task, text: str, test: Sequence[Example], place: str) -> None:
    """Raise UserError naming the first line that is not what the test set asks for."""
    lines = text.split("\n")
    if lines[-1] or lines[0].rstrip("\r") != _HEADER:
        raise UserError(f"{place}: must begin with {_HEADER!r} and end with a line end")
    rows = lines[1:-1]
    if len(rows) != len(test):
        raise UserError(f"{place}: {len(rows)} predictions, the test set asks for {len(test)}")
    for number, row in enumerate(rows):
        index, _, label = row.rstrip("\r").partition("\t")
        if index != str(number):
            raise UserError(f"{place}:{number + 2}: index must be {number}, found {index!r}")
        if not _is_label(task, label):
            wanted = "a number" if task.head == "regress" else " or ".join(map(str, task.submitted))
            raise UserError(f"{place}:{number + 2}: prediction must be {wanted}, found {label!r}")


def _is_label(task: Task, label: str) -> bool:
    if task.head != "regress":
        return label in map(str, task.submitted)
    try:
        return abs(float(label)) < 1e6  # false for NaN and infinity
    except ValueError:
        return False


def write_glue_zip(
    path: str | Path, texts: Mapping[str, str], tests: Mapping[str, Sequence[Example]],
    left_out: Sequence[str] = (), places: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write the zip of {task name: text of its submission/TASK.jsonl}, every table checked.

    `places` are the files that the texts come from, for errors.
    """
    refuse_partial([task.name for task in GLUE if task.name not in texts], left_out, str(path))
    tables = {}
    for task in GLUE:
        if task.name in texts:
            name, place = file_name(task), places.get(task.name, f"{task.name}.jsonl")
            tables[name] = table_of(texts[task.name], str(place))
            check_table(task, tables[name], tests[task.name], name)
    write_entries(path, tables)


def check_glue_zip(
    path: str | Path, tests: Mapping[str, Sequence[Example]], left_out: Sequence[str] = ()
) -> None:
    """Raise UserError unless the zip holds exactly the files of GLUE, but for those left out."""
    wanted = {file_name(task): task for task in GLUE if task.name not in left_out}
    refuse_pipe(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if sorted(names) != sorted(wanted):
                raise UserError(f"{path}: the files must be exactly {', '.join(wanted)}; found "
                                f"{', '.join(names) or 'none'}")
            texts = {name: archive.read(name).decode("utf-8") for name in names}
    except (*ZIP_DAMAGE, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a whole zip of text tables ({error})") from error
    for name, text in texts.items():
        check_table(wanted[name], text, tests[wanted[name].name], f"{path}!{name}")
