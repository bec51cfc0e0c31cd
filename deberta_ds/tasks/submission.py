"""Predictions -> the leaderboard's zip, and a validator that reads a zip back.

SuperGLUE's server wants exactly ten files with one line per test prediction in idx order; label
strings differ per task ("true" for BoolQ and WiC, "True" for WSC, an int for COPA). Source: jiant
evaluate.py SUPERGLUE_NAME_MAP and jiant scripts/benchmarks/benchmarks.py, which agree.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deberta_ds.base.errors import UserError, refuse_pipe
from deberta_ds.base.files import atomic_path, parse_json
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.metrics import Prediction, spans_of
from deberta_ds.tasks.readers import ZIP_DAMAGE
from deberta_ds.tasks.task import SUITES, Task

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # what a zip says of the hour would differ each time


def render(task: Task, examples: Sequence[Example], predictions: Sequence[Prediction]) -> str:
    """Return the text of one submission file: JSON lines in idx order."""
    labels = [as_written(task, prediction) for prediction in predictions]
    if task.words == "raw":  # entities, as the training table has them
        labels = [[[example.spans[first].start, example.spans[end - 1].end, name]
                   for name, first, end in spans_of(tags)]
                  for example, tags in zip(examples, labels, strict=True)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n"
                   for line in _lines(task, examples, labels))


def as_written(task: Task, prediction: Prediction) -> Any:
    """Return a prediction as the leaderboard, or the task's own files, write it."""
    names = task.submitted or task.labels
    if task.head == "tags":
        return [names[tag] for tag in prediction]
    if task.head == "multilabel":
        return [name for name, chosen in zip(names, prediction, strict=True) if chosen]
    if task.head in ("mentions", "answer"):
        return prediction
    if task.head == "regress":
        return float(f"{prediction:.7g}")  # what fp32 holds
    return names[prediction]


def _lines(task: Task, examples: Sequence[Example], labels: Sequence[Any]) -> list[dict]:
    """Return what the lines of a file hold, in idx order; those of MultiRC are nested."""
    pairs = sorted(zip(examples, labels, strict=True), key=lambda pair: pair[0].key)
    if task.layout != "multirc":
        return [{"idx": example.key[0], "label": label} for example, label in pairs]
    passages: dict[int, dict[int, list[dict]]] = {}
    for example, label in pairs:
        passage, question, answer = example.key
        answers = passages.setdefault(passage, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": label})
    return [{"idx": passage, "passage": {"questions": [
        {"idx": question, "answers": answers} for question, answers in questions.items()]}}
        for passage, questions in passages.items()]


def file_name(task: Task, suite: str) -> str:
    """Return what the leaderboard calls the predictions of `task`."""
    if suite == "SuperGLUE":
        return f"{task.name}.jsonl"
    return "MNLI-m.tsv" if task.name == "MNLI" else f"{task.name}.tsv"


def write_zip(path: str | Path, texts: Mapping[str, str], tests: Mapping[str, Sequence[Example]],
              left_out: Sequence[str] = (), places: Mapping[str, object] = MappingProxyType({}),
              suite: str = "SuperGLUE") -> None:
    """Write the zip of {task name: text of its submission/TASK.jsonl}, every file checked.

    `left_out` names the tasks that may be missing; any other missing one is a UserError. `places`
    are the files that the texts come from, for errors. The same texts give the same bytes.
    """
    tasks = SUITES[suite]
    reject_partial([task.name for task in tasks if task.name not in texts], left_out, str(path))
    entries = {}
    for task in tasks:
        if task.name in texts:
            name, text = file_name(task, suite), texts[task.name]
            place = str(places.get(task.name, f"{task.name}.jsonl"))
            if suite == "GLUE":
                text, place = table_of(text, place), name
            entries[name] = text
            _CHECKS[suite](task, text, tests[task.name], place)
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, text in entries.items():
            archive.writestr(zipfile.ZipInfo(name, _FIXED_TIME), text, zipfile.ZIP_DEFLATED)


def reject_partial(missing: Sequence[str], left_out: Sequence[str], place: str) -> None:
    """Raise UserError unless exactly the tasks in `left_out` are `missing`."""
    if unnamed := [name for name in missing if name not in left_out]:
        raise UserError(
            f"{place}: no predictions for {', '.join(unnamed)}; the leaderboard takes all "
            f"files or none. For a partial zip, name them: --leave_out {' '.join(unnamed)}")
    if present := [name for name in left_out if name not in missing]:
        raise UserError(f"{place}: --leave_out names {', '.join(present)}, which is there")


def check_zip(path: str | Path, tests: Mapping[str, Sequence[Example]],
              left_out: Sequence[str] = (), suite: str = "SuperGLUE") -> None:
    """Raise UserError unless the zip at `path` is one the leaderboard takes.

    `tests` holds the official test examples of every task: file set, line counts, idx order, label
    strings and MultiRC's nesting are compared with them.
    """
    wanted = {file_name(task, suite): task for task in SUITES[suite]}
    refuse_pipe(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                if name not in wanted:
                    raise UserError(f"{path}: unexpected file {name!r}; the files must be exactly "
                                    f"{', '.join(wanted)}")
                if names.count(name) > 1:
                    raise UserError(f"{path}: {name} is there {names.count(name)} times")
            reject_partial([task.name for name, task in wanted.items() if name not in names],
                           left_out, str(path))
            contents = {name: archive.read(name) for name in names}  # checksums are compared, too
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except ZIP_DAMAGE as error:
        raise UserError(f"{path}: not a whole zip file ({error}); make the zip again") from error
    for name, data in contents.items():
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}!{name}: not UTF-8 text ({error.reason})") from error
        _CHECKS[suite](wanted[name], text, tests[wanted[name].name], f"{path}!{name}")


def check_file(task: Task, text: str, test: Sequence[Example], place: str) -> None:
    """Raise UserError naming the first line of `text` that is not what the test set asks for."""
    lines = text.split("\n")
    if lines[-1]:
        raise UserError(f"{place}:{len(lines)}: the last line has no line end; it may be cut short")
    lines.pop()
    wanted = _lines(task, test, [tuple(example.names or task.submitted) for example in test])
    for number, (line, expected) in enumerate(zip(lines, wanted, strict=False), start=1):
        try:
            value = parse_json(line)
        except ValueError as error:
            raise UserError(f"{place}:{number}: not a JSON object ({error})") from error
        labels: list[Any] = []
        allowed: list[list[Any]] = []
        shape = _without_labels(expected, allowed)
        if _without_labels(value, labels) != shape or len(labels) != len(allowed):
            raise UserError(f"{place}:{number}: must be {shape}, found {line:.200}")
        for label, known in zip(labels, allowed, strict=True):
            if json.dumps(label) not in (names := list(map(json.dumps, known))):
                what = "an entity of the query's passage" if task.layout == "record" else \
                    " or ".join(names)
                raise UserError(f"{place}:{number}: label must be {what}, found {label!r}")
    if len(lines) != len(wanted):
        raise UserError(f"{place}: {len(lines)} lines, the test set asks for {len(wanted)}")


def _without_labels(value: Any, labels: list) -> str:
    """Return a line with "..." for every label, which `labels` gets."""
    def hide(part: dict[str, Any]) -> dict[str, Any]:
        if "label" in part:
            labels.append(part["label"])
            part["label"] = "..."
        return part

    return json.dumps(json.loads(json.dumps(value), object_hook=hide), sort_keys=True)


# Predictions -> the zip of GLUE's leaderboard: one table a test set, "index" and "prediction".
#
# Source: the leaderboard's instructions (gluebenchmark.com/faq) and jiant evaluate.py
# GLUE_NAME_MAP: 11 files; CoLA, SST-2, MRPC, QQP and WNLI with numbers, STS-B with a decimal, the
# others with names.
_HEADER = "index\tprediction"


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
        if not is_label(task, label):
            wanted = "a number" if task.head == "regress" else " or ".join(map(str, task.submitted))
            raise UserError(f"{place}:{number + 2}: prediction must be {wanted}, found {label!r}")


def is_label(task: Task, label: str) -> bool:
    """Return whether a leaderboard takes a label."""
    if task.head != "regress":
        return label in map(str, task.submitted)
    try:
        return abs(float(label)) < 1e6  # false for NaN and infinity
    except ValueError:
        return False


_CHECKS = {"SuperGLUE": check_file, "GLUE": check_table}
