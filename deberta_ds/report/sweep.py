"""What the page of a fine-tuning sweep shows: scores over seeds, curves, confusion matrices."""

import json
from dataclasses import dataclass
from statistics import fmean

from deberta_ds.base.numbers import format_value
from deberta_ds.report.charts import Chart, Drawing, Series, draw
from deberta_ds.report.rundata import SeedRun, Spread, Sweep, TaskScores
from deberta_ds.report.tables import Cell, number

NUM_COLORS = 8


@dataclass(frozen=True)
class Track:
    """A line from 0 to 100 %: a dot a seed, their range and median, the majority, other sweeps."""

    seeds: list[tuple[float, bool]]  # percent, failed
    low: float
    high: float
    median: float
    majority: float | None
    compared: list[tuple[float, str]]  # percent, color


@dataclass(frozen=True)
class ScoreRow:
    """One task of the table; `diagnostics` are lines (name, scores) below it."""

    name: str
    metrics: str
    track: Track
    cells: list[Cell]
    diagnostics: list[tuple[str, str]]


# The table of a sweep: its head, its rows, (name, color) of the sweeps it is compared with.
Scores = tuple[list[Cell], list[ScoreRow], list[tuple[str, str]]]


@dataclass(frozen=True)
class TaskCard:
    """One task: its curves and the median seed's predictions and settings."""

    name: str
    medians: str
    curves: Drawing | None
    seed: int | None
    matrix: tuple[list[str], list[tuple[str, list[tuple[int, int]]]]] | None
    settings: list[tuple[str, str]]


def mean_note(sweep: Sweep) -> str:
    """Return what the mean is of."""
    if sweep.mean_of == sweep.suite_tasks and sweep.suite != "own tasks":
        return "the leaderboard's rule"
    return f"{sweep.mean_of} of {sweep.suite_tasks} tasks"


def scores(sweep: Sweep, compared: list[Sweep]) -> Scores:
    """Return the table of task scores, one column for each sweep of `compared`."""
    names = [(other.model or f"sweep {n + 2}", f"run{n + 1}") for n, other in enumerate(compared)]
    head = [*map(Cell, ("Median", "Min", "Max", "Majority", "Difference")),
            *(Cell(name, kind="n model") for name, _ in names), Cell("Failed")]
    rows = [_row(name, task, sweep.runs_of(name),
                 [other.tasks[name].score.median if name in other.tasks else None
                  for other in compared])
            for name, task in sweep.tasks.items()]
    return head, rows, names


def _row(name: str, task: TaskScores, runs: list[SeedRun], compared: list[float | None]
         ) -> ScoreRow:
    score, majority = task.score, task.baseline
    gain = None if majority is None else score.median - majority
    tone = "" if gain is None else "up" if gain > 0 else "down"
    cells = [number(score.median, "share"), number(score.min, "share", "n quiet"),
             number(score.max, "share", "n quiet"), number(majority, "share", "n quiet"),
             number(gain, "points", f"n {tone}"), *(number(other, "share") for other in compared),
             Cell(f"{task.failed:,} of {task.seeds:,}", task.failed,
                  "n down" if task.failed else "n quiet")]
    track = Track(
        seeds=[(_percent(run.score), run.failed) for run in runs],
        low=_percent(score.min), high=_percent(score.max), median=_percent(score.median),
        majority=None if majority is None else _percent(majority),
        compared=[(_percent(other), f"run{n + 1}") for n, other in enumerate(compared)
                if other is not None])
    return ScoreRow(name, ", ".join(map(_words, task.metrics)), track, cells,
                    [(diagnostic, f"by the {name} models, medians: {_medians(values)}")
                     for diagnostic, values in task.diagnostics.items()])


def _percent(value: float) -> float:
    # Only the diagnostic AX-b can score below 0 (a correlation).
    return round(100 * max(0.0, value), 2)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _medians(metrics: dict[str, Spread]) -> str:
    return ", ".join(f"{_words(name)} {format_value(spread.median, 'share')}"
                     for name, spread in metrics.items())


def cards(sweep: Sweep) -> list[TaskCard]:
    """Return a card for each task that has runs in the file."""
    return [_card(name, task, runs) for name, task in sweep.tasks.items()
            if (runs := sweep.runs_of(name))]


def _card(name: str, task: TaskScores, runs: list[SeedRun]) -> TaskCard:
    middle = sorted(runs, key=lambda run: run.score)[(len(runs) - 1) // 2]
    failed = f"; {task.failed} of {task.seeds} runs failed" if task.failed else ""
    failed += "".join(f" ({count}: {reason})" for reason, count in task.failures.items())
    matrix = None
    if middle.confusion:
        width = max(len(row) for row in middle.confusion)
        labels = [task.labels[k] if k < len(task.labels) else f"class {k}"
                  for k in range(max(width, len(middle.confusion)))]
        matrix = labels[:width], [
            (labels[k], [(count, round(60 * count / max(sum(row), 1))) for count in row])
            for k, row in enumerate(middle.confusion)]
    settings = [(key, value if isinstance(value, str) else json.dumps(value))
                for key, value in middle.settings.items()]
    return TaskCard(name, f"Score: {_words(task.score_is)}. Medians: "
                    f"{_medians(task.metrics)}{failed}.",
                    _curves(name, task, runs), middle.seed, matrix, settings)


def _curves(name: str, task: TaskScores, runs: list[SeedRun]) -> Drawing | None:
    """Return the validation score by epoch, one line a seed; None if nothing was evaluated."""
    series = []
    for n, run in enumerate(runs):
        points = [(entry["epoch"], fmean(entry[key] for key in task.metrics))
                  for entry in run.history if {"epoch", *task.metrics} <= entry.keys()]
        if points and task.metrics:
            series.append(Series(f"seed {run.seed}", points, f"run{n % NUM_COLORS}", "dots"))
    if not series:
        return None
    last = max(x for line in series for x, _ in line.points)
    if task.baseline is not None:
        ends = [(0.0, task.baseline), (last, task.baseline)]
        series.append(Series("majority class", ends, "base", "baseline"))
    return draw(Chart(f"task-{name}", "Score by epoch", "On the validation set, every seed.",
                      "share", series, last_x=last, x_name="epoch", legend=True))
