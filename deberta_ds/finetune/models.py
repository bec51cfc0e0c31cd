"""Where a task model's weights come from, and how a fine-tuned one is kept.

A start is a checkpoint of ours, a Hugging Face directory, a fine-tuned directory of another task
(`init_from`), or random values ("random:PRESET", "random:DIRECTORY": the same shape without the
pretraining, which is the baseline of every result). A head is kept row by row where label names
match, and what was kept and what is fresh is said.
"""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from deberta_ds.config import ModelConfig
from deberta_ds.errors import UserError
from deberta_ds.files import atomic_path, write_atomic
from deberta_ds.finetune.heads import TaskModel
from deberta_ds.finetune.settings import Settings
from deberta_ds.finetune.sift import Sift
from deberta_ds.finetune.tasks import Task, task_named
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.init import init_parameters
from deberta_ds.presets import MODELS
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.validation import nearest

RANDOM = "random:"
_WEIGHTS, _FACTS, _TOKENIZER = "model.safetensors", "finetuned.json", "spm.model"


@dataclass(frozen=True)
class Start:
    """What every run of a sweep starts from."""

    name: str  # as the user wrote it
    config: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor] | None  # of the backbone; None: random


def open_start(name: str, tokenizer: str | Path | None = None) -> Start:
    """Return the start called `name`: a directory, or "random:" and a preset or directory.

    `tokenizer` is a SentencePiece file; needed for a preset only.
    """
    if not name.startswith(RANDOM):
        return _open_directory(name, name)
    shape = name.removeprefix(RANDOM)
    if shape not in MODELS and not Path(shape).exists():
        raise UserError(f"{name}: no such preset or directory{nearest(shape, MODELS)}")
    if shape not in MODELS:
        return dataclasses.replace(_open_directory(name, shape), weights=None)
    if tokenizer is None:
        raise UserError(f"{name}: a preset has no tokenizer; pass --tokenizer spm.model")
    pieces = Tokenizer(tokenizer)
    # A fresh table for this tokenizer; a multiple of 64 keeps matrix products aligned.
    config = ModelConfig(**MODELS[shape] | {"vocab_size": -(-pieces.size // 64) * 64})
    return Start(name, config, pieces, None)


def _open_directory(name: str, path: str) -> Start:
    from deberta_ds.formats.load import load_backbone

    if (Path(path) / _FACTS).is_file():
        saved = load_finetuned(path)
        prefix = "backbone."
        weights = {
            key.removeprefix(prefix): value
            for key, value in saved.weights.items()
            if key.startswith(prefix)
        }
        return Start(name, saved.config, Tokenizer(Path(path) / _TOKENIZER), weights)
    loaded = load_backbone(path)
    if loaded.tokenizer is None:
        raise UserError(f"{path}: no spm.model beside the weights, and fine-tuning reads text with "
                        "SentencePiece only (DeBERTa v1 has a BPE tokenizer)")  # fmt: skip
    return Start(name, loaded.model_config, loaded.tokenizer, loaded.backbone.state_dict())


def build_model(task: Task, start: Start, settings: Settings, seed: int) -> TaskModel:
    """Return the task model of `start` with a fresh head; random values come from `seed`."""
    config = start.config
    if settings.dropout >= 0:
        config = dataclasses.replace(
            config, hidden_dropout=settings.dropout, attention_dropout=settings.dropout
        )
    sift = None
    if settings.sift_weight > 0:
        sift = Sift(settings.sift_weight, settings.sift_step, settings.sift_noise,
                    settings.sift_loss)  # fmt: skip
    model = TaskModel(task, Backbone(config), settings.head_dropout, sift)
    if start.weights is None:
        init_parameters(model.backbone, config.init_std, seed)
    else:
        model.backbone.load_state_dict(start.weights)
    init_parameters(model.head, config.init_std, seed)
    return model


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned directory: which task and labels it was trained on, and all its weights."""

    task: Task
    labels: tuple[str, ...]
    config: ModelConfig
    weights: dict[str, Tensor]


def save_finetuned(
    directory: Path, task: Task, config: ModelConfig, weights: dict[str, Tensor],
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """Write a fine-tuned model; the facts file, written last, marks it as whole."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _FACTS).unlink(missing_ok=True)
    with atomic_path(directory / _WEIGHTS) as temporary:
        save_file({name: value.contiguous() for name, value in weights.items()}, temporary)
    with atomic_path(directory / _TOKENIZER) as temporary:
        shutil.copyfile(tokenizer.path, temporary)
    facts = {"task": task.name, "labels": task.labels, "model": dataclasses.asdict(config)}
    write_atomic(directory / _FACTS, json.dumps(facts, indent=2) + "\n")


def load_finetuned(path: str | Path) -> Finetuned:
    """Return what `save_finetuned` wrote at `path`; UserError if it is not one or is damaged."""
    path = Path(path)
    if not (path / _FACTS).is_file():
        raise UserError(f"{path}: no {_FACTS} there; name the model/ directory of a fine-tuned run")
    try:
        facts = json.loads((path / _FACTS).read_text("utf-8"))
        facts["model"]["position_terms"] = tuple(facts["model"]["position_terms"])
        config = ModelConfig(**facts["model"])
        weights = load_file(path / _WEIGHTS)
        return Finetuned(task_named(facts["task"]), tuple(facts["labels"]), config, weights)
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: damaged or not ours ({error}); fine-tune it again") from error


def find_finetuned(path: str | Path) -> Path:
    """Return the model directory at `path`: itself, or the model/ inside a run's directory."""
    path = Path(path)
    return path if (path / _FACTS).is_file() else path / "model"


def start_from(start: Start, saved: Finetuned, place: str) -> Start:
    """Return `start` with the encoder weights of `saved`, which must have the same shape."""
    shape = dataclasses.replace(
        saved.config, hidden_dropout=start.config.hidden_dropout,
        attention_dropout=start.config.attention_dropout, attention=start.config.attention,
    )  # fmt: skip
    if shape != start.config:
        raise UserError(f"{place}: it was fine-tuned from a model of another shape than "
                        f"{start.name}; pass --model {place} to start from it")  # fmt: skip
    prefix = "backbone."
    weights = {
        key.removeprefix(prefix): value
        for key, value in saved.weights.items()
        if key.startswith(prefix)
    }
    return dataclasses.replace(start, weights=weights)


def keep_head(model: TaskModel, task: Task, saved: Finetuned) -> str:
    """Copy what fits of `saved`'s head into `model` and return a line that says what was kept.

    The layers before the classifier are kept where both heads have them in the same shape; of the
    classifier, the rows whose label names match.
    """
    head = {
        key.removeprefix("head."): value
        for key, value in saved.weights.items()
        if key.startswith("head.")
    }
    own = model.head.state_dict()
    if set(own) != set(head):
        return f"the head of {saved.task.name} is of another kind: all of the head is fresh"
    layers = [key for key in own if not key.startswith("classifier.")]
    kept = [key for key in layers if own[key].shape == head[key].shape]
    for key in kept:
        own[key].copy_(head[key])
    shared = [label for label in task.labels if label in saved.labels]
    if task.head != saved.task.head or own["classifier.weight"].size(0) != len(task.labels):
        shared = []
    for label in shared:
        for key in ("classifier.weight", "classifier.bias"):
            own[key][task.labels.index(label)] = head[key][saved.labels.index(label)]
    fresh = [label for label in task.labels if label not in shared]
    return (f"head of {saved.task.name}: kept {', '.join(kept) or 'no layer'}; labels kept: "
            f"{', '.join(shared) or 'none'}; fresh: {', '.join(fresh) or 'none'}")  # fmt: skip
