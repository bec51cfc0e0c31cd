"""Self-contained HTML pages about pretraining runs, fine-tuning sweeps and plans."""

from collections.abc import Sequence
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import format_value
from deberta_ds.report import charts, facts, sweep, tables, time_page
from deberta_ds.report.pages import render
from deberta_ds.report.rundata import RESULTS_FILE, Run, Sweep, read_run, read_sweep
from deberta_ds.report.samples import filled_masks
from deberta_ds.report.tables import Table

PAGE = "report.html"
MAX_BESIDE = 5  # colors that people tell apart at a glance


def write_runs(path: str | Path, directories: list[str | Path],
               masked_texts: Sequence[str] = ()) -> None:
    """Write the page of one run, or of several side by side; UserError names what is damaged.

    With `masked_texts` the page shows what each run's newest checkpoint puts for their masks.
    """
    _check_number("runs", directories)
    runs = [read_run(directory) for directory in directories]
    filled = [filled_masks(directory, masked_texts) if masked_texts else None
              for directory in directories]
    write_atomic(path, runs_page(runs, filled))


def write_sweep(path: str | Path, directories: list[str | Path]) -> None:
    """Write the page of the first fine-tuning sweep, with the others' scores beside it."""
    _check_number("sweeps", directories)
    first, *beside = [read_sweep(Path(directory) / RESULTS_FILE) for directory in directories]
    write_atomic(path, sweep_page(first, beside))


def _check_number(what: str, directories: list) -> None:
    if not 1 <= len(directories) <= MAX_BESIDE:
        raise UserError(
            f"a page shows 1 to {MAX_BESIDE} {what}, {len(directories)} were named")


def runs_page(runs: list[Run], filled: list[Table | None]) -> str:
    """Return the page of `runs` as one HTML document."""
    one = runs[0] if len(runs) == 1 else None
    return render(
        "runs.html",
        names=[run.name for run in runs],
        header=facts.header(one) if one else None,
        tiles=facts.tiles(one) if one else [],
        comparison=None if one else tables.comparison(runs),
        differences=None if one else tables.differences(runs),
        groups=charts.groups(runs),
        times=time_page.bars(runs),
        details=[_details(run) | {"filled": table}
                 for run, table in zip(runs, filled, strict=True)],
    )


def _details(run: Run) -> dict:
    note, stages = tables.stages(run)
    return {"name": run.name, "evaluation": tables.evaluation(run),
            "corpora": tables.evaluation_by_corpus(run),
            "scores": sweep.scores(run.sweep, []) if run.sweep and run.sweep.tasks else None,
            "stages": stages, "stages_note": note, "folds": tables.configuration(run)}


def sweep_page(first: Sweep, beside: list[Sweep]) -> str:
    """Return the page of a sweep as one HTML document."""
    return render("sweep.html", sweep=first, mean=format_value(first.mean, "share"),
                  mean_note=sweep.mean_note(first), scores=sweep.scores(first, beside),
                  cards=sweep.cards(first))
