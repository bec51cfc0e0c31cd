"""Predictions -> the zip of GLUE's leaderboard: one table a test set, "index" and "prediction".

Source: the leaderboard's instructions (gluebenchmark.com/faq) and jiant evaluate.py GLUE_NAME_MAP:
11 files; CoLA, SST-2, MRPC, QQP and WNLI with numbers, STS-B with a decimal, the others with names.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from deberta_ds.errors import UserError, refuse_pipe
from deberta_ds.finetune.layouts import Example
from deberta_ds.finetune.submission import ZIP_DAMAGE, refuse_partial, write_entries
from deberta_ds.finetune.tasks import GLUE, Task
from deberta_ds.json_files import parse_json

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


def write_zip(
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


def check_zip(
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
