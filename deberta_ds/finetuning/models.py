"""Where a task model's weights come from, and how a fine-tuned one is kept.

A start is a checkpoint of ours, a Hugging Face directory, a fine-tuned directory of another task
(`init_from`), or random values ("random:PRESET", "random:DIRECTORY": the same shape without the
pretraining, which is the baseline of every result). A head is kept row by row where label names
match, and what was kept and what is fresh is said.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import FREE, MODELS, RANDOM, padded_rows, without_unused
from deberta_ds.config.options import nearest
from deberta_ds.config.run_config import ModelConfig, to_dict
from deberta_ds.finetuning.directory import Finetuned, is_finetuned, load_finetuned
from deberta_ds.finetuning.heads import TaskModel
from deberta_ds.model.backbone import Backbone, init_parameters
from deberta_ds.release.model_files import tensors_digest
from deberta_ds.release.networks import a_row_a_distance
from deberta_ds.release.reader import check_same, read_release
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import Task
from deberta_ds.tokenizer import Tokenizer


@dataclass(frozen=True)
class Start:
    """What every run of a sweep starts from."""

    name: str  # as the user wrote it
    config: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor] | None  # of the backbone; None: random

    def identity(self) -> dict[str, Any]:
        """Return what was read: a run's newest checkpoint is another one tomorrow."""
        return {"start_weights": tensors_digest(self.weights or {}),
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
