"""The tasks of SuperGLUE, GLUE and SQuAD, one row each; a user's own tasks have the same form.

Label order, JSON values and submission values were checked against two independent releases of
jiant (jiant/evaluate.py SUPERGLUE_NAME_MAP; jiant/scripts/benchmarks/benchmarks.py) and the
official files; the label order of the NLI tasks is the one of microsoft/DeBERTa
(apps/tasks/superglue_tasks.py, glue_tasks.py), so an MNLI head fits CB row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from deberta_ds.base.errors import UserError
from deberta_ds.config.options import STRICT, nearest, option

Layout = Literal["texts", "choices", "tags", "answers", "copa", "multirc", "record", "wic", "wsc"]
HeadKind = Literal["classify", "multilabel", "regress", "choice", "tags", "answer", "words",
                   "spans", "mentions"]


TEST = "test/"  # before the names of an own task's test tables, in `files`


class NoSplitError(UserError):
    """A split of a task is not where its files are looked for."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TableForm:
    """What a task file says of the form of its tables, where it is not found."""

    columns: Mapping[str, int] = field(default_factory=dict)  # of files of 0.2.0; not used
    encoding: str = ""
    delimiter: str = ""
    quoted: bool | None = None
    header: bool = True
    names: tuple[str, ...] = ()


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Task:
    """What is particular to one task; everything else is shared code."""

    name: str
    head: HeadKind  # what sits on the encoder (heads.py)
    layout: Layout = "texts"  # how one line becomes examples (layouts.py)
    labels: tuple[str, ...]  # names by class index; saved with every head
    values: tuple[bool | int | str, ...] = ()  # the labels as the data files write them
    submitted: tuple[int | str, ...] = ()  # the labels as the leaderboard wants them
    # Text fields in model order. The first is the one that may be cut; of answers the second, the
    # one they lie in, is read in windows.
    texts: tuple[str, ...]
    choices: tuple[str, ...] = ()  # fields with an answer each, or one field with a list of them
    no_answer: bool = False  # of answers: some questions have none
    language: str = ""  # of answers: whose rule compares them; empty: by the text (answer_texts.py)
    metrics: tuple[str, ...]  # the task score is their mean
    counts: tuple[tuple[str, int], ...] = ()  # split -> predictions to make, in the official files
    line: str = ""  # one line in the expected format, for error messages
    files: Mapping[str, str] = field(default_factory=dict)  # split -> table under TASK/
    also_at: tuple[str, ...] = ()  # of a task of one table: where else it may lie under the data
    # Field -> the table's column; "group" is the one by whose values scores are parted.
    columns: Mapping[str, str] = field(default_factory=dict)
    headless: tuple[str, ...] = ()  # the columns of labeled tables that have no header line
    may_be_blank: bool = False  # a text may be empty where another one is not
    broken_rows: int = 0  # rows with too few columns that the official tables are known to have
    hub: str = ""  # name of the configuration in the Hub's repository
    hub_repository: str = "aps/super_glue"
    hub_splits: Mapping[str, str] = field(default_factory=dict)  # where they are not the usual
    hub_labels: tuple[str, ...] = ()  # names by the Hub's class numbers, where they differ
    predicted_by: str | None = None  # a diagnostic set: the task whose model predicts it
    val_share: float = 0.0  # of train, to evaluate on where there is no val table
    settings: Mapping[str, Any] = field(default_factory=dict)  # where Settings' defaults do not fit
    # Of a user's own: how its tables are written.
    form: TableForm = field(default_factory=TableForm)
    stamps: Mapping[str, str] = field(default_factory=dict)  # of train, at its labels' reading
    decimal: str = "."  # the mark in the numbers of a regression
    separator: str = ","  # between the names of several labels in a text
    vectors: bool = False  # several labels are written as 0 or 1 for each
    label_columns: tuple[str, ...] = ()  # one column of 0 and 1 for each label
    ignore_labels: tuple[str, ...] = ()  # rows with these are left out
    first_answer: int = 0  # the number of the first answer of a choice
    spaces: bool = True  # of tags: False where the words hold the spaces between them themselves
    # Of tags, what a row has: a list of words, words with spaces between, or a text and entities.
    words: Literal["list", "text", "raw"] = "list"

    @property
    def long_text(self) -> int:
        """Which of the texts may be cut or read in windows: a passage that many examples share."""
        return 1 if self.layout == "answers" else 0

    @property
    def is_cut(self) -> bool:
        """Return whether texts that are too long are cut: not read in windows, nor needed whole."""
        return self.layout in ("texts", "choices", "copa")

    def count(self, split: str) -> int | None:
        """Return how many predictions the official `split` asks for, None if there is none."""
        return dict(self.counts).get(split)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class OwnTask:
    """What the TOML file of a user's own task may say (task_file.py)."""

    name: str = option("name of the task and of its directory under --out")
    kind: Literal["classification", "multilabel", "regression", "choice", "tags", "spans"] = option(
        "what is predicted")
    texts: tuple[str, ...] = option("columns that are read, the first may be cut", min_length=1)
    label: str | tuple[str, ...] = option("column of the label; several labels: also a list of "
                                          "columns with 0 or 1", "label")
    start: str = option("of spans: column of the answer's first character; empty: in the label, or "
                        "where the answer first occurs", "")
    choices: tuple[str, ...] = option("of a choice: the answers' columns, or one with a list", ())
    labels: tuple[str, ...] = option("names of the labels in order; empty: those in train", ())
    ignore_labels: tuple[str, ...] = option('labels whose rows are left out, such as "-" and "-1"; '
                                            '"": rows without a label', ())
    separator: str = option("mark between several labels in a text", "", max_length=1)
    first_answer: Literal[0, 1] | None = option("of a choice: number of the first answer", None)
    decimal: Literal[".", ",", ""] = option("decimal mark of a regression; empty: found in train",
                                            "")
    encoding: str = option("encoding of tables of text; empty: UTF-8, or UTF-16 if found", "")
    delimiter: str = option("mark between the cells of a .csv; empty: found in its header", "",
                            max_length=1)
    quoted: bool | None = option("whether cells may be in quotation marks; unset: those of a .csv, "
                                 "of a .tsv if all its marks are such", None)
    header: bool = option("whether the first line of a .csv or .tsv names its columns; false: they "
                          "are called 1, 2, ..., or what names says", True)
    names: tuple[str, ...] = option("names of the columns of tables without a header", ())
    metrics: tuple[str, ...] = option("the score is their mean; empty: the usual of the kind", ())
    train: str = option("table to train on", min_length=1)
    val: str = option("table to evaluate on; empty: a share of train", "")
    val_share: float = option("share of train to evaluate on, where there is no val", 0.1,
                              gt=0, lt=1)
    test: str = option("table to predict after training, and to score if it has labels; empty: "
                       "none", "")
    tests: Mapping[str, str] = option("more such tables: {NAME = TABLE, ...}", {})
    group: str = option("column by whose values scores are shown, too; empty: none", "")
    language: str = option("of spans: by whose rule answers are compared, such as de or zh (MLQA's "
                           "rules); empty: characters in scripts without spaces, else SQuAD's", "")
    settings: Mapping[str, Any] = field(default_factory=dict)


def _splits(train: int, val: int, test: int) -> tuple[tuple[str, int], ...]:
    return (("train", train), ("val", val), ("test", test))


_BOOL = (False, True)
_NLI = ("contradiction", "neutral", "entailment")
_RTE = ("not_entailment", "entailment")
_TSV = {"train": "train.tsv", "val": "dev.tsv", "test": "test.tsv"}
_SENTENCES = {"premise": "sentence1", "hypothesis": "sentence2"}
_NUMBERS = ("0", "1")
_rte = partial(Task, head="classify", labels=_RTE, values=_RTE, submitted=_RTE,
               hub_labels=_RTE[::-1])  # the Hub counts them the other way around

TASKS: tuple[Task, ...] = (
    Task(name="BoolQ", head="classify",
         labels=("false", "true"), values=_BOOL, submitted=("false", "true"),
         texts=("passage", "question"), metrics=("accuracy",), counts=_splits(9427, 3270, 3245),
         line='{"question": "...", "passage": "...", "idx": 0, "label": true}', hub="boolq",
         settings={"epochs": 10, "global_batch_size": 32, "max_length": 320}),
    Task(name="CB", head="classify", labels=_NLI, values=_NLI, submitted=_NLI,
         texts=("premise", "hypothesis"), metrics=("macro_f1", "accuracy"),
         counts=_splits(250, 56, 250),
         line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0}', hub="cb",
         hub_labels=("entailment", "contradiction", "neutral"),
         settings={"epochs": 40, "max_length": 320}),
    Task(name="COPA", layout="copa", head="choice",
         labels=("choice1", "choice2"), values=(0, 1), submitted=(0, 1),
         texts=("premise", "choice1", "choice2", "question"), metrics=("accuracy",),
         counts=_splits(400, 100, 500),
         line='{"premise": "...", "choice1": "...", "choice2": "...", "question": "cause", '
         '"label": 0, "idx": 0}',
         hub="copa",
         settings={"epochs": 40, "max_length": 128, "learning_rate": 1e-5}),
    Task(name="MultiRC", layout="multirc", head="classify",
         labels=("0", "1"), values=(0, 1), submitted=(0, 1),
         texts=("passage",), metrics=("f1a", "em"), counts=_splits(27243, 4848, 9693),
         line='{"idx": 0, "version": 1.1, "passage": {"text": "...", "questions": [{"question": '
         '"...", "idx": 0, "answers": [{"text": "...", "idx": 0, "label": 1}]}]}}',
         hub="multirc",
         settings={"epochs": 6, "global_batch_size": 32, "max_length": 512}),
    Task(name="ReCoRD", layout="record", head="mentions",
         labels=("mention",), texts=("passage",), metrics=("f1", "em"),
         counts=_splits(100730, 10000, 10000),
         line='{"source": "CNN", "passage": {"text": "...", "entities": [{"start": 0, "end": 4}]}, '
         '"qas": [{"query": "... @placeholder ...", "idx": 0, "answers": [{"start": 0, "end": 4, '
         '"text": "..."}]}], "idx": 0}',
         hub="record",
         settings={"epochs": 3, "global_batch_size": 64, "max_length": 512, "window_overlap": 256}),
    _rte(name="RTE", texts=("premise", "hypothesis"), metrics=("accuracy",),
         counts=_splits(2490, 277, 3000),
         line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0}', hub="rte",
         files=_TSV, columns=_SENTENCES,  # GLUE's RTE is the same task, as tables
         settings={"epochs": 10, "global_batch_size": 32, "max_length": 320}),
    Task(name="WiC", layout="wic", head="words",
         labels=("false", "true"), values=_BOOL, submitted=("false", "true"),
         texts=("word", "sentence1", "sentence2"), metrics=("accuracy",),
         counts=_splits(5428, 638, 1400),
         line='{"word": "...", "sentence1": "...", "sentence2": "...", "idx": 0, "label": false, '
         '"start1": 0, "end1": 5, "start2": 0, "end2": 5, "version": 1.1}',
         hub="wic",
         settings={"epochs": 12, "global_batch_size": 32, "max_length": 128}),
    Task(name="WSC", layout="wsc", head="spans",
         labels=("False", "True"), values=_BOOL, submitted=("False", "True"),
         texts=("text",), metrics=("accuracy",), counts=_splits(554, 104, 146),
         line='{"text": "...", "target": {"span1_index": 0, "span1_text": "Mark", "span2_index": '
         '13, "span2_text": "He"}, "idx": 0, "label": false}',
         hub="wsc",
         settings={"epochs": 50, "max_length": 256, "learning_rate": 1e-5}),
    _rte(name="AX-b", texts=("sentence1", "sentence2"), metrics=("matthews",),
         counts=(("test", 1104),),
         line='{"idx": "0", "label": "entailment", "sentence1": "...", "sentence2": "..."}',
         hub="axb", predicted_by="RTE"),
    _rte(name="AX-g", texts=("premise", "hypothesis"), metrics=("gender_parity", "accuracy"),
         counts=(("test", 356),),
         line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0, '
         '"pair_id": 551646}',
         hub="axg", predicted_by="RTE"),
)

# Table columns: huggingface/datasets datasets/glue/glue.py, which reads the official files; counts:
# the same files (QQP: its train table has rows that are cut off, which that reader drops, too).
# Settings: of base in microsoft/DeBERTa experiments/glue/{cola,sst2,mrpc,stsb,qqp,qnli}.sh.
_OFFICIAL = {"epochs": 6, "global_batch_size": 32, "learning_rate": 2e-5, "warmup_steps": 100,
             "head_dropout": 0.15, "max_length": 128}
_glue = partial(Task, head="classify", files=_TSV, hub_repository="nyu-mll/glue")
_mnli = partial(_glue, labels=_NLI, submitted=_NLI, texts=("premise", "hypothesis"),
                hub_labels=("entailment", "neutral", "contradiction"))
_GLUE_ONLY: tuple[Task, ...] = (
    _glue(name="CoLA", labels=("unacceptable", "acceptable"), values=_NUMBERS, submitted=(0, 1),
          texts=("sentence",), metrics=("matthews",), counts=_splits(8551, 1043, 1063),
          headless=("source", "label", "mark", "sentence"), hub="cola",
          settings=_OFFICIAL | {"max_length": 64}),
    _glue(name="SST-2", labels=("negative", "positive"), values=_NUMBERS, submitted=(0, 1),
          texts=("sentence",), metrics=("accuracy",), counts=_splits(67349, 872, 1821), hub="sst2",
          settings=_OFFICIAL | {"warmup_steps": 500}),
    _glue(name="MRPC", labels=("not_equivalent", "equivalent"), values=_NUMBERS, submitted=(0, 1),
          texts=("sentence1", "sentence2"), metrics=("binary_f1", "accuracy"),
          counts=_splits(3668, 408, 1725),
          columns={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
          hub="mrpc", settings=_OFFICIAL | {"warmup_steps": 50}),
    _glue(name="STS-B", head="regress", labels=("score",), texts=("sentence1", "sentence2"),
          metrics=("pearson", "spearman"), counts=_splits(5749, 1500, 1379),
          columns={"label": "score"}, hub="stsb", settings=_OFFICIAL),
    _glue(name="QQP", labels=("not_duplicate", "duplicate"), values=_NUMBERS, submitted=(0, 1),
          texts=("question1", "question2"), metrics=("binary_f1", "accuracy"),
          counts=_splits(363846, 40430, 390965), columns={"label": "is_duplicate"}, broken_rows=3,
          may_be_blank=True, hub="qqp",
          settings=_OFFICIAL | {"epochs": 8, "global_batch_size": 64, "warmup_steps": 500,
                                "max_length": 320}),
    _mnli(name="MNLI", metrics=("accuracy",), counts=_splits(392702, 9815, 9796),
          line='{"premise": "...", "hypothesis": "...", "label": "entailment", "idx": 0}',
          files={"train": "train.tsv", "val": "dev_matched.tsv", "test": "test_matched.tsv"},
          columns=_SENTENCES | {"label": "gold_label"}, hub="mnli",
          hub_splits={"val": "validation_matched", "test": "test_matched"},
          settings={"epochs": 3, "global_batch_size": 64, "max_length": 256}),
    _glue(name="QNLI", labels=_RTE, submitted=_RTE, texts=("question", "sentence"),
          metrics=("accuracy",), counts=_splits(104743, 5463, 5463), hub="qnli",
          hub_labels=_RTE[::-1],
          settings=_OFFICIAL | {"epochs": 4, "warmup_steps": 500, "max_length": 512,
                                "truncation": "longest_first"}),
    _glue(name="WNLI", labels=_RTE, values=_NUMBERS, submitted=(0, 1),
          texts=("sentence1", "sentence2"), metrics=("accuracy",), counts=_splits(635, 71, 146),
          hub="wnli", settings={"global_batch_size": 32}),
    _mnli(name="MNLI-mm", metrics=("accuracy",), counts=(("val", 9832), ("test", 9847)),
          files={"val": "../MNLI/dev_mismatched.tsv", "test": "../MNLI/test_mismatched.tsv"},
          columns=_SENTENCES | {"label": "gold_label"}, hub="mnli",
          hub_splits={"val": "validation_mismatched", "test": "test_mismatched"},
          predicted_by="MNLI"),
    _mnli(name="AX", metrics=("matthews_multi",), counts=(("test", 1104),),
          files={"test": "AX.tsv"}, also_at=("AX.tsv", "diagnostic/diagnostic.tsv"),
          columns=_SENTENCES, hub="ax", predicted_by="MNLI"),
)

# The official JSON files (rajpurkar.github.io/SQuAD-explorer). microsoft/DeBERTa has no script for
# them; settings: the middle of the DeBERTa paper's grid for base models (table 10).
_SQUAD = Task(
    name="SQuAD-v1.1", head="answer", layout="answers", labels=("start", "end"),
    texts=("question", "context"), metrics=("f1", "em"),
    counts=(("train", 87599), ("val", 10570)), columns={"label": "answers"},
    line='{"id": "...", "question": "...", "context": "...", '
    '"answers": {"text": ["..."], "answer_start": [0]}}',
    files={"train": "train-v1.1.json", "val": "dev-v1.1.json"}, hub="plain_text",
    hub_repository="rajpurkar/squad",
    settings={"epochs": 3, "global_batch_size": 32, "learning_rate": 2e-5, "warmup_steps": 500,
              "max_length": 384, "window_overlap": 128})
SQUAD: tuple[Task, ...] = (_SQUAD, replace(
    _SQUAD, name="SQuAD-v2.0", no_answer=True, metrics=("f1_v2", "em_v2"),
    counts=(("train", 130319), ("val", 11873)), hub="squad_v2",
    files={"train": "train-v2.0.json", "val": "dev-v2.0.json"},
    hub_repository="rajpurkar/squad_v2"))

GLUE = (*_GLUE_ONLY[:-2], next(task for task in TASKS if task.name == "RTE"), *_GLUE_ONLY[-2:])
SUITES = {"SuperGLUE": TASKS, "GLUE": GLUE}
ALL_TASKS = (*TASKS, *_GLUE_ONLY, *SQUAD)
TASK_NAMES = tuple(task.name for task in ALL_TASKS)


def task_named(name: str) -> Task:
    """Return the task called `name`, in any case; raise UserError for an unknown one."""
    for task in ALL_TASKS:
        if task.name.lower() == name.lower():
            return task
    raise UserError(f"unknown task {name!r}{nearest(name, TASK_NAMES)}; "
                    f"the tasks are {', '.join(TASK_NAMES)}")


def suite_of(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return (name, main tasks) of the suite that most of the tasks belong to; none: themselves."""
    mains = {title: tuple(task.name for task in tasks if task.predicted_by is None)
             for title, tasks in SUITES.items()}
    title = max(mains, key=lambda title: len(set(mains[title]) & set(names)))
    if not set(mains[title]) & set(names):
        return "own tasks", tuple(names)
    return title, mains[title]


def diagnostics_of(name: str) -> tuple[Task, ...]:
    """Return the diagnostic sets that the model of task `name` predicts (RTE: AX-b and AX-g)."""
    return tuple(task for task in ALL_TASKS if task.predicted_by == name)


def metrics_on(task: Task, table: str) -> tuple[str, ...]:
    """Return the metrics of a diagnostic set, or of a labeled test table of `task`."""
    return next((other.metrics for other in diagnostics_of(task.name) if other.name == table),
                task.metrics)
