"""One self-contained HTML page about one run, or about a few runs side by side."""

from html import escape
from pathlib import Path

from deberta_ds import __version__
from deberta_ds.errors import UserError
from deberta_ds.files import write_atomic
from deberta_ds.report import headline, tables
from deberta_ds.report.curves import curves
from deberta_ds.report.rundata import Run, read_run
from deberta_ds.report.style import CSS, SCRIPT

MAX_RUNS = 5  # colors that people tell apart at a glance


def write_report(path: str | Path, run_directories: list[str | Path]) -> None:
    """Write the page at `path`; it needs no network and no other file.

    With several directories the charts hold one line a run. UserError names the file and place of
    the input that is missing or damaged.
    """
    if not 1 <= len(run_directories) <= MAX_RUNS:
        raise UserError(f"a report shows 1 to {MAX_RUNS} runs, {len(run_directories)} were named")
    write_atomic(path, page([read_run(directory) for directory in run_directories]))


def page(runs: list[Run]) -> str:
    """Return the report of `runs` as one HTML document."""
    title = ", ".join(run.name for run in runs)
    if len(runs) == 1:
        top = headline.header(runs[0]) + headline.tiles(runs[0])
    else:
        top = (
            f'<p class="eyebrow">DeBERTa pretraining report</p><h1>{len(runs)} runs compared</h1>'
            '<p class="lead">The last record of each run; one color a run in all charts.</p>'
            + tables.comparison(runs)
        )
    body = top + curves(runs)
    for run in runs:
        details = (
            tables.evaluation(run)
            + tables.superglue(run)
            + tables.stages(run)
            + tables.configuration(run)
        )
        name = f'<h1 style="margin-top:56px">{escape(run.name)}</h1>' if len(runs) > 1 else ""
        body += name + details
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} - DeBERTa pretraining report</title><style>{CSS}</style></head>"
        f"<body><main>{body}<footer>Written by deberta_ds {__version__}. Shares of held-out data; "
        f"curves show what metrics.jsonl holds.</footer></main><script>{SCRIPT}</script></body>"
        "</html>\n"
    )
