"""How one task is fine-tuned: the task's defaults, a settings file, overrides; later ones win.

A settings file has a table [all] and one for each task that differs; overrides are written as those
of a run file: --all.epochs=3, --RTE.epochs=4. The defaults are for base and small encoders; the
learning rate follows their size. Sources of every number are in docs/how-to/benchmarks.md.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from deberta_ds.base.errors import ConfigError
from deberta_ds.config.options import STRICT, nearest, option, validate
from deberta_ds.config.run_config import ModelConfig, OptimConfig
from deberta_ds.config.toml_files import parse_override, read_toml, set_value
from deberta_ds.tasks.task import Task

ALL = "all"


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Settings:
    """One task's recipe. AdamW 0.9/0.999, eps 1e-6, clip 1, linear decay: microsoft/DeBERTa."""

    epochs: int = option("passes over the train split", 10, ge=1, le=100_000)
    global_batch_size: int = option("examples per update, over all ranks", 16, ge=1, le=1 << 20)
    micro_batch_size: int = option("examples per forward pass on one rank; 0: the rank's whole "
                                   "share", 0, ge=0, le=1 << 20)
    learning_rate: float = option("peak learning rate; 0: by the size of the encoder, as 2e-5 of "
                                  "base", 0.0, ge=0, le=10)
    layer_decay: float = option("learning rate of a layer, as a share of that of the next higher "
                                "layer", 1.0, gt=0, le=1)
    warmup_steps: int = option("updates of learning rate warm-up; 0: use warmup_share", 0, ge=0,
                               le=1 << 40)
    warmup_share: float = option("share of all updates used for warm-up if warmup_steps is 0", 0.06,
                                 ge=0, lt=1)
    weight_decay: float = option("decoupled weight decay", 0.01, ge=0, le=10)
    clip_norm: float = option("largest global gradient norm; 0: no clipping", 1.0, ge=0, le=1e9)
    head_dropout: float = option("dropout before the classifier", 0.1, ge=0, lt=1)
    dropout: float = option("dropout of the encoder; below 0: as in pretraining", -1.0, ge=-1, lt=1)
    max_length: int = option("maximum length of an encoded example in tokens", 256, ge=8,
                             le=1 << 16)
    truncation: Literal["first", "second", "longest_first", "head_tail", "windows_mean",
                        "windows_max"] = option(
        "what is cut of texts beyond max_length that are not read in windows: the end of the first "
        "or second, of whichever is the longest, or the middle of the first; windows: nothing, the "
        "first is read in windows, of whose scores the mean or the largest counts", "first")
    window_overlap: int = option("tokens that neighboring windows of a long text share", 128, ge=0,
                                 le=1 << 16)
    max_answer_tokens: int = option("question answering: longest predicted answer in tokens", 30,
                                    ge=1, le=1 << 16)
    class_weights: dict[str, float] | Literal["", "balanced"] = option(
        "weight of an example by its label: {LABEL = WEIGHT, ...}, others 1; balanced: examples / "
        "(labels * examples of the label); empty: equal weights", "")
    evals_per_epoch: int = option("evaluations per epoch", 1, ge=1, le=1 << 20)
    patience: int = option("evaluations without improvement after which training stops; 0: never",
                           0, ge=0, le=1 << 20)
    best_metric: str = option("metric that selects the best evaluation; empty: the task's score",
                              "")
    group_updates: int = option("updates whose examples are batched by length together; 1: no "
                                "grouping", 16, ge=1, le=1 << 20)
    eval_batch_size: int = option("examples per forward pass in evaluation", 32, ge=1, le=1 << 20)
    train_rows: int = option("use only the first rows of the train split; 0: all", 0, ge=0,
                             le=1 << 40)
    sift_weight: float = option("weight (lambda) of adversarial training (SiFT); 0: none", 0.0,
                                ge=0, le=1e6)
    sift_step: float = option("largest component of SiFT's perturbation step", 1e-4, ge=0, le=1e6)
    sift_noise: float = option("standard deviation of SiFT's noise", 1e-2, ge=0, le=1e6)
    sift_loss: Literal["symmetric_kl", "kl", "mse"] = option(
        "divergence between clean and perturbed scores", "symmetric_kl")

    def optim(self, total_steps: int) -> OptimConfig:
        """Return the optimizer and schedule of a run of `total_steps` updates."""
        warmup = self.warmup_steps or round(self.warmup_share * total_steps)
        return OptimConfig(learning_rate=self.learning_rate, betas=(0.9, 0.999), eps=1e-6,
                           weight_decay=self.weight_decay, clip_norm=self.clip_norm,
                           warmup_steps=min(warmup, total_steps),
                           layer_decay=self.layer_decay)


def load(
    path: str | Path | None, overrides: Iterable[str], tasks: Iterable[str],
    run: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return {task name: values}: of a settings file [all], then [TASK]; over both, of overrides
    --all.KEY, then --TASK.KEY.

    `tasks` are the names that tables may have, `run` those that overrides may. Raises ConfigError
    with the problems of a table.
    """
    known = (ALL, *tasks)
    written = read_toml(path, "settings file", "launch/runs/superglue/base.toml") if path else {}
    _check_tables(written, str(path), known)
    given: dict[str, Any] = {}
    for override in overrides:
        key, value = parse_override(override)
        names = [name for name in known if key.startswith(f"{name}.")]
        name = max(names, key=len, default=key.partition(".")[0])  # SQuAD-v2.0 has a dot itself
        if name == key:
            whole = f"--{ALL}.{key if key in Settings.__dataclass_fields__ else 'KEY'}=..."
            raise ConfigError(
                f"{override}: unknown option; a setting is written {whole}, or --TASK.KEY=... for "
                "one task")
        set_value(given.setdefault(name, {}), key[len(name) + 1 :], value)
    _check_tables(given, "the command line", known)
    if lost := [name for name in given if run and name not in (ALL, *run)]:
        raise ConfigError(f"--{lost[0]}.{next(iter(given[lost[0]]))}: {lost[0]} is none of the "
                          f"tasks of this run, {', '.join(run)}")
    merged: dict[str, dict[str, Any]] = {name: {} for name in known[1:]}
    for name, table in merged.items():
        for tables, key in itertools.product((written, given), (ALL, name)):
            for setting, value in tables.get(key, {}).items():  # class_weights one by one
                inner = table.get(setting)
                are_tables = isinstance(inner, dict) and isinstance(value, dict)
                table[setting] = inner | value if are_tables else value
    return {name: table for name, table in merged.items() if table}


def _check_tables(tables: dict[str, Any], place: str, known: tuple[str, ...]) -> None:
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ConfigError(
                f"{place}: [{name}] is not a table named {ALL} or after a task"
                f"{nearest(name, known)}")
        validate(Settings, table, f"{place}, settings of {name}")


def learning_rate_for(config: ModelConfig) -> float:
    """Return the usual peak learning rate of an encoder's size: 2e-5 at base's 85 M weights in its
    layers, less for more, at most 1e-3. Within a fifth of the published ones from 21 M to 1.4 B
    (docs/explanation/finetuning.md)."""
    weights = config.num_layers * config.hidden_size * (
        4 * config.hidden_size + 2 * config.intermediate_size)
    return min(1e-3, float(f"{2e-5 * (84_934_656 / weights) ** 0.7:.1e}"))


def resolve(task: Task, tables: Mapping[str, Mapping[str, Any]], config: ModelConfig | None = None
            ) -> Settings:
    """Return the settings of `task`: its own defaults, then what `load` has for it; with the
    learning rate of the size of `config`, where none is given.
    """
    values = dict(task.settings) | dict(tables.get(task.name, {}))
    if config is not None and not values.get("learning_rate"):
        values["learning_rate"] = learning_rate_for(config)
    settings = validate(Settings, values, f"settings of {task.name}")
    if settings.best_metric and settings.best_metric not in task.metrics:
        raise ConfigError(
            f"settings of {task.name}: best_metric = {settings.best_metric!r} is not one of its "
            f"metrics, {', '.join(task.metrics)}")
    _check_class_weights(task, settings.class_weights)
    check_truncation(task, settings.truncation)
    return settings


def check_truncation(task: Task, how: str) -> None:
    """Raise ConfigError if texts of `task` cannot be cut like this."""
    if how == "second" and len(task.texts) + len(task.choices) < 2:
        raise ConfigError(f'settings of {task.name}: truncation = "second", but it has one text')
    if how.startswith("windows") and task.head == "choice":
        raise ConfigError(f"settings of {task.name}: truncation = {how!r}: a choice compares whole "
                          "texts; take another truncation")


def _check_class_weights(task: Task, weights: dict[str, float] | str) -> None:
    place = f"settings of {task.name}: class_weights"
    if weights and task.head not in ("classify", "words", "spans"):
        raise ConfigError(f"{place}: only a classification with one label each has them")
    for label, weight in weights.items() if isinstance(weights, dict) else ():
        if label not in task.labels:
            raise ConfigError(f"{place}: no label {label!r}{nearest(label, task.labels)}; there "
                              f"are {', '.join(task.labels)}")
        if weight < 0:
            raise ConfigError(f"{place}: {label} = {weight}: must be at least 0")
