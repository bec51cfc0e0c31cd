"""Line charts as data: templates/script.js draws them, over steps, tokens or time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from deberta_ds.base.numbers import format_value
from deberta_ds.objectives.base import Metric
from deberta_ds.report.rundata import Points, Run, baseline_name

MAX_POINTS = 240  # more than the pixels of a small card can tell apart


@dataclass(frozen=True)
class Series:
    """One line; `style` is trend (values behind their moving mean), thin (that mean alone), plain,
    dots or baseline.
    """

    label: str
    points: Points
    color: str  # name of a CSS variable: never from a file
    style: str
    clock: Callable[[float], tuple[float, float]] | None = None  # step -> (tokens, seconds)


@dataclass(frozen=True)
class Chart:
    """A card with one panel; it has a series, and each series a point. `unit` is one of
    `numbers.format_value`.
    """

    key: str
    title: str
    note: str
    unit: str
    series: list[Series]
    headline: str = ""  # the number next to the title, and what it is
    headline_note: str = ""
    from_zero: bool = False
    last_x: float = 1.0
    x_name: str = "step"
    marks: Sequence[float] = ()  # upright lines: where a run was resumed
    legend: bool = False  # names above the frame instead of at the ends of the lines

    @property
    def data(self) -> str:
        """The lines as JSON for the script: points are [x, text of y, y, tokens, seconds]."""
        return json.dumps([{
            "label": line.label, "style": line.style, "color": line.color,
            "points": [[round(x, 4), format_value(y, self.unit), float(f"{y:.6g}"),
                        *(round(value, 1) for value in (line.clock(x) if line.clock else ()))]
                       for x, y in binned(line.points)]} for line in self.series],
            separators=(",", ":"))


def binned(points: Points) -> Points:
    """Return at most MAX_POINTS points; of more, the means of bins of equal count."""
    edges = [len(points) * k // MAX_POINTS for k in range(MAX_POINTS + 1)]
    if len(points) <= MAX_POINTS:
        return points
    return [(sum(x for x, _ in points[a:b]) / (b - a), sum(y for _, y in points[a:b]) / (b - a))
            for a, b in zip(edges, edges[1:], strict=False)]


# What a run did rather than what it learned: drawn as it is, from zero. The third is its headline.
RUN_CHARTS = ((Metric("tokens_per_second", "Throughput", "Tokens per second.", "count"), "Median"),
              (Metric("learning_rate", "Learning rate", "As scheduled.", "rate"), "Peak"),
              (Metric("grad_norm", "Gradient norm", "Before clipping."), "Median"),
              (Metric("peak_memory_bytes", "Peak memory", "GiB, of the first rank.", "bytes"),
               "Peak"),
              (Metric("node_memory_bytes", "Memory of the node", "GiB in use, by all processes.",
                      "bytes"), "Peak"),
              (Metric("cpu_share", "CPU use", "Of all cores of the first node.", "share"),
               "Median"),
              (Metric("gpu_share", "GPU use", "Of the first rank's GPU.", "share"), "Median"))
_AGREE = 1e-9  # baselines of runs on the same rows


def groups(runs: list[Run]) -> list[tuple[str, str, int, list[Chart]]]:
    """Return all charts in groups (title, note, columns, charts). One run: lines by data set and
    baseline; several: one line per run.
    """
    declared = list({metric.key: metric for run in runs for metric in run.metrics}.values())
    several = len(runs) > 1
    drawn = [(metric.is_loss, _several(metric, runs) if several else _one_run(metric, runs[0]))
             for metric in declared]
    rows = "Every logged training step, and the evaluations on fixed held-out sequences."
    found = [
        ("Learning curves", "One color per run." if several else rows, 2,
         [chart for is_loss, chart in drawn if is_loss]),
        ("What was learned", "Measured on held-out sequences, next to the baseline.", 2,
         [chart for is_loss, chart in drawn if not is_loss]),
        ("Hardware and optimizer", "What the hardware and the optimizer did.", 3,
         [chart for metric, headline in RUN_CHARTS
          for chart in _run_chart(metric, headline, runs)]),
    ]
    return [group for group in found if group[-1]]


def color_of(metric: Metric, run: Run) -> str:
    """Return the color of a metric's network; the last one declared is the one that is kept.

    What is measured next to an objective's own scores is measured of that one.
    """
    networks = list(dict.fromkeys(declared.network for declared in run.objective.METRICS))
    return "second" if metric.network in networks[:-1] else "main"


def _one_run(metric: Metric, run: Run) -> Chart:
    train, held_out = run.points("train", metric.key), run.points("eval", metric.key)
    color, series = color_of(metric, run), []
    if train:
        soft = f"{color}-soft" if held_out else color
        series.append(Series("training", train, soft, "trend", run.clock))
    if held_out:
        series.append(Series("held out", held_out, color, "dots", run.clock))
    headline = format_value(series[-1].points[-1][1], metric.unit)
    if base := _baseline(metric, run):
        series.append(Series(baseline_name(metric), base, "base", "baseline", run.clock))
    return Chart(metric.key, metric.title, metric.note, metric.unit, series, headline,
                 last_x=run.last_step, marks=run.resumed_at)


def _several(metric: Metric, runs: list[Run]) -> Chart:
    """Dots for the held-out sequences of each run, and a thin line for its training sequences."""
    having = [(n, run) for n, run in enumerate(runs) if metric in run.metrics]
    series: list[Series] = []
    for n, run in having:
        train, held_out = run.points("train", metric.key), run.points("eval", metric.key)
        if train and held_out:
            series.insert(0, Series(f"{run.name}, training", train, f"run{n}", "thin", run.clock))
        series.append(Series(run.name, held_out or train, f"run{n}",
                             "dots" if held_out else "trend", run.clock))
    note = "Thin lines: training; dots: held out." if series[0].style == "thin" else ""
    bases = [(n, base) for n, run in having if (base := _baseline(metric, run))]
    if bases and len({round(base[-1][1] / _AGREE) for _, base in bases}) == 1:
        longest = max((base for _, base in bases), key=lambda base: base[-1][0])
        furthest = max((run for _, run in having), key=lambda run: run.last_step)
        series.append(Series(baseline_name(metric), longest, "base", "baseline", furthest.clock))
    else:
        series += [Series(f"{baseline_name(metric)}, {runs[n].name}", base, f"run{n}", "baseline",
                          runs[n].clock) for n, base in bases]
    return Chart(metric.key, metric.title, f"{metric.note} {note}", metric.unit, series,
                 last_x=max(run.last_step for run in runs), legend=True)


def _run_chart(metric: Metric, headline: str, runs: list[Run]) -> list[Chart]:
    one, factor = len(runs) == 1, 2.0**-30 if metric.unit == "bytes" else 1.0
    series = [Series("" if one else run.name, [(x, factor * y) for x, y in points],
                     "main" if one else f"run{n}", "plain", run.clock)
              for n, run in enumerate(runs) if (points := run.points("train", metric.key))]
    if not series:
        return []
    values = [y for _, y in series[0].points]
    value = max(values) if headline == "Peak" else median(values)
    unit = "number" if metric.unit == "bytes" else metric.unit
    return [Chart(metric.key, metric.title, metric.note, unit, series,
                  format_value(value, unit) if one else "", headline if one else "",
                  from_zero=True, last_x=max(run.last_step for run in runs), legend=True)]


def _baseline(metric: Metric, run: Run) -> list[tuple[float, float]]:
    """Return the baseline of a run's evaluations as a line over the whole width."""
    points = [(record["step"], value) for record in run.evals
              if (value := metric.baseline_of(record)) is not None]
    if not points:
        return []
    return [(0, points[0][1]), *points, (run.last_step, points[-1][1])]
