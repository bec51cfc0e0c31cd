"""Line charts: an SVG that stretches to its frame, with the text laid over it as HTML.

Unusual: the SVG keeps no aspect ratio and holds only lines (non-scaling strokes; a dot is a line of
no length with round ends), so text has the same size on a phone, a desk and paper. Coordinates are
percent of the frame. This file computes them; templates/chart.html writes them down.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from deberta_ds.base.numbers import format_count, format_value
from deberta_ds.objectives.base import Metric
from deberta_ds.report.rundata import Points, Run, baseline_name

MAX_POINTS = 240  # more than the pixels of a small card can tell apart
_LABEL_HEIGHT = 8.0  # of one line of text, in percent of the frame's height
_LABEL_CHARACTERS = 12  # of one line in the margin at the right
_FLAT = 1e-6  # a range below this share of the values, or in itself, is float noise
_ROOM = 0.1  # on each side of a flat line at zero


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
    """A card with one panel. `unit` is one of `numbers.format_value`."""

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


@dataclass(frozen=True)
class Drawing:
    """A chart in percent of its frame, ready for the template."""

    chart: Chart
    cropped: str
    y_ticks: list[tuple[float, str]]
    x_ticks: list[tuple[float, str]]
    marks: list[float]
    strokes: list[tuple[str, str, str]]  # SVG paths: kind, color, path
    ends: list[tuple[float, Series]]
    hover: str  # JSON, for the script

    @property
    def legend(self) -> list[Series]:
        return [line for line in self.chart.series if line.style != "thin"]

    @property
    def tick_characters(self) -> int:
        return max((len(text) for _, text in self.y_ticks), default=1)


def draw(chart: Chart) -> Drawing:
    """Return where everything of a chart lies. It must have a series, and each series a point."""
    low, high, cropped = _domain(chart)
    last_x = max(chart.last_x, 1e-9)
    x_of, y_of = _scale(0, last_x), _scale(high, low)
    ticks = _ticks(low, high)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) if ticks else 1.0
    x_ticks = [tick for tick in _ticks(0, last_x) if tick == int(tick)] or [0.0]
    return Drawing(
        chart=chart,
        cropped=cropped,
        y_ticks=[(y_of(tick), _tick_text(tick, step, ticks[-1], chart.unit)) for tick in ticks],
        x_ticks=[(x_of(tick), _short(format_count(tick)) if tick else f"{chart.x_name} 0")
                 for tick in x_ticks if tick <= 0.93 * last_x or tick == last_x],
        marks=[x_of(x) for x in chart.marks],
        strokes=[stroke for line in chart.series for stroke in _strokes(line, x_of, y_of)],
        ends=[] if chart.legend else _ends(chart.series, y_of),
        hover=json.dumps([_hover(line, chart.unit) for line in chart.series],
                         separators=(",", ":")))


def _scale(start: float, end: float) -> Callable[[float], float]:
    """Return the map from [start, end] to percent, rounded to what a screen can show."""
    return lambda value: round(100 * (value - start) / (end - start), 2)


def _domain(chart: Chart) -> tuple[float, float, str]:
    """Return (low, high, note): all values, or all but a start that would flatten the rest."""
    everything = [y for line in chart.series for _, y in line.points]
    settled = [y for line in chart.series for x, y in line.points
               if line.style not in ("trend", "thin") or x > 0.05 * chart.last_x] or everything
    low, high, note = min(everything), max(everything), ""
    if high - low > 1.8 * (max(settled) - min(settled)) and max(settled) > min(settled):
        first = chart.series[0].points[0][1]
        low, high = min(settled), max(settled)
        note = f"Starts at {format_value(first, chart.unit)}, off the frame."
    if chart.from_zero:
        low = min(0.0, low)
    largest = max(abs(high), abs(low))
    if high - low <= _FLAT * (largest if chart.unit == "rate" else max(1.0, largest)):
        # One value: in the middle, with room that means something.
        margin = 0.5 * largest if largest > _FLAT or chart.unit == "rate" and largest else _ROOM
    else:
        margin = 0.08 * (high - low)
    margin = max(margin, 1e-12)  # of denormal numbers
    bottom = low if chart.from_zero and low == 0 else low - margin
    if chart.unit != "share":
        return bottom, high + margin, note
    return max(bottom, min(low, -0.01)), min(high + margin, max(high, 1.01)), note


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round values inside [low, high]."""
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first, last = math.ceil(low / step), math.floor(high / step)
    return [k * step for k in range(first, last + 1)]


def _tick_text(value: float, step: float, largest: float, unit: str) -> str:
    """Return a tick with the digits that tell it from its neighbours, and no more."""
    if unit in ("count", "rate"):
        return _short(format_value(value, unit)).replace(".0e", "e")
    scale = 100 if unit == "share" else 1
    if abs(largest) >= 1e5 or step * scale < 1e-5:
        digits = max(0, math.floor(math.log10(max(abs(largest), step) / step)) + 1)
        text = f"{scale * value:.{min(digits, 4)}e}" if value else "0"
        text = re.sub(r"(\.\d*?)0+e", r"\1e", text).replace(".e", "e")
        text = re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), text)
    else:
        digits = next(d for d in range(12) if abs(round(step * scale, d) - step * scale) < 1e-9)
        text = f"{scale * value:{'+' if unit == 'gain' and value else ''}.{digits}f}"
    return text.replace("-", "−") + ("%" if unit == "share" else "")


def _short(text: str) -> str:
    """Return a count without the zeros that end its fraction: 2.50k -> 2.5k, 10.0k -> 10k."""
    return re.sub(r"\.?0+(?=[kMBT]$)", "", text) if "." in text else text


def _strokes(line: Series, x_of: Callable, y_of: Callable) -> list[tuple[str, str, str]]:
    def path(points: Points) -> str:
        return "M" + "L".join(f"{x_of(x)} {y_of(y)}" for x, y in points)

    if line.style == "baseline":
        return [("base", line.color, path(line.points))]
    if line.style == "dots" or len(line.points) == 1:  # a line of one point is not seen
        dots = "".join(f"M{x_of(x)} {y_of(y)}h0" for x, y in line.points)
        return [("line", line.color, path(line.points)), ("dots", line.color, dots)]
    thin, trend, band = summarize(line.points)
    if line.style == "thin":
        return [("thin", line.color, path(trend))]
    if line.style == "plain":
        return [("line", line.color, path(thin))]
    strokes = [("line", line.color, path(trend))]
    if band:
        outline = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in band[::-1]]
        strokes.insert(0, ("band", line.color, path(outline) + "Z"))
    elif len(trend) > 1:
        strokes.insert(0, ("raw", line.color, path(thin)))
    return strokes


def summarize(points: Points) -> tuple[Points, Points, list[tuple[float, float, float]]]:
    """Return (points to draw, their centered moving mean, min-max band of each point).

    Up to MAX_POINTS points are drawn as they are and have no band; more are averaged in bins of
    equal count, and the band tells what the averages hide.
    """
    band = []
    if len(points) > MAX_POINTS:
        edges = [len(points) * k // MAX_POINTS for k in range(MAX_POINTS + 1)]
        bins = [points[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        points = [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in bins]
        band = [(x, min(y for _, y in b), max(y for _, y in b))
                for (x, _), b in zip(points, bins, strict=True)]
    trend = []
    for k, (x, _) in enumerate(points):
        # The window shrinks at both ends so that the mean stays centered.
        half = min(len(points) // 40, k, len(points) - 1 - k)
        window = points[k - half : k + half + 1]
        trend.append((x, sum(y for _, y in window) / len(window)))
    return points, trend, band


def _ends(series: list[Series], y_of: Callable) -> list[tuple[float, Series]]:
    """Return where the names of the lines stand at their right ends, pushed apart."""
    wanted = []
    for line in series:
        end = summarize(line.points)[1][-1][1] if line.style == "trend" else line.points[-1][1]
        lines = min(2, 1 + len(line.label) // (_LABEL_CHARACTERS + 1))
        wanted.append([min(97.0, max(3.0, y_of(end))), _LABEL_HEIGHT * lines, line])
    wanted.sort(key=lambda item: item[0])
    for above, below in zip(wanted, wanted[1:], strict=False):
        below[0] = max(below[0], above[0] + (above[1] + below[1]) / 2)
    limit = 104.0
    for item in reversed(wanted):
        item[0] = min(item[0], limit - item[1] / 2)
        limit = item[0] - item[1] / 2
    return [(round(top, 2), line) for top, _, line in wanted]


def _hover(line: Series, unit: str) -> dict:
    """Return a line for the script: its points are [x, text of y, y, tokens, seconds]."""
    return {
        "label": line.label, "style": line.style, "color": line.color,
        "points": [[round(x, 4), format_value(y, unit), float(f"{y:.6g}"),
                    *(round(value, 1) for value in (line.clock(x) if line.clock else ()))]
                   for x, y in summarize(line.points)[0]],
    }


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


def groups(runs: list[Run]) -> list[tuple[str, str, int, list[Drawing]]]:
    """Return all charts in groups (title, note, columns, charts). One run: lines by data set and
    baseline; several: one line per run.
    """
    declared = list({metric.key: metric for run in runs for metric in run.metrics}.values())
    several = len(runs) > 1
    rows = "Every logged training step, and the evaluations on fixed held-out sequences."
    found = [
        ("Learning curves", "One color per run." if several else rows, 2,
         _charts([metric for metric in declared if metric.is_loss], runs)),
        ("What was learned", "Measured on held-out sequences, next to the baseline.", 2,
         _charts([metric for metric in declared if not metric.is_loss], runs)),
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


def _charts(metrics: list[Metric], runs: list[Run]) -> list[Drawing]:
    return [_one_run(metric, runs[0]) if len(runs) == 1 else _several(metric, runs)
            for metric in metrics]


def _one_run(metric: Metric, run: Run) -> Drawing:
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
    return draw(Chart(metric.key, metric.title, metric.note, metric.unit, series, headline,
                      last_x=run.last_step, marks=run.resumed_at))


def _several(metric: Metric, runs: list[Run]) -> Drawing:
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
    return draw(Chart(metric.key, metric.title, f"{metric.note} {note}", metric.unit, series,
                      last_x=max(run.last_step for run in runs), legend=True))


def _run_chart(metric: Metric, headline: str, runs: list[Run]) -> list[Drawing]:
    one, factor = len(runs) == 1, 2.0**-30 if metric.unit == "bytes" else 1.0
    series = [Series("" if one else run.name, [(x, factor * y) for x, y in points],
                     "main" if one else f"run{n}", "plain", run.clock)
              for n, run in enumerate(runs) if (points := run.points("train", metric.key))]
    if not series:
        return []
    values = [y for _, y in series[0].points]
    value = max(values) if headline == "Peak" else median(values)
    unit = "number" if metric.unit == "bytes" else metric.unit
    return [draw(Chart(metric.key, metric.title, metric.note, unit, series,
                       format_value(value, unit) if one else "", headline if one else "",
                       from_zero=True, last_x=max(run.last_step for run in runs), legend=True))]


def _baseline(metric: Metric, run: Run) -> list[tuple[float, float]]:
    """Return the baseline of a run's evaluations as a line over the whole width."""
    points = [(record["step"], value) for record in run.evals
              if (value := metric.baseline_of(record)) is not None]
    if not points:
        return []
    return [(0, points[0][1]), *points, (run.last_step, points[-1][1])]
