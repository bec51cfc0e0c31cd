"""The HTML reports of pretraining runs and of fine-tuning sweeps, each one document."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from torch import nn

from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import format_duration, format_value
from deberta_ds.evaluate.fill_mask import Filling, fill_mask, load_masked_lm
from deberta_ds.model.init import init_parameters
from deberta_ds.release.reader import LoadedModel
from deberta_ds.report import charts, tables
from deberta_ds.report.charts import Chart, Series
from deberta_ds.report.model_card import write_finetuned_card
from deberta_ds.report.pages import render
from deberta_ds.report.rundata import (
    RESULTS_FILE,
    Run,
    SeedRun,
    Spread,
    Sweep,
    TaskScores,
    read_run,
    read_sweep,
)
from deberta_ds.report.tables import Cell, Table, number

NUM_COLORS = 8
PAGE = "report.html"
PROPOSALS = 4  # for a mask
_TIME_COLORS = ("main", "second", "main-soft", "amber")


def write_runs(path: str | Path, directories: list[str | Path], masked_texts: Sequence[str] = (),
               price: float | None = None, live_seconds: int = 0) -> list[Run]:
    """Write the page of one run, or of several side by side; UserError names what is damaged.

    With `masked_texts` the page shows what each run's newest checkpoint puts for their masks.
    price: of an hour of one GPU (or CPU rank). live_seconds: as long as a run is going on, the page
    reloads itself this often. Returns what was read.
    """
    runs = [read_run(directory) for directory in directories]
    filled = [filled_masks(directory, masked_texts) if masked_texts else None
              for directory in directories]
    if not any(run.is_running for run in runs):
        live_seconds = 0
    write_atomic(path, runs_page(runs, filled, price, live_seconds))
    return runs


def write_sweep(path: str | Path, directories: list[str | Path]) -> None:
    """Write the page of the first fine-tuning sweep, with the others' scores next to it."""
    first, *compared = [read_sweep(Path(directory) / RESULTS_FILE) for directory in directories]
    write_atomic(path, render(
        "sweep.html", sweep=first, mean=format_value(first.mean, "share"),
        mean_note=mean_note(first), scores=scores(first, compared),
        cards=[_card(name, task, runs) for name, task in first.tasks.items()
               if (runs := first.runs_of(name))]))


def write_results(out: Path, results: Mapping, compared: Sequence[Path] = ()) -> str:
    """Write the results of fine-tuning to `out`: results.json, its page and the models' cards.

    Returns a line that says so. `compared` are the directories of sweeps to compare with.
    """
    write_atomic(out / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
    write_sweep(out / PAGE, [out, *compared])
    for run in results["runs"]:
        write_finetuned_card(out, run["task"], run["seed"])
    return f"\nwrote {out / RESULTS_FILE} and {out / PAGE}"


def runs_page(runs: list[Run], filled: list[Table | None], price: float | None = None,
              live_seconds: int = 0) -> str:
    """Return the page of `runs` as one HTML document."""
    one = runs[0] if len(runs) == 1 else None
    return render(
        "runs.html", live_seconds=live_seconds,
        names=[run.name for run in runs],
        header=tables.header(one) if one else None,
        tiles=tables.tiles(one, price) if one else [],
        comparison=None if one else tables.comparison(runs, price),
        differences=None if one else tables.differences(runs),
        groups=charts.groups(runs),
        times=[bar for run in runs if (bar := _time_bar(run))],
        details=[_details(run) | {"filled": table}
                 for run, table in zip(runs, filled, strict=True)])


def _details(run: Run) -> dict:
    note, stages = tables.stages(run)
    return {"name": run.name, "evaluation": tables.evaluation(run),
            "corpora": tables.evaluation_by_corpus(run),
            "scores": scores(run.sweep, []) if run.sweep and run.sweep.tasks else None,
            "stages": stages, "stages_note": note, "folds": tables.configuration(run)}


@dataclass(frozen=True)
class Part:
    """One part of a bar; `percent` of the whole bar."""

    name: str
    color: str  # name of a CSS variable
    seconds: float
    percent: float
    text: str


def _time_bar(run: Run) -> tuple[str, str, list[Part]] | None:
    """Return (name, time, parts of the bar) of where a run's time went, None if not known."""
    whole = sum(run.time_use.values())
    if not whole:
        return None
    return run.name, format_duration(whole), [
        Part(name, color, seconds, round(100 * seconds / whole, 2),
             f"{seconds / whole:.1%}, {format_duration(seconds)}")
        for (name, seconds), color in zip(run.time_use.items(), _TIME_COLORS, strict=True)]


def filled_masks(run_directory: str | Path, texts: Sequence[str]) -> Table:
    """Return a table with a row for each [MASK] of `texts`; the generator's, where there is one.

    UserError if the run has no checkpoint, or a text no mask or no room.
    """
    trained = load_masked_lm(run_directory)
    untrained = _untrained(trained)
    rows = []
    for text in texts:
        pairs = zip(fill_mask(untrained, text, PROPOSALS), fill_mask(trained, text, PROPOSALS),
                    strict=True)
        for place, (before, after) in enumerate(pairs, start=1):
            rows.append([Cell(text if place == 1 else "", kind="text"), Cell(str(place)),
                         Cell(_proposals(before), kind="what text"),
                         Cell(_proposals(after), kind="text")])
    head = [Cell("Text", kind=""), Cell("Mask"), Cell("Untrained", kind=""),
            Cell("Newest checkpoint", kind="")]
    return Table("Masks filled", "The likeliest tokens for each mask, by the same network with "
                 "random weights and with the newest checkpoint's.", head, rows)


def _untrained(model: LoadedModel) -> LoadedModel:
    assert model.masked_lm is not None, "load_masked_lm refuses a model without"
    words, masked_lm = copy.deepcopy(model.masked_lm)
    init_parameters(nn.ModuleList([words, masked_lm]), model.model_config.init_std, seed=0)
    return replace(model, masked_lm=(words, masked_lm))


def _proposals(fillings: list[Filling]) -> str:
    return " · ".join(f"{filling.text} {filling.probability:.1%}" for filling in fillings)


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
    curves: Chart | None
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


def _curves(name: str, task: TaskScores, runs: list[SeedRun]) -> Chart | None:
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
    return Chart(f"task-{name}", "Score by epoch", "On the validation set, every seed.",
                      "share", series, last_x=last, x_name="epoch", legend=True)
