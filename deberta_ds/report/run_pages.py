"""The HTML reports of pretraining runs and of fine-tuning sweeps, each one document."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from torch import nn

from deberta_ds.base.files import write_atomic
from deberta_ds.evaluate.fill_mask import Filling, fill_mask, load_masked_lm
from deberta_ds.finetuning.models import RESULTS_FILE, Result
from deberta_ds.model.backbone import init_parameters
from deberta_ds.release.reader import LoadedModel
from deberta_ds.report import charts, tables
from deberta_ds.report.charts import Chart, Series
from deberta_ds.report.pages import render
from deberta_ds.report.rundata import Run, Sweep, TaskScores, read_checked, read_run
from deberta_ds.report.tables import Cell, Table

NUM_COLORS = 8
PAGE = "report.html"
PROPOSALS = 4  # for a mask


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
    first, *others = [read_checked(Path(directory) / RESULTS_FILE, Sweep)[0]
                      for directory in directories]
    compared = [(other.model or f"sweep {number + 1}", f"run{number}", other)
                for number, other in enumerate(others, start=1)]
    write_atomic(path, render("sweep.html", sweep=first, compared=compared,
                              curves={name: _curves(name, task, first.runs_of(name))
                                      for name, task in first.tasks.items()}))


def runs_page(runs: list[Run], filled: list[Table | None], price: float | None = None,
              live_seconds: int = 0) -> str:
    """Return the page of `runs` as one HTML document."""
    one = runs[0] if len(runs) == 1 else None
    return render(
        "runs.html", live_seconds=live_seconds, one=one, runs=runs,
        names=[run.name for run in runs], groups=charts.groups(runs),
        tiles=tables.tiles(one, price) if one else [],
        comparison=None if one else tables.comparison(runs, price),
        differences=None if one else tables.differences(runs),
        details=[(run, table, tables.evaluation(run), tables.evaluation_by_corpus(run),
                  tables.configuration(run)) for run, table in zip(runs, filled, strict=True)],
        **(tables.header(one) if one else {}))


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
    assert model.masked_lm is not None, "load_masked_lm rejects a model without"
    words, masked_lm = copy.deepcopy(model.masked_lm)
    init_parameters(nn.ModuleList([words, masked_lm]), model.model_config.init_std, seed=0)
    return replace(model, masked_lm=(words, masked_lm))


def _proposals(fillings: list[Filling]) -> str:
    return " · ".join(f"{filling.text} {filling.probability:.1%}" for filling in fillings)


def _curves(name: str, task: TaskScores, runs: list[Result]) -> Chart | None:
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
