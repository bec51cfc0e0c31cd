"""Which charts the page has, and what each of them shows."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from deberta_ds.report.charts import Chart, Series, draw, value_text
from deberta_ds.report.rundata import Run


@dataclass(frozen=True)
class _Panel:
    """One key of metrics.jsonl as a chart. `headline` picks the number beside the title."""

    key: str
    title: str
    note: str
    unit: str
    color: str
    baseline: tuple[str, Callable[[dict[str, Any]], float]] | None = None
    course: bool = False  # what the run did rather than what it learned: from zero, unsmoothed
    headline: Callable[[list[float]], float] = lambda values: values[-1]
    headline_note: str = ""  # what the headline is, where it is not the last value


LOSSES = (
    _Panel("generator_loss", "Generator loss", "Cross-entropy of the masked tokens, in nats.",
           "number", "gen"),
    _Panel("discriminator_loss", "Discriminator loss",
           "Binary cross-entropy of all tokens: original or replaced?", "number", "disc",
           ("class prior", lambda r: r["discriminator_loss"] + r["discriminator_gain"])),
)  # fmt: skip
QUALITY = (
    _Panel("discriminator_gain", "Discriminator gain",
           "How far its loss is below that of always answering with the class prior.", "gain",
           "disc", ("class prior", lambda r: 0.0)),
    _Panel("roc_auc", "ROC-AUC", "Chance that a replaced token scores above an original one.",
           "number", "disc", ("chance", lambda r: 0.5)),
    _Panel("average_precision", "Average precision",
           "Area under the precision-recall curve of the replaced tokens.", "number", "disc",
           ("chance", lambda r: 1 - r["prior_accuracy"])),
    _Panel("generator_accuracy", "Masked accuracy",
           "Share of the masked tokens that the first guess names.", "share", "gen",
           ("unigram", lambda r: r["unigram_accuracy"])),
)  # fmt: skip
COURSE = (
    _Panel("tokens_per_second", "Throughput", "Tokens per second.", "count", "disc",
           course=True, headline=median, headline_note="Median"),
    _Panel("learning_rate", "Learning rate", "As scheduled.", "rate", "disc", course=True,
           headline=max, headline_note="Peak"),
    _Panel("grad_norm", "Gradient norm", "Before clipping.", "number", "disc", course=True,
           headline=median, headline_note="Median"),
)  # fmt: skip


def curves(runs: list[Run]) -> str:
    """Return all charts. One run: lines by data set and baseline; several: one line a run."""
    return (
        _group("Learning curves", "Every logged training step, and the evaluations on fixed "
               "held-out rows.", runs, LOSSES, "grid2")
        + _group("What was learned", "Measured on held-out rows, beside what needs no learning.",
                 runs, QUALITY, "grid2")
        + _group("Course of the run", "What the hardware and the optimizer did.", runs, COURSE,
                 "grid3")
    )  # fmt: skip


def _group(title: str, note: str, runs: list[Run], panels: tuple[_Panel, ...], grid: str) -> str:
    charts = "".join(_chart(panel, runs) for panel in panels)
    return f'<h2>{title}</h2><p>{note}</p><section class="{grid}">{charts}</section>' * bool(charts)


def _chart(panel: _Panel, runs: list[Run]) -> str:
    series = _lines(panel, runs[0]) if len(runs) == 1 else _line_of_each(panel, runs)
    if not series:
        return ""
    last_step = max(run.last_step for run in runs)
    single = len(runs) == 1
    headline = value_text(panel.headline([y for _, y in series[-1].points]), panel.unit)
    if panel.headline_note:
        headline = f"<small>{panel.headline_note}</small> {headline}"
    if panel.baseline is not None:
        series += _baseline(runs[0], last_step, *panel.baseline)
    title = panel.title
    if panel.key == "generator_loss" and not any(run.has_discriminator for run in runs):
        title = "Masked-language-model loss"
    chart = Chart(panel.key, title, panel.note, panel.unit, series, panel.course)
    return draw(chart, runs[0].resumed_at if single else [], last_step, headline if single else "")


def _lines(panel: _Panel, run: Run) -> list[Series]:
    train, held_out = run.points("train", panel.key), run.points("eval", panel.key)
    series = []
    if train:
        color = f"{panel.color}-soft" if held_out else panel.color
        series.append(Series("training", train, color, "plain" if panel.course else "trend"))
    if held_out:
        series.append(Series("held out", held_out, panel.color, "dots"))
    return series


def _line_of_each(panel: _Panel, runs: list[Run]) -> list[Series]:
    series = []
    for number, run in enumerate(runs):
        train, held_out = run.points("train", panel.key), run.points("eval", panel.key)
        style = "dots" if held_out else "plain" if panel.course else "trend"
        if train or held_out:
            series.append(Series(run.name, held_out or train, f"run{number}", style))
    return series


def _baseline(run: Run, last_step: int, label: str, value_of) -> list[Series]:
    """Return the baseline of a run's evaluations as a line over the whole width."""
    points = []
    for record in run.evals:
        measured = {key: value for key, value in record.items() if value is not None}
        try:
            points.append((record["step"], value_of(measured)))
        except KeyError:  # an evaluation that did not measure this baseline
            continue
    if not points:
        return []
    ends = [(0, points[0][1])], [(last_step, points[-1][1])]
    return [Series(label, ends[0] + points + ends[1], "base", "baseline")]
