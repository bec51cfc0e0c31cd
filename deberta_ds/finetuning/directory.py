"""A fine-tuned model on disk: a Hugging Face directory, and the facts that only this project reads.

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

import xxhash
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json, write_atomic
from deberta_ds.checkpoint.find import local_copy
from deberta_ds.config.options import validate
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.publish import hf
from deberta_ds.release import foreign, model_files
from deberta_ds.release.networks import Network, with_a_row_a_distance
from deberta_ds.release.reader import read_release
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import Task
from deberta_ds.tokenizer import Tokenizer

FACTS, RESULT, MODEL = "finetuned.json", "result.json", "model"
RESUME = "resume"  # checkpoints of a run under way
_FORMAT = 2
BACKBONE, HEAD = "backbone.", "head."  # of a TaskModel's parameter names
_CLASSES = {"classify": "ForSequenceClassification", "multilabel": "ForSequenceClassification",
            "regress": "ForSequenceClassification", "choice": "ForMultipleChoice",
            "tags": "ForTokenClassification", "answer": "ForQuestionAnswering"}
_PROBLEMS = {"classify": "single_label_classification", "regress": "regression",
             "multilabel": "multi_label_classification"}
_QA = "qa_outputs."  # what that class calls the classifier


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


def save_finetuned(
        directory: Path, task: Task, settings: Settings, config: ModelConfig,
        weights: Mapping[str, Tensor], tokenizer: Tokenizer, threshold: float = 0.0) -> None:
    """Write the TaskModel weights of a fine-tuned model; a reader never sees a half-new one."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FACTS).unlink(missing_ok=True)
    network, _ = with_a_row_a_distance(Network(config, _inside(weights, BACKBONE)))
    kind = hf.model_type(network)
    name = class_name(task, kind)
    tensors, aside, _ = hf.split_tensors(network, kind, "ForSequenceClassification")
    if aside:  # rows of the relative table that transformers would read and we do not
        model_files.write_safetensors(directory / hf.SIDE_FILE, aside)
    prefix = HEAD if name is None else ""
    for key, value in _inside(weights, HEAD).items():
        key = key.replace("classifier.", _QA) if task.head == "answer" else key
        tensors[prefix + key] = value
    model_files.write_safetensors(directory / model_files.SAFETENSORS, tensors)
    values = foreign.to_hugging_face(network.config, kind=kind,
                                     rest=_head_values(task, settings, name))
    values |= {"architectures": [name or hf.CLASS_PREFIX[kind] + "Model"], "dtype": "float32",
               "pad_token_id": tokenizer.pad_id}
    write_atomic(directory / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
    if not model_files.find_tokenizer_files(directory):
        model_files.write_tokenizer_files(tokenizer.files, directory, settings.max_length)
    files = {split: Path(name).name if os.path.isabs(name) else name  # the rest is private
             for split, name in task.files.items()}
    facts = {"format": _FORMAT, "task": dataclasses.asdict(dataclasses.replace(task, files=files)),
             "settings": dataclasses.asdict(settings), "threshold": threshold}
    write_atomic(directory / FACTS, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def mark_failed(directory: Path, failure: str) -> None:
    """Record in a fine-tuned directory that its run failed: whoever uses it is told."""
    facts = read_json(directory / FACTS) | {"failure": failure}
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
    release = read_release(path)
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
