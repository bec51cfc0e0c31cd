"""Models of fine-tuning: where their weights come from, and how one is kept on disk.

A start is a checkpoint of ours, a Hugging Face directory, a fine-tuned directory of another task
(`init_from`), or random values ("random:PRESET", "random:DIRECTORY": the same shape without the
pretraining, which is the baseline of every result). A head is kept row by row where label names
match, and what was kept and what is fresh is said.

What is kept is a Hugging Face directory, and the facts that only this project reads:

    DIR/config.json, model.safetensors   the tensors of the transformers class named below
    DIR/tokenizer.json, spm.model ...    tokenizer
    DIR/finetuned.json                   the task and its settings; written last, so it marks the
                                         directory as whole

    head        transformers class (v2, v3; Deberta... for v1)    tensors next to the encoder's
    classify, multilabel, regress
                DebertaV2ForSequenceClassification                 pooler.dense.*, classifier.*
    tags        DebertaV2ForTokenClassification (a word's label    classifier.*
                is that of its first token)
    answer      DebertaV2ForQuestionAnswering                      qa_outputs.*
    choice      DebertaV2ForMultipleChoice; v1 has none: one label pooler.dense.*, classifier.*
                of DebertaForSequenceClassification
    words       none (AutoModel loads the encoder):                head.attention.*,
    spans       deberta_ds.finetuning.heads.SpanPairHead               head.classifier.*
    mentions    none: deberta_ds.finetuning.heads.MentionHead        head.dense.*, head.classifier.*
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import xxhash
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json, write_atomic
from deberta_ds.checkpoint.find import local_copy
from deberta_ds.config.model import FREE, MODELS, RANDOM, padded_rows, without_unused
from deberta_ds.config.options import nearest, validate
from deberta_ds.config.run_config import ModelConfig, to_dict
from deberta_ds.finetuning.heads import TaskModel
from deberta_ds.model.backbone import Backbone, init_parameters
from deberta_ds.model.precision import DTYPES
from deberta_ds.publish import hf
from deberta_ds.release import foreign, model_files
from deberta_ds.release.networks import Network, a_row_a_distance, with_a_row_a_distance
from deberta_ds.release.reader import check_same, read_foreign, read_release
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import Task
from deberta_ds.tokenizer import Tokenizer

FACTS, RESULT, RESULTS_FILE = "finetuned.json", "result.json", "results.json"
MODEL, RESUME = "model", "resume"  # the latter: checkpoints of a run under way
_FORMAT = 2
BACKBONE, HEAD = "backbone.", "head."  # of a TaskModel's parameter names
_CLASSES = {"classify": "ForSequenceClassification", "multilabel": "ForSequenceClassification",
            "regress": "ForSequenceClassification", "choice": "ForMultipleChoice",
            "tags": "ForTokenClassification", "answer": "ForQuestionAnswering"}
_PROBLEMS = {"classify": "single_label_classification", "regress": "regression",
             "multilabel": "multi_label_classification"}
_QA = "qa_outputs."  # what that class calls the classifier


# Strict about types; keys that nobody computes with may be there.
READ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Score = Annotated[float, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Text = Annotated[str, Field(max_length=2000)]


@checked(config=READ, frozen=True)
class Scored:
    """The scores of a labeled table."""

    examples: Count
    metrics: dict[Text, dict[Text, Score]]  # {name: {"value", "low", "high"}}
    majority: dict[Text, Score]


@checked(config=READ, frozen=True)
class Result:
    """result.json of a (task, seed), as far as it is read. One that diverged has no `scores`."""

    task: Text
    seed: Count
    settings: dict[Text, Any]
    start: str
    init_from: str
    train: tuple[str, Count]  # source, examples
    val: tuple[str, Count]
    metrics: dict[Text, Score]
    score: Score
    baseline: Score | None
    failed: bool
    failure: str
    diagnostics: dict[Text, dict[Text, Score]]
    history: list[dict[Text, Annotated[float, Field(ge=-1e300, le=1e300)]]]  # epoch, loss, metrics
    tests: dict[str, str] = Field(default_factory=dict)  # digests
    scores: dict[Text, Scored] = Field(default_factory=dict)
    confusion: list[list[Count]] = Field(default_factory=list)


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned directory: its task, its settings, and all its weights under our names."""

    task: Task
    settings: Settings
    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    threshold: float = 0.0  # of answers: by how much no answer must score more to be said
    failure: str = ""  # why its run failed, if it did
    identity: dict[str, str] = field(default_factory=dict)  # digests of what was read

    def backbone(self) -> dict[str, Tensor]:
        """Return the encoder's weights."""
        return _inside(self.weights, BACKBONE)

    def head(self) -> dict[str, Tensor]:
        """Return the head's weights."""
        return _inside(self.weights, HEAD)


def _inside(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Start:
    """What every run of a sweep starts from."""

    name: str  # as the user wrote it
    config: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor] | None  # of the backbone; None: random

    def identity(self) -> dict[str, Any]:
        """Return what was read: a run's newest checkpoint is another one tomorrow."""
        return {"start_weights": model_files.tensors_digest(self.weights or {}),
                "shape": to_dict(self.config), "tokenizer": self.tokenizer.sha256}


def open_start(name: str, tokenizer: str | Path | None = None) -> Start:
    """Return the start called `name`: a directory, or "random:" and a preset or directory.

    `tokenizer` is the path of a tokenizer: for a preset, or a directory without one.
    """
    if not name.startswith(RANDOM):
        return _open_directory(name, name, tokenizer)
    shape = name.removeprefix(RANDOM)
    if shape not in MODELS and not Path(shape).exists():
        raise UserError(f"{name}: no such preset or directory{nearest(shape, MODELS)}")
    if shape not in MODELS:
        return dataclasses.replace(_open_directory(name, shape, tokenizer), weights=None)
    if tokenizer is None:
        raise UserError(f"{name}: a preset has no tokenizer; pass --tokenizer PATH")
    opened = Tokenizer(tokenizer)
    # A fresh table for this tokenizer.
    config = ModelConfig(**MODELS[shape] | {"vocab_size": padded_rows(opened.size)})
    return Start(name, config, opened, None)


def _open_directory(name: str, path: str, tokenizer: str | Path | None) -> Start:
    if is_finetuned(path):
        saved = load_finetuned(path)
        if tokenizer is not None:
            check_same(Tokenizer(tokenizer), saved.tokenizer, path)
        return Start(name, saved.config, saved.tokenizer, saved.backbone())
    release = read_release(path, tokenizer)
    weights = {key: value.float() for key, value in release.main.tensors.items()
               if key.startswith(("words.weight", "trunk."))}
    opened = release.tokenizer or Tokenizer(path, release.tokenizer_files)
    return Start(name, release.main.config, opened, weights)


def build_model(task: Task, start: Start, settings: Settings, seed: int) -> TaskModel:
    """Return the task model of `start` with a fresh head; random values come from `seed`."""
    config = start.config
    if settings.dropout >= 0:
        config = dataclasses.replace(
            config, hidden_dropout=settings.dropout, attention_dropout=settings.dropout)
    model = TaskModel(task, Backbone(config), settings)
    if start.weights is None:
        init_parameters(model.backbone, config.init_std, seed)
    else:
        model.backbone.load_state_dict(start.weights)
    init_parameters(model.head, config.init_std, seed)
    return model


def start_from(start: Start, saved: Finetuned, place: str) -> Start:
    """Return `start` with the encoder weights of `saved`, which must have the same shape."""
    mine = {name: getattr(start.config, name) for name in FREE}
    config = dataclasses.replace(saved.config, **mine)
    one, other = (without_unused(a_row_a_distance(each)) for each in (config, start.config))
    if one != other:
        raise UserError(f"{place}: it was fine-tuned from a model of another shape than "
                        f"{start.name}; pass --model {place} to start from it")
    if start.tokenizer.sha256 != saved.tokenizer.sha256:
        raise UserError(f"{place}: it was fine-tuned with another tokenizer than that of "
                        f"{start.name}; pass --model {place} to start from it")
    return dataclasses.replace(start, config=config, weights=saved.backbone())


def keep_head(model: TaskModel, task: Task, saved: Finetuned) -> str:
    """Copy what fits of `saved`'s head into `model` and return a line that says what was kept.

    The layers before the classifier are kept where both heads have them in the same shape; of the
    classifier, the rows whose label names match.
    """
    head = saved.head()
    own = model.head.state_dict()
    if set(own) != set(head):
        return f"the head of {saved.task.name} is of another kind: all of the head is fresh"
    layers = [key for key in own if not key.startswith("classifier.")]
    kept = [key for key in layers if own[key].shape == head[key].shape]
    for key in kept:
        own[key].copy_(head[key])
    if task.head == saved.task.head == "choice":  # one score, whatever the answers are called
        for key in ("classifier.weight", "classifier.bias"):
            own[key].copy_(head[key])
        return f"head of {saved.task.name}: kept {', '.join(kept) or 'no layer'} and the scorer"
    fits = task.head == saved.task.head and own["classifier.weight"].size(0) == len(task.labels)
    shared = [label for label in task.labels if fits and label in saved.task.labels]
    for label in shared:
        for key in ("classifier.weight", "classifier.bias"):
            own[key][task.labels.index(label)] = head[key][saved.task.labels.index(label)]
    fresh = [label for label in task.labels if label not in shared]
    return (f"head of {saved.task.name}: kept {', '.join(kept) or 'no layer'}; labels kept: "
            f"{', '.join(shared) or 'none'}; fresh: {', '.join(fresh) or 'none'}")


def finetuned_model(saved: Finetuned, device: torch.device, precision: str = "fp32") -> TaskModel:
    """Return the plain model of a fine-tuned directory in evaluation mode."""
    start = Start("", saved.config, saved.tokenizer, saved.backbone())
    model = build_model(saved.task, start, dataclasses.replace(saved.settings, dropout=-1.0), 0)
    model.head.load_state_dict(saved.head())
    return model.to(device, DTYPES[precision]).eval()


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Return {name: bytes} of what a fine-tuned model has of its tokenizer."""
    with TemporaryDirectory() as out:
        model_files.write_tokenizer_files(tokenizer.files, Path(out), max_length)
        return {file.name: file.read_bytes() for file in Path(out).iterdir()}


def save_finetuned(directory: Path, task: Task, settings: Settings, start: Start,
                   weights: Mapping[str, Tensor], files: Mapping[str, bytes],
                   threshold: float = 0.0) -> None:
    """Write the TaskModel weights of a model that began as `start`, with its `tokenizer_files`; a
    reader never sees a half-new one.
    """
    network, _ = with_a_row_a_distance(Network(start.config, _inside(weights, BACKBONE)))
    kind = hf.model_type(network)
    name = class_name(task, kind)
    values = foreign.to_hugging_face(network.config, kind=kind,
                                     rest=_head_values(task, settings, name))
    values |= {"architectures": [name or hf.CLASS_PREFIX[kind] + "Model"], "dtype": "float32",
               "pad_token_id": start.tokenizer.pad_id}
    # aside: rows of the relative table that transformers would read and we do not.
    tensors, aside, _ = hf.split_tensors(network, kind, "ForSequenceClassification")
    prefix = HEAD if name is None else ""
    for key, value in _inside(weights, HEAD).items():
        key = key.replace("classifier.", _QA) if task.head == "answer" else key
        tensors[prefix + key] = value
    tables = {split: Path(name).name if os.path.isabs(name) else name  # the rest is private
              for split, name in task.files.items()}
    facts = {"format": _FORMAT,
             "task": dataclasses.asdict(dataclasses.replace(task, files=tables, stamps={})),
             "settings": dataclasses.asdict(settings), "threshold": threshold}

    directory.mkdir(parents=True, exist_ok=True)
    (directory / FACTS).unlink(missing_ok=True)
    for file, part in ((hf.SIDE_FILE, aside), (model_files.SAFETENSORS, tensors)):
        if part:
            model_files.write_safetensors(directory / file, part)
    write_atomic(directory / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
    for file, data in files.items():
        write_atomic(directory / file, data)
    write_atomic(directory / FACTS, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def class_name(task: Task, kind: str) -> str | None:
    """Return the transformers class that computes the task's scores, None if there is none."""
    if task.head == "choice" and kind == foreign.V1:
        return "DebertaForSequenceClassification"
    end = _CLASSES.get(task.head)
    return hf.CLASS_PREFIX[kind] + end if end else None


def _head_values(task: Task, settings: Settings, name: str | None) -> dict:
    """Return what config.json says of the head."""
    labels = task.labels
    if task.head == "choice" and not str(name).endswith("ForMultipleChoice"):
        labels = ("score",)  # one number for each choice; the larger one wins
    values = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "pooler_dropout": 0.0,
        "cls_dropout": settings.head_dropout}
    if task.head in _PROBLEMS:
        values["problem_type"] = _PROBLEMS[task.head]
    return values


def load_finetuned(path: str | Path) -> Finetuned:
    """Return what `save_finetuned` wrote at `path`; UserError if it is not one or is damaged."""
    path = Path(path)
    if not (path / FACTS).is_file():
        raise UserError(f"{path}: no {FACTS} there; name a fine-tuned run, OUT/TASK/seed-N, or "
                        "its model/")
    facts = read_json(path / FACTS)
    if facts.get("format") != _FORMAT or not {"task", "settings", "threshold"} <= facts.keys():
        raise UserError(f"{path / FACTS}: format {facts.get('format')!r} without task, settings or "
                        f"threshold, or of another version; this version reads {_FORMAT}")
    task = validate(Task, facts["task"], f"{path / FACTS}, task")
    settings = validate(Settings, facts["settings"], f"{path / FACTS}, settings")
    release = read_foreign(path)
    network = release.main
    weights = {}
    for key, value in network.tensors.items():
        own = key.startswith(("words.", "trunk."))
        key = key.removeprefix(HEAD).replace(_QA, "classifier.")
        weights[(BACKBONE if own else HEAD) + key] = value
    if release.tokenizer is None:
        raise UserError(f"{path}: no tokenizer next to the weights; fine-tune it again")
    threshold = facts["threshold"]
    if type(threshold) is not float or not math.isfinite(threshold):
        raise UserError(f"{path / FACTS}: threshold {threshold!r} is no finite number")
    return Finetuned(task, settings, network.config, weights, release.tokenizer, threshold,
                     str(facts.get("failure", "")), release.identity | {
                         "task and settings": xxhash.xxh3_128_hexdigest(repr(facts).encode())})


def find_finetuned(path: str | Path) -> Path:
    """Return the model directory at `path`: itself, or the model/ inside a run's directory.

    Of a URL or a model of the Hub it is a copy in the cache. UserError for a run that has not
    ended.
    """
    path = local_copy(path)
    if (path / FACTS).is_file():
        return path
    if not (path / RESULT).is_file() and ((path / MODEL).is_dir() or (path / RESUME).is_dir()):
        raise UserError(f"{path}: this fine-tuning has not ended (no {RESULT}); run its command to "
                        "the end")
    return path / MODEL


def is_finetuned(path: str | Path) -> bool:
    """Return whether there is a fine-tuned model at `path` itself."""
    return (Path(path) / FACTS).is_file()
