"""How one task is fine-tuned: the task's defaults, a settings file, overrides; later ones win.

A settings file has a table [all] and one for each task that differs; overrides are written as those
of a run file: --all.epochs=3, --RTE.epochs=4. The defaults are for base and small encoders; sources
of every number are in docs/superglue.md.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from deberta_ds.config import OptimConfig, parse_override, read_toml, set_value
from deberta_ds.finetune.tasks import Task
from deberta_ds.validation import ConfigError, nearest, validate

ALL = "all"
_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Settings:
    """One task's recipe. AdamW 0.9/0.999, eps 1e-6, clip 1, linear decay: microsoft/DeBERTa."""

    epochs: _Count = 10
    batch_rows: _Count = 16  # examples per update, over all ranks
    micro_batch_rows: _CountOrNone = 0  # examples per forward on one rank; 0: all of its share
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-5
    warmup_steps: _CountOrNone = 0  # updates; 0: warmup_share of the run
    warmup_share: _Share = 0.06
    weight_decay: _Amount = 0.01
    clip_norm: _Amount = 1.0  # 0: no clipping
    head_dropout: _Share = 0.1
    # Of the encoder; below 0: as the model was pretrained.
    dropout: Annotated[float, Field(ge=-1, lt=1, allow_inf_nan=False)] = -1.0
    max_length: Annotated[int, Field(ge=8, le=65536)] = 256  # tokens of one row
    window_overlap: _CountOrNone = 128  # tokens that neighboring windows of a long text share
    evals_per_epoch: _Count = 1
    patience: _CountOrNone = 0  # stop after this many evaluations without a better one; 0: never
    eval_batch_rows: _Count = 32
    train_rows: _CountOrNone = 0  # use only the first rows of the train split; 0: all
    sift_weight: _Amount = 0.0  # lambda of adversarial training (SiFT); 0: none
    sift_step: _Amount = 1e-4
    sift_noise: _Amount = 1e-2
    sift_loss: Literal["symmetric_kl", "kl", "mse"] = "symmetric_kl"

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


def load(
    path: str | Path | None, overrides: Iterable[str], tasks: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return {"all" or task name: values} of a settings file with overrides put over it.

    `tasks` are the names that tables may have. Raises ConfigError with the problems of a table.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        tables = read_toml(path, "settings file", "launch/runs/superglue/base.toml")
    given = set()
    for override in overrides:
        key, value = parse_override(override)
        table, dot, _ = key.partition(".")
        if not dot:
            whole = f"--{ALL}.{key if key in Settings.__dataclass_fields__ else 'KEY'}=..."
            raise ConfigError(
                f"{override}: unknown option; a setting is written {whole}, or --TASK.KEY=... for "
                "one task"
            )
        given.add(table)
        set_value(tables, key, value)
    known = (ALL, *tasks)
    for name, table in tables.items():
        place = "the command line" if path is None else str(path)
        place += " and the command line" if path is not None and name in given else ""
        if name not in known or not isinstance(table, dict):
            raise ConfigError(
                f"{place}: [{name}] is not a table named {ALL} or after a task"
                f"{nearest(name, known)}"
            )
        validate(Settings, table, f"{place}, settings of {name}")
    return tables


def resolve(task: Task, tables: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return the settings of `task`: its own defaults, then [all], then [TASK] of `tables`."""
    values = dict(task.settings) | dict(tables.get(ALL, {})) | dict(tables.get(task.name, {}))
    return validate(Settings, values, f"settings of {task.name}")


def underscored(text: str) -> str:
    """Return an option with underscores in its name; tasks' names (--AX-b.epochs) stay."""
    name, separator, value = text.partition("=")
    if not name.startswith("--") or "." in name:
        return text
    return "--" + name[2:].replace("-", "_") + separator + value
