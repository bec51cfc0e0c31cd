"""A run directory as the report reads it: metrics.jsonl, config.json and optional results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deberta_ds.errors import UserError
from deberta_ds.log import METRICS_FILE, read_metrics

CONFIG_FILE = "config.json"
SUMMARY_FILE = "summary.json"
SUPERGLUE_FILE = "superglue/results.json"

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """What one run directory holds. Records keep the key names of metrics.jsonl."""

    name: str
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config: dict[str, Any]  # sections of the run config
    origins: dict[str, str]  # of every value of the run config
    machine: dict[str, Any]  # the rest of config.json: DeepSpeed, parameters, fingerprints
    versions: dict[str, str]
    summary: list[dict[str, Any]]
    superglue: dict[str, dict[str, Any]]

    @property
    def has_discriminator(self) -> bool:
        return any("discriminator_loss" in record for record in self.train + self.evals)

    @property
    def last_step(self) -> int:
        return max(record["step"] for record in self.train + self.evals)

    @property
    def total_steps(self) -> int:
        return max(self.last_step, self.config.get("train", {}).get("steps", 0))

    @property
    def resumed_at(self) -> list[int]:
        return [event["step"] for event in self.events if event["event"] == "resume"]

    def points(self, kind: str, key: str) -> Points:
        """Return the (step, value) pairs of a key of the train or eval records, without nulls."""
        records = self.train if kind == "train" else self.evals
        return [(r["step"], r[key]) for r in records if r.get(key) is not None]

    def last(self, kind: str, key: str) -> float | None:
        points = self.points(kind, key)
        return points[-1][1] if points else None

    def training_seconds(self) -> float:
        """Return the time spent training; a clock that restarts at a resume is added up."""
        total, previous = 0.0, 0.0
        for record in self.train:
            seconds = record.get("seconds") or previous
            total += seconds - previous if seconds >= previous else seconds
            previous = seconds
        return total


def read_run(directory: str | Path) -> Run:
    """Return the Run in `directory`; UserError names the file and place that breaks a rule."""
    directory = Path(directory)
    records = read_metrics(directory / METRICS_FILE)
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval")}
    if not by_kind["train"] and not by_kind["eval"]:
        raise UserError(f"{directory / METRICS_FILE}: no train or eval record yet; train first")
    saved = _read_object(directory / CONFIG_FILE)
    for key in ("run", "origins", "versions"):
        if not isinstance(saved.get(key), dict):
            raise UserError(f'{directory / CONFIG_FILE}: "{key}" must be an object')
    config = saved["run"]
    return Run(
        name=str(config.get("name") or directory.resolve().name),
        train=by_kind["train"],
        evals=by_kind["eval"],
        events=[r for r in records if r["kind"] == "event"],
        config=config,
        origins=saved["origins"],
        machine={k: v for k, v in saved.items() if k not in ("run", "origins", "versions")},
        versions=saved["versions"],
        summary=_read_summary(directory / SUMMARY_FILE),
        superglue=_read_superglue(directory / SUPERGLUE_FILE),
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a directory a run has written to") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}; write the file anew") from None


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold one JSON object")
    return value


def _read_summary(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = _read_json(path)
    if not isinstance(rows, list):
        raise UserError(f"{path}: must hold a JSON array of rows")
    for number, row in enumerate(rows, start=1):
        missing = {"stage", "what", "result", "seconds"} - set(row if isinstance(row, dict) else ())
        if missing:
            raise UserError(f"{path}, row {number}: misses {', '.join(sorted(missing))}")
        if not isinstance(row["seconds"], int | float | None):
            raise UserError(f'{path}, row {number}: "seconds" must be a number or null')
    return rows


def _read_superglue(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    tasks = _read_object(path).get("tasks")
    if not isinstance(tasks, dict):
        raise UserError(f'{path}: "tasks" must be an object of task name to scores')
    for name, task in tasks.items():
        score = task.get("score") if isinstance(task, dict) else None
        score = score if isinstance(score, dict) else {}
        spread = [score.get(key) for key in ("min", "median", "max")]
        if not all(isinstance(value, int | float) and -1 <= value <= 1 for value in spread):
            raise UserError(f'{path}, task {name}: "score" needs min, median, max in [-1, 1]')
        for key in ("metrics", "baseline", "seeds", "failed"):
            if key not in task:
                raise UserError(f'{path}, task {name}: misses "{key}"; run the sweep anew')
    return tasks
