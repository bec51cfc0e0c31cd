"""Line charts as HTML: an SVG that stretches to its frame, with the text laid over it as HTML.

Unusual: the SVG keeps no aspect ratio and holds only lines (non-scaling strokes; a dot is a line of
no length with round ends), so text has the same size on a phone, a desk and paper. Coordinates are
percent of the frame. Colors are CSS variables, so one chart serves the light and the dark page.
"""

import json
import math
import re
from dataclasses import dataclass
from html import escape

from deberta_ds.log import format_count, format_duration
from deberta_ds.report.rundata import Points

MAX_POINTS = 240  # more than the pixels of a small card can tell apart
_LABEL_GAP = 9.0  # percent of the frame's height between two labels at the right


@dataclass(frozen=True)
class Series:
    """One line; `style` is trend (values behind their moving mean), plain, dots or baseline."""

    label: str
    points: Points
    color: str  # name of a CSS variable
    style: str


@dataclass(frozen=True)
class Chart:
    """A card with one panel. `unit` is one of `value_text`."""

    key: str
    title: str
    note: str
    unit: str
    series: list[Series]
    from_zero: bool = False


def value_text(value: float | None, unit: str) -> str:
    """Return a number as people write it, by its unit (HTML; a dash when there is none).

    number 3.412, tenths 1,204.5, share 74.2%, gain +0.0213, points +2.31 pts, count 12.4k,
    rate 5.0e-4, duration 3m 05s.
    """
    if value is None:
        return "&ndash;"
    if unit == "tenths":
        return f"{value:,.1f}"
    if unit == "duration":
        return format_duration(value)
    if unit == "share":
        return f"{100 * value:.1f}%"
    if unit == "gain":
        return f"{value:+.4f}".replace("-", "&minus;")
    if unit == "points":
        return f"{100 * value:+.2f}".replace("-", "&minus;") + " pts"
    if unit == "count":
        return format_count(value)
    if unit == "rate":
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e&minus;{abs(int(exponent))}" if value else "0"
    return f"{value:.3f}"


def draw(chart: Chart, resumed_at: list[int], last_step: int, digits: str) -> str:
    """Return the card of a chart as HTML; `digits` is its headline number, ready to show."""
    low, high, cropped = _domain(chart, last_step)
    x_of = _scale(0, max(last_step, 1))
    y_of = _scale(high, low)
    marks = [
        f'<line class="resume" x1="{x_of(step)}" x2="{x_of(step)}" y1="0" y2="100"/>'
        for step in resumed_at
    ]
    ticks = _ticks(low, high)
    grid = "".join(f'<line class="grid" x1="0" x2="100" y1="{y_of(t)}" y2="{y_of(t)}"/>'
                   for t in ticks)  # fmt: skip
    lines = "".join(_draw_series(series, x_of, y_of) for series in chart.series)
    overlay = _axis_text(chart, ticks, last_step, x_of, y_of)
    overlay += _end_labels(chart.series, y_of)
    overlay += "".join(
        f'<span class="resume-label" style="left:{x_of(step)}%">resumed</span>'
        for step in resumed_at[:1]
    )
    note = escape(chart.note) + (f" {cropped}" if cropped else "")
    hover = [_hover(series, chart.unit, x_of, y_of) for series in chart.series]
    return (
        f'<figure class="card chart" data-chart="{chart.key}">'
        f'<figcaption><div><h3>{escape(chart.title)}</h3><p>{note}</p></div>'
        f'<b class="now">{digits}</b></figcaption>'
        f"<div class=\"plot\" data-hover='{escape(json.dumps(hover))}'>"
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(chart.title)}">{grid}{"".join(marks)}{lines}</svg>'
        f'{overlay}<i class="cross"></i><div class="tip"></div></div></figure>'
    )


def _scale(start: float, end: float):
    """Return the map from [start, end] to percent, rounded to what a screen can show."""
    return lambda value: round(100 * (value - start) / (end - start), 2)


def _domain(chart: Chart, last_step: int) -> tuple[float, float, str]:
    """Return (low, high, note): all values, or all but a start that would flatten the rest."""
    everything = [y for series in chart.series for _, y in series.points]
    settled = [
        y for series in chart.series for x, y in series.points
        if series.style != "trend" or x > 0.05 * last_step
    ] or everything  # fmt: skip
    low, high, note = min(everything), max(everything), ""
    if high - low > 1.8 * (max(settled) - min(settled)) and max(settled) > min(settled):
        first = chart.series[0].points[0][1]
        low, high = min(settled), max(settled)
        text = value_text(first, chart.unit)
        note = f'<span class="crop">Starts at {text}, off the frame.</span>'
    if chart.from_zero:
        low = min(0.0, low)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if chart.from_zero and low == 0 else low - margin), high + margin, note


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round values inside [low, high]."""
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def _tick_text(value: float, step: float, unit: str) -> str:
    if unit in ("count", "rate"):
        return _short(value_text(value, unit)).replace(".0e", "e")
    scale = 100 if unit == "share" else 1
    digits = next(d for d in range(12) if abs(round(step * scale, d) - step * scale) < 1e-9)
    text = f"{scale * value:{'+' if unit == 'gain' and value else ''}.{digits}f}"
    return text.replace("-", "&minus;") + ("%" if unit == "share" else "")


def _axis_text(chart: Chart, ticks: list[float], last_step: int, x_of, y_of) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) if ticks else 1.0
    parts = [
        f'<span class="y" style="top:{y_of(tick)}%">{_tick_text(tick, step, chart.unit)}</span>'
        for tick in ticks
    ]
    whole = sorted({round(tick) for tick in _ticks(0, max(last_step, 1))})
    for tick in whole:
        if tick <= 0.93 * last_step or tick == last_step:
            text = _short(format_count(tick)) if tick else "step 0"
            parts.append(f'<span class="x" style="left:{x_of(tick)}%">{text}</span>')
    return "".join(parts)


def _short(text: str) -> str:
    """Return a count without the zeros that end its fraction: 2.50k -> 2.5k, 10.0k -> 10k."""
    return re.sub(r"\.?0+(?=[kMBT]$)", "", text) if "." in text else text


def _draw_series(series: Series, x_of, y_of) -> str:
    def path(points: Points) -> str:
        return "M" + "L".join(f"{x_of(x)} {y_of(y)}" for x, y in points)

    style = f'style="stroke:var(--{series.color})"'
    if series.style == "baseline":
        return f'<path class="base" {style} d="{path(series.points)}"/>'
    if series.style == "dots":
        dots = "".join(f"M{x_of(x)} {y_of(y)}h0" for x, y in series.points)
        return (
            f'<path class="line" {style} d="{path(series.points)}"/>'
            f'<path class="dots" {style} d="{dots}"/>'
        )
    thin, trend, band = summarize(series.points)
    if series.style == "plain":
        return f'<path class="line" {style} d="{path(thin)}"/>'
    behind = f'<path class="raw" {style} d="{path(thin)}"/>'
    if band:
        outline = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in band[::-1]]
        behind = (
            f'<path class="band" style="fill:var(--{series.color})" d="{path(outline)}Z"/>'
        )
    return (behind if len(trend) > 1 else "") + f'<path class="line" {style} d="{path(trend)}"/>'


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
        band = [
            (x, min(y for _, y in b), max(y for _, y in b))
            for (x, _), b in zip(points, bins, strict=True)
        ]
    trend = []
    for k, (x, _) in enumerate(points):
        # The window shrinks at both ends so that the mean stays centered.
        half = min(len(points) // 40, k, len(points) - 1 - k)
        window = points[k - half : k + half + 1]
        trend.append((x, sum(y for _, y in window) / len(window)))
    return points, trend, band


def _end_labels(series: list[Series], y_of) -> str:
    """Return the names of the lines at their right ends, pushed apart where they would touch."""
    wanted = []
    for line in series:
        end = summarize(line.points)[1][-1][1] if line.style == "trend" else line.points[-1][1]
        wanted.append([min(97.0, max(3.0, y_of(end))), line])
    wanted.sort(key=lambda item: item[0])
    for above, below in zip(wanted, wanted[1:], strict=False):
        below[0] = max(below[0], above[0] + _LABEL_GAP)
    limit = 100.0
    for item in reversed(wanted):
        item[0] = min(item[0], limit)
        limit = item[0] - _LABEL_GAP
    return "".join(
        f'<span class="end" style="top:{top:.2f}%;color:{_label_color(line)}" '
        f'title="{escape(line.label)}">{escape(line.label)}</span>'
        for top, line in wanted
    )


def _label_color(line: Series) -> str:
    # A soft line color is too pale for text.
    return "var(--muted)" if line.color.endswith("-soft") else f"var(--{line.color})"


def _hover(series: Series, unit: str, x_of, y_of) -> dict:
    points = summarize(series.points)[0]
    return {
        "label": series.label,
        "color": series.color,
        "points": [[x_of(x), f"{x:,.0f}", value_text(y, unit)] for x, y in points],
    }
