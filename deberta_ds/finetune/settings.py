"""How one task is fine-tuned: defaults, preset files and command-line settings, later ones winning.

The defaults are for base and small encoders; sources of every number are in docs/superglue.md.
"""

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from deberta_ds.config import OptimConfig
from deberta_ds.errors import UserError
from deberta_ds.finetune.tasks import MNLI, TASKS, Task
from deberta_ds.validation import nearest, raise_problems


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Settings:
    """One task's recipe. AdamW 0.9/0.999, eps 1e-6, clip 1, linear decay: microsoft/DeBERTa."""

    epochs: int = 10
    batch_rows: int = 16  # examples per update, over all ranks
    micro_batch_rows: int = 0  # examples per forward on one rank; 0: all of the rank's share
    learning_rate: float = 2e-5
    warmup_steps: int = 0  # updates; 0: warmup_share of the run
    warmup_share: float = 0.06
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    head_dropout: float = 0.1
    dropout: float = -1.0  # of the encoder; below 0: as the model was pretrained
    max_length: int = 256  # tokens of one row
    window_overlap: int = 128  # tokens that neighboring MultiRC and ReCoRD windows share
    evals_per_epoch: int = 1
    patience: int = 0  # stop after this many evaluations without a better one; 0: never
    eval_batch_rows: int = 32
    train_rows: int = 0  # use only the first rows of the train split; 0: all
    sift_weight: float = 0.0  # lambda of adversarial training (SiFT); 0: none
    sift_step: float = 1e-4
    sift_noise: float = 1e-2
    sift_loss: Literal["symmetric_kl", "kl", "mse"] = "symmetric_kl"

    def __post_init__(self):
        for name in ("epochs", "batch_rows", "max_length", "evals_per_epoch", "eval_batch_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("micro_batch_rows", "warmup_steps", "window_overlap", "patience",
                     "train_rows", "sift_weight", "weight_decay", "clip_norm"):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not 0 <= self.warmup_share < 1 or not 0 <= self.head_dropout < 1 or self.dropout >= 1:
            raise ValueError("warmup_share, head_dropout and dropout must be below 1")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate = {self.learning_rate} must be above 0")

    def optim(self, total_steps: int) -> OptimConfig:
        """Return the optimizer and schedule of a run of `total_steps` updates."""
        warmup = self.warmup_steps or round(self.warmup_share * total_steps)
        return OptimConfig(
            lr=self.learning_rate,
            betas=(0.9, 0.999),
            eps=1e-6,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            warmup_steps=min(warmup, total_steps),
        )


# Epochs by train size; lengths from the token counts of the official files.
TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "BoolQ": {"epochs": 10, "batch_rows": 32, "max_length": 320},
    "CB": {"epochs": 40, "max_length": 320},
    "COPA": {"epochs": 40, "max_length": 128, "learning_rate": 1e-5},
    "MultiRC": {"epochs": 6, "batch_rows": 32, "max_length": 512},
    "ReCoRD": {"epochs": 3, "batch_rows": 64, "max_length": 512, "window_overlap": 256},
    "RTE": {"epochs": 10, "batch_rows": 32, "max_length": 320},
    "WiC": {"epochs": 12, "batch_rows": 32, "max_length": 128},
    "WSC": {"epochs": 50, "max_length": 256, "learning_rate": 1e-5},
    "MNLI": {"epochs": 3, "batch_rows": 64, "max_length": 256},
}
_TYPES = TypeAdapter(Settings)


def resolve(task: Task, preset: str | Path | None = None, given: tuple[str, ...] = ()) -> Settings:
    """Return the settings of `task`: defaults, then [all] and [TASK] of `preset`, then `given`.

    `given` holds "key=value" and "TASK.key=value". Raises UserError for unknown keys and bad types.
    """
    values = dict(TASK_DEFAULTS.get(task.name, {}))
    place = "settings"
    if preset is not None:
        tables = read_preset(preset)
        values |= tables.get("all", {}) | tables.get(task.name, {})
        place = str(preset)
    for text in given:
        name, key, value = _parse(text)
        if name in (None, task.name):
            values[key] = value
            place = "--set"
    try:
        return _TYPES.validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise_problems(place, [_problem(task, item) for item in error.errors()])


def read_preset(path: str | Path) -> dict[str, dict]:
    """Return {task name or "all": values} of a preset file; its table names are checked."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such preset; see launch/runs/superglue/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    known = ("all", *_task_names())
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise UserError(f"{path}: [{name}] is not a table named all or after a task"
                            f"{nearest(name, known)}")  # fmt: skip
    return tables


def _task_names() -> tuple[str, ...]:
    return tuple(task.name for task in (*TASKS, MNLI))


def _parse(text: str) -> tuple[str | None, str, Any]:
    left, separator, value = text.partition("=")
    name, dot, key = left.rpartition(".")
    if not separator or (dot and name not in _task_names()):
        raise UserError(f"--set {text}: write key=value or TASK.key=value")
    try:
        value = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        pass  # a bare string
    return name or None, key, value


def _problem(task: Task, item: dict) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "values"
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = Settings.__dataclass_fields__
        return f"{task.name}.{key}: unknown setting{nearest(key, known)}"
    if item["type"] == "value_error":
        return f"{task.name}: {item['ctx']['error']}"
    return f"{task.name}.{key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"
