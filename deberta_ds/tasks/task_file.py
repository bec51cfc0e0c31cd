"""A task of the user's own, described by a TOML file: which columns of which tables are what.

    name = "tickets"
    kind = "classification"        # or multilabel, regression, choice, tags, spans
    texts = ["title", "body"]      # columns in the order the model reads them; the first may be cut
    label = "queue"
    train = "train.csv"            # paths are relative to the TOML file
    val = "val.csv"                # or val_share = 0.1 of train

    [settings]                     # as in a settings file
    epochs = 3

It becomes a `Task`, so that everything after that is what the benchmarks' tasks use.
"""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.config.options import nearest, validate
from deberta_ds.config.toml_files import read_toml
from deberta_ds.tasks.answer_texts import LANGUAGES
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.table_labels import with_labels
from deberta_ds.tasks.tables import HUB_TABLE, files_like
from deberta_ds.tasks.task import TASK_NAMES, TEST, HeadKind, Layout, OwnTask, TableForm, Task

_OF_TWO = ("binary_f1", "f1a", "matthews")  # metrics of a class against another one
# kind: (head, layout, metrics, how many of them are the usual ones)
_FORMS: dict[str, tuple[HeadKind, Layout, tuple[str, ...], int]] = {
    "classification": ("classify", "texts", ("accuracy", "macro_f1", "matthews_multi", *_OF_TWO),
                       2),
    "multilabel": ("multilabel", "texts", ("micro_f1", "macro_f1", "exact_labels"), 2),
    "regression": ("regress", "texts", ("pearson", "spearman"), 2),
    "choice": ("choice", "choices", ("accuracy",), 1),
    "tags": ("tags", "tags", ("span_f1", "tag_accuracy"), 1),
    "spans": ("answer", "answers", ("f1", "em", "f1_v2", "em_v2"), 2),
}
_KINDS_OF = {"separator": "multilabel", "first_answer": "choice", "decimal": "regression",
             "start": "spans", "language": "spans"}
_PLAIN = (("0", "1"), ("False", "True"), ("false", "true"), ("no", "yes"))
_TAKEN = ("idx", "id", "label", "start")


def load_own_task(path: str | Path) -> tuple[Task, str]:
    """Return (the task of a file, a line on the labels that were found).

    Raises UserError naming the file, the key and what it may be.
    """
    path = Path(path)
    own = validate(OwnTask, read_toml(path, "task file", "the one in docs/how-to/fine-tune.md"),
                   str(path))
    for fault in _faults(own):
        raise UserError(f"{path}: {fault}")
    validate(Settings, dict(own.settings), f"{path}, [settings]")
    head, layout, metrics, usual = _FORMS[own.kind]
    files = {split: name if name.startswith(HUB_TABLE)
             else _found_from(path.parent.resolve(), name) for split, name in
             (("train", own.train), ("val", own.val), ("test", own.test),
              *((TEST + name, table) for name, table in own.tests.items())) if name}
    if not (train := files["train"]).startswith(HUB_TABLE) and not os.path.exists(train):
        if not glob.has_magic(train):
            raise UserError(f"{path}: train = {own.train!r}: {train}: no such file; paths are "
                            "relative to the task file")
        files_like(train)
    columns = (own.label,) if isinstance(own.label, str) else own.label
    named = {"label": columns[0], "start": own.start, "group": own.group}
    task = Task(
        name=own.name, head=head, layout=layout, labels=own.labels, texts=own.texts,
        choices=own.choices, metrics=own.metrics or metrics[:usual], files=files,
        language=own.language, columns={field: name for field, name in named.items() if name},
        may_be_blank=len(own.texts) > 1, val_share=own.val_share, settings=own.settings,
        form=TableForm(encoding=own.encoding, delimiter=own.delimiter, quoted=own.quoted,
                       header=own.header and not own.names, names=own.names),
        separator=own.separator or ",", ignore_labels=own.ignore_labels,
        label_columns=() if isinstance(own.label, str) else own.label,
        first_answer=own.first_answer or 0)
    task, said = with_labels(task, own, path)
    for name in set(own.metrics) & set(_OF_TWO):
        if len(task.labels) != 2:
            raise UserError(f"{path}: metrics: {name!r} is of two labels, and there are "
                            f"{len(task.labels)}; take macro_f1 or matthews_multi")
        if name != "matthews" and not own.labels and task.labels not in _PLAIN:
            raise UserError(f"{path}: metrics: {name} is the F1 of the second of two labels; say "
                            f"which it is: labels = {json.dumps(list(task.labels))}, or the other "
                            "way around")
    return task, said


def _found_from(directory: Path, name: str) -> str:
    """Return where a table or a pattern lies; the directory's own [ or * is no pattern."""
    place = os.path.join(directory, name)
    if glob.has_magic(name) and not os.path.exists(place):
        place = os.path.join(glob.escape(str(directory)), name)
    return os.path.normpath(place)


def _faults(own: OwnTask) -> Iterator[str]:
    """Yield what is wrong with a task file."""
    if own.name in TASK_NAMES or not _is_name(own.name):
        yield (f"name = {own.name!r} must be letters, digits, - and _, and not a benchmark's task")
    if (own.kind == "choice") != bool(own.choices):
        yield 'choices are needed for kind = "choice", and for no other kind'
    if own.kind == "spans" and len(own.texts) != 2:
        yield ("spans are answers in a text; texts must name two columns, the question and the "
               "text that the answer lies in")
    if own.kind == "tags" and len(own.texts) != 1:
        yield "tags are of one text; texts must name the column of its words"
    for name, kind in _KINDS_OF.items():
        if getattr(own, name) not in ("", None, {}) and own.kind != kind:
            yield f'{name} is for kind = "{kind}" only'
    if own.language not in ("", *LANGUAGES):
        yield f"language = {own.language!r}: is none of {', '.join(LANGUAGES)}"
    for name in (*own.texts, *own.choices, own.group):
        if name in _TAKEN:
            yield (f"the column {name!r} cannot be a text or an answer or the group: a row has its "
                   f"{', '.join(_TAKEN)} under these names; rename the column")
    labels = (own.label,) if isinstance(own.label, str) else own.label
    if read := [name for name in labels if name in (*own.texts, *own.choices)]:
        yield f"label = {read[0]!r}: is a text, too, from which the model would read it off"
    taken = (own.name, "train", "val", "test")
    for name, table in own.tests.items():
        if not _is_name(name) or name in taken or not table:
            yield (f"tests: {name} = {table!r}: a test table needs a name of letters, digits, - "
                   f"and _ that is none of {', '.join(taken)}, and a file")
    known = _FORMS[own.kind][2]
    for name in own.metrics:
        if name not in known:
            yield (f"metrics: {name!r} is not of kind = {own.kind!r}, which has "
                   f"{', '.join(known)}{nearest(name, known)}")
    if not isinstance(own.label, str) and (
            own.labels or len(own.label) < 2 or own.kind != "multilabel"):
        yield ('label = [...] names two columns or more, which are the labels, for kind = '
               '"multilabel" only; leave labels out')
    if own.val and own.val_share != 0.1:
        yield "val_share is a share of train, where there is no val; leave one of them out"
    if own.ignore_labels and own.kind in ("tags", "spans") and own.ignore_labels != ("",):
        yield f'ignore_labels of kind = "{own.kind}" can only be [""], rows without a label'
    if len(set(own.labels)) < len(own.labels):
        yield f"labels names a label twice: {', '.join(own.labels)}"


def _is_name(name: str) -> bool:
    return name.replace("-", "").replace("_", "").isalnum()
