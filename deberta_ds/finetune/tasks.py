"""The ten SuperGLUE tasks (and MNLI, to start NLI tasks from), one row of data each.

Label order, JSON values and submission values were checked against two independent releases of
jiant (jiant/evaluate.py SUPERGLUE_NAME_MAP; jiant/scripts/benchmarks/benchmarks.py) and the
official files; the label order of the NLI tasks is the one of microsoft/DeBERTa
(apps/tasks/superglue_tasks.py, glue_tasks.py), so an MNLI head fits CB row by row.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from deberta_ds.errors import UserError
from deberta_ds.validation import nearest

Layout = Literal["pair", "copa", "multirc", "record", "wic", "wsc"]
HeadKind = Literal["classify", "choice", "words", "spans", "mentions"]


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Task:
    """What is particular to one task; everything else is shared code."""

    name: str
    layout: Layout  # how one JSON line becomes examples (layouts.py)
    head: HeadKind  # what sits on the encoder (heads.py)
    labels: tuple[str, ...]  # names by class index; saved with every head
    values: tuple[bool | int | str, ...]  # the same labels as the data files write them
    submitted: tuple[int | str, ...]  # the same labels as the leaderboard wants them
    texts: tuple[str, ...]  # text fields in model order; the first is the one that may be cut
    metrics: tuple[str, ...]  # the task score is their mean
    counts: tuple[tuple[str, int], ...]  # split -> predictions to make, in the official files
    line: str  # one line in the expected format, for error messages
    hub: str  # name of the configuration in the Hub's repository
    hub_repository: str = "aps/super_glue"
    hub_labels: tuple[str, ...] = ()  # names by the Hub's class numbers, where they differ
    predicted_by: str | None = None  # a diagnostic set: the task whose model predicts it
    settings: Mapping[str, Any] = field(default_factory=dict)  # where Settings' defaults do not fit

    def count(self, split: str) -> int | None:
        """Return how many predictions the official `split` asks for, None if there is none."""
        return dict(self.counts).get(split)


def _splits(train: int, val: int, test: int) -> tuple[tuple[str, int], ...]:
    return (("train", train), ("val", val), ("test", test))


_BOOL = (False, True)
_NLI = ("contradiction", "neutral", "entailment")
_RTE = ("not_entailment", "entailment")

TASKS: tuple[Task, ...] = (
    Task(
        name="BoolQ", layout="pair", head="classify",
        labels=("false", "true"), values=_BOOL, submitted=("false", "true"),
        texts=("passage", "question"), metrics=("accuracy",), counts=_splits(9427, 3270, 3245),
        line='{"question": "...", "passage": "...", "idx": 0, "label": true}', hub="boolq",
        settings={"epochs": 10, "batch_rows": 32, "max_length": 320},
    ),
    Task(
        name="CB", layout="pair", head="classify",
        labels=_NLI, values=_NLI, submitted=_NLI,
        texts=("premise", "hypothesis"), metrics=("macro_f1", "accuracy"),
        counts=_splits(250, 56, 250),
        line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0}', hub="cb",
        hub_labels=("entailment", "contradiction", "neutral"),
        settings={"epochs": 40, "max_length": 320},
    ),
    Task(
        name="COPA", layout="copa", head="choice",
        labels=("choice1", "choice2"), values=(0, 1), submitted=(0, 1),
        texts=("premise", "choice1", "choice2", "question"), metrics=("accuracy",),
        counts=_splits(400, 100, 500),
        line='{"premise": "...", "choice1": "...", "choice2": "...", "question": "cause", '
        '"label": 0, "idx": 0}',
        hub="copa",
        settings={"epochs": 40, "max_length": 128, "learning_rate": 1e-5},
    ),
    Task(
        name="MultiRC", layout="multirc", head="classify",
        labels=("0", "1"), values=(0, 1), submitted=(0, 1),
        texts=("passage",), metrics=("f1a", "em"), counts=_splits(27243, 4848, 9693),
        line='{"idx": 0, "version": 1.1, "passage": {"text": "...", "questions": [{"question": '
        '"...", "idx": 0, "answers": [{"text": "...", "idx": 0, "label": 1}]}]}}',
        hub="multirc",
        settings={"epochs": 6, "batch_rows": 32, "max_length": 512},
    ),
    Task(
        name="ReCoRD", layout="record", head="mentions",
        labels=("mention",), values=(), submitted=(),
        texts=("passage",), metrics=("f1", "em"), counts=_splits(100730, 10000, 10000),
        line='{"source": "CNN", "passage": {"text": "...", "entities": [{"start": 0, "end": 4}]}, '
        '"qas": [{"query": "... @placeholder ...", "idx": 0, "answers": [{"start": 0, "end": 4, '
        '"text": "..."}]}], "idx": 0}',
        hub="record",
        settings={"epochs": 3, "batch_rows": 64, "max_length": 512, "window_overlap": 256},
    ),
    Task(
        name="RTE", layout="pair", head="classify",
        labels=_RTE, values=_RTE, submitted=_RTE,
        texts=("premise", "hypothesis"), metrics=("accuracy",), counts=_splits(2490, 277, 3000),
        line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0}', hub="rte",
        hub_labels=("entailment", "not_entailment"),
        settings={"epochs": 10, "batch_rows": 32, "max_length": 320},
    ),
    Task(
        name="WiC", layout="wic", head="words",
        labels=("false", "true"), values=_BOOL, submitted=("false", "true"),
        texts=("word", "sentence1", "sentence2"), metrics=("accuracy",),
        counts=_splits(5428, 638, 1400),
        line='{"word": "...", "sentence1": "...", "sentence2": "...", "idx": 0, "label": false, '
        '"start1": 0, "end1": 5, "start2": 0, "end2": 5, "version": 1.1}',
        hub="wic",
        settings={"epochs": 12, "batch_rows": 32, "max_length": 128},
    ),
    Task(
        name="WSC", layout="wsc", head="spans",
        labels=("False", "True"), values=_BOOL, submitted=("False", "True"),
        texts=("text",), metrics=("accuracy",), counts=_splits(554, 104, 146),
        line='{"text": "...", "target": {"span1_index": 0, "span1_text": "Mark", "span2_index": 13,'
        ' "span2_text": "He"}, "idx": 0, "label": false}',
        hub="wsc",
        settings={"epochs": 50, "max_length": 256, "learning_rate": 1e-5},
    ),
    Task(
        name="AX-b", layout="pair", head="classify",
        labels=_RTE, values=_RTE, submitted=_RTE,
        texts=("sentence1", "sentence2"), metrics=("matthews",), counts=(("test", 1104),),
        line='{"idx": "0", "label": "entailment", "sentence1": "...", "sentence2": "..."}',
        hub="axb",
        hub_labels=("entailment", "not_entailment"), predicted_by="RTE",
    ),
    Task(
        name="AX-g", layout="pair", head="classify",
        labels=_RTE, values=_RTE, submitted=_RTE,
        texts=("premise", "hypothesis"), metrics=("gender_parity", "accuracy"),
        counts=(("test", 356),),
        line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0, '
        '"pair_id": 551646}',
        hub="axg",
        hub_labels=("entailment", "not_entailment"), predicted_by="RTE",
    ),
)  # fmt: skip

# Not a SuperGLUE task: its output is what `--init_from` of CB, RTE and COPA usually starts from.
MNLI = Task(
    name="MNLI", layout="pair", head="classify",
    labels=_NLI, values=_NLI, submitted=_NLI,
    texts=("premise", "hypothesis"), metrics=("accuracy",), counts=(("train", 392702),),
    line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0}', hub="mnli",
    hub_repository="nyu-mll/glue", hub_labels=("entailment", "neutral", "contradiction"),
    settings={"epochs": 3, "batch_rows": 64, "max_length": 256},
)  # fmt: skip

TASK_NAMES = tuple(task.name for task in (*TASKS, MNLI))
MAIN_TASKS = tuple(task.name for task in TASKS if task.predicted_by is None)
SUBMITTED_FILES = tuple(f"{task.name}.jsonl" for task in TASKS)


def task_named(name: str) -> Task:
    """Return the task called `name`, in any case; raise UserError for an unknown one."""
    for task in (*TASKS, MNLI):
        if task.name.lower() == name.lower():
            return task
    raise UserError(f"unknown task {name!r}{nearest(name, TASK_NAMES)}; "
                    f"the tasks are {', '.join(TASK_NAMES)}")  # fmt: skip


def diagnostics_of(name: str) -> tuple[Task, ...]:
    """Return the diagnostic sets that the model of task `name` predicts (AX-b and AX-g for RTE)."""
    return tuple(task for task in TASKS if task.predicted_by == name)
