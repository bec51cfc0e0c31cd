"""A run directory as the page reads it: metrics.jsonl, config.json and optional results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import pydantic_core
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.user_code import digest, is_own, split
from deberta_ds.cluster import lock
from deberta_ds.config.run_config import RunConfig
from deberta_ds.finetuning.models import READ, RESULTS_FILE, Count, Result, Score, Text
from deberta_ds.objectives.base import MINIMAL_PAIRS, Metric, Objective
from deberta_ds.objectives.build import objective_named, own_metrics
from deberta_ds.tracking.log import KINDS, METRICS_FILE, read_metrics

_MOST_NAMED = 3
_TIME_KEYS = ("seconds", "saves_seconds", "evaluations_seconds", "restarts_seconds")


def baseline_name(metric: Metric) -> str:
    """Return what the baseline of a metric is called, "" where it has none."""
    return metric.baseline[0] if metric.baseline else ""


@checked(config=READ, frozen=True)
class Spread:
    """A number over seeds."""

    median: Score
    min: Score
    max: Score


@checked(config=READ, frozen=True)
class TaskScores:
    """One task over its seeds. `labels` name the classes of the confusion matrices."""

    score: Spread
    metrics: dict[Text, Spread]
    baseline: Score | None
    seeds: Count
    failed: Count
    diagnostics: dict[Text, dict[Text, Spread]] = Field(default_factory=dict)
    labels: list[Text] = Field(default_factory=list)
    score_is: Text = "mean of its metrics"
    failures: dict[Text, Count] = Field(default_factory=dict)  # reason -> runs


@checked(config=READ, frozen=True)
class Sweep:
    """results.json of a fine-tuning sweep; the mean is of the task medians."""

    tasks: dict[Text, TaskScores]
    model: str = ""
    mean: Score | None = None
    mean_of: Count = 0
    suite: Text = "SuperGLUE"
    suite_tasks: Count = 8  # what the leaderboard's mean is of
    runs: list[Result] = Field(default_factory=list)

    def runs_of(self, task: str) -> list[Result]:
        """Return the runs of a task by seed."""
        return sorted((run for run in self.runs if run.task == task), key=lambda run: run.seed)


Points = list[tuple[float, float]]


@checked(config=READ, frozen=True)
class _Saved:
    """config.json: what the page computes with is checked, the rest is only shown."""

    run: RunConfig
    origins: dict[str, str]
    versions: dict[str, str]
    parameters: Count
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    hardware: str  # of one rank
    kernels: dict[str, dict[str, str]]  # {idea: its kernel and why}
    device: str  # cpu or cuda
    commit: str
    content_hashes: dict[str, str] = Field(default_factory=dict)
    branch: str = ""


@checked(config=READ, frozen=True)
class Stage:
    """One row of summary.json."""

    stage: str
    what: str
    result: str
    seconds: Annotated[float, Field(ge=0, lt=1e12)] | None


@dataclass(frozen=True)
class Run:
    """What one run directory holds. Records keep the key names of metrics.jsonl."""

    name: str
    objective: Objective
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: list[dict[str, Any]]
    saved: _Saved
    config: dict[str, Any]  # sections of the run config
    rest: dict[str, Any]  # of config.json: DeepSpeed, content hashes, hardware
    stages: list[Stage]
    is_running: bool  # a job holds the directory
    sweep: Sweep | None = None  # SuperGLUE of the exported model

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the objective declares, as far as this run has measured it."""
        seen = {key for record in self.train + self.evals for key, value in record.items()
                if value is not None}
        return tuple(metric for metric in (*self.objective.METRICS, MINIMAL_PAIRS,
                                        *own_metrics(self.saved.run.evaluate.metrics))
                     if metric.key in seen)

    @property
    def last_step(self) -> int:
        """Last step that the records tell of."""
        return max(record["step"] for record in self.train + self.evals)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return max(self.last_step, self.saved.run.train.steps, 1)

    @property
    def resumed_at(self) -> list[int]:
        """The steps a run was resumed at, each once."""
        return sorted({event["step"] for event in self.events if event["event"] == "resume"})

    @property
    def scores(self) -> dict[str, float]:
        """The last evaluation: for every key its last value that is not null."""
        return {key: value for record in self.evals for key, value in record.items()
                if value is not None}

    def points(self, kind: str, key: str) -> Points:
        """Return the (step, value) pairs of a key of the train or eval records, without nulls."""
        found = self.train if kind == "train" else self.evals
        return [(r["step"], r[key]) for r in found if r.get(key) is not None]

    def last(self, key: str) -> float | None:
        """Return the newest value of `key` in any record."""
        points = [(r["step"], r[key]) for r in self.train + self.evals + self.events
                  if r.get(key) is not None]
        return max(points)[1] if points else None

    def middle(self, key: str) -> float | None:
        """Return the median of a key over the training records."""
        values = [value for _, value in self.points("train", key)]
        return median(values) if values else None

    def training_seconds(self) -> float:
        """Return the time spent training; a clock that restarts at a resume is added up."""
        return sum(seconds for seconds, _ in self._stretches())

    def rank_seconds(self) -> float:
        """Return the time spent training, times the ranks that each start had."""
        return sum(seconds * ranks for seconds, ranks in self._stretches())

    def world_sizes(self) -> list[int]:
        """Return the numbers of ranks that trained, each once, in order."""
        return sorted({ranks for _, ranks in self._stretches()} or {self.saved.world_size})

    @cached_property
    def time_use(self) -> dict[str, float]:
        """Seconds of steps, saves, evaluations and restarts over all starts; {} if not known."""
        records = [record for record in self.train + self.events
                   if all(record.get(key) is not None for key in _TIME_KEYS)]
        if not records:
            return {}
        newest = max(records, key=lambda r: (r["step"], r["seconds"] + r["restarts_seconds"]))
        training, *others = (newest[key] for key in _TIME_KEYS)
        values = [training - others[0] - others[1], *others]
        if min(values) < 0 or sum(values) <= 0:  # not what a run writes
            return {}
        return dict(zip(("steps", "saves", "evaluations", "starts and repeated steps"), values,
                        strict=True))

    @cached_property
    def clock(self) -> Callable[[float], tuple[float, float]]:
        """The map from a step to (tokens seen, seconds of training) by then."""
        steps, tokens, seconds = [0], [0], [0.0]
        for record, (elapsed, _) in zip(self.train, self._stretches(), strict=True):
            steps.append(record["step"])
            tokens.append(record.get("tokens_seen") or tokens[-1])
            seconds.append(seconds[-1] + elapsed)
        return lambda step: (float(np.interp(step, steps, tokens)),
                             float(np.interp(step, steps, seconds)))

    def _stretches(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds of training, number of ranks) between every two training records."""
        previous = 0.0
        for record in self.train:
            seconds = record.get("seconds") or previous
            elapsed = seconds - previous if seconds >= previous else seconds
            yield elapsed, record.get("world_size") or self.saved.world_size
            previous = seconds


def read_run(directory: str | Path) -> Run:
    """Return the Run in `directory`; UserError names the file and place that breaks a rule."""
    directory = Path(directory)
    records = read_metrics(directory / METRICS_FILE)
    place = directory / "config.json"
    saved, values = read_checked(place, _Saved)
    kind = saved.run.objective.kind
    if is_own(kind) and saved.content_hashes.get(kind, now := digest("", kind)) != now:
        raise UserError(f"{split(kind)[0]}: has changed since {place} was written; put the former "
                        "file there")
    _note_ranks(records, directory / METRICS_FILE)
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in KINDS}
    if not by_kind["train"] and not by_kind["eval"]:
        raise UserError(f"{directory / METRICS_FILE}: no train or eval record yet; train first")
    summary, sweep = directory / "summary.json", directory / "superglue" / RESULTS_FILE
    return Run(
        name=saved.run.name, objective=objective_named(kind), train=by_kind["train"],
        evals=by_kind["eval"], events=by_kind["event"], saved=saved, config=values["run"],
        rest={k: v for k, v in values.items() if k not in ("run", "origins", "versions")},
        stages=read_checked(summary, list[Stage])[0] if summary.exists() else [],
        is_running=lock.is_held(directory),
        sweep=read_checked(sweep, Sweep)[0] if sweep.exists() else None)


def _note_ranks(records: list[dict[str, Any]], place: Path) -> None:
    """Add to the training records how many ranks their start had, where it says so."""
    ranks = None
    for record in records:
        if record.get("event") in ("start", "resume"):
            ranks = record.get("world_size")
            if ranks is not None and not (isinstance(ranks, int) and 0 < ranks < 1 << 31):
                raise UserError(f'{place}: "world_size" must be a whole number from 1, it is '
                                f"{ranks!r:.40}")
        elif record["kind"] == "train" and ranks:
            record["world_size"] = ranks


def read_checked(path: Path, form: Any) -> tuple[Any, Any]:
    """Return (the file as `form`, a type made with READ; the file as plain JSON values)."""
    with naming(path):
        text = path.read_bytes()
    try:
        return TypeAdapter(form).validate_json(text), pydantic_core.from_json(text)
    except ValidationError as error:
        found = error.errors()
        named = "; ".join(_problem(item) for item in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise UserError(f"{path}: {named}{more}; write the file again") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}; write the file again") from None


def _problem(item: Any) -> str:
    if item["type"] == "json_invalid":
        return f"not valid JSON: {item['ctx']['error']}"
    place = ".".join(str(part)[:60] for part in item["loc"]) or "the file"
    return f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}"
