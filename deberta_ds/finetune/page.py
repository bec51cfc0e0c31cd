"""A sweep as one self-contained HTML page: scores over seeds, curves, confusion matrices, settings.

Plain SVG written here, so the page needs no script and no network.
"""

from collections.abc import Mapping, Sequence
from html import escape

from deberta_ds.finetune.tasks import MAIN_TASKS, task_named
from deberta_ds.report.style import CSS

_OWN_CSS = """
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;padding:6px 18px 10px}.scroll table{width:100%}
.scroll th{font-size:12px;font-weight:600;color:var(--muted);text-align:left;padding:9px 10px}
.scroll td{padding:8px 10px;border-top:1px solid var(--line);white-space:nowrap}
.scroll .n{text-align:right}.quiet{color:var(--muted)}.wide{min-width:230px;width:38%}
.task{padding:18px 20px;margin-bottom:16px}.task h3{font-size:16px;margin-bottom:2px}
.task>p{color:var(--muted);font-size:13px}
.parts{display:flex;flex-wrap:wrap;gap:14px 34px;align-items:flex-start;margin-top:12px}
.parts>div{min-width:0}.parts h4{font-size:12px;font-weight:600;color:var(--muted);margin:0 0 6px}
.matrix td{width:74px;height:38px;text-align:center;border:1px solid var(--line);font-size:14px}
.matrix th{font-size:11.5px;font-weight:500;color:var(--muted);padding:3px 8px;text-align:right}
.matrix .top{text-align:center}
details{margin-top:12px;font-size:12.5px;color:var(--muted)}summary{cursor:pointer}
details code{display:block;margin-top:6px;line-height:1.6;white-space:normal}
svg{display:block;max-width:100%}svg text{font-size:11px;fill:var(--muted)}
.legend{font-size:12.5px;color:var(--muted);padding:0 10px 10px}
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 150, 34, 22


def render(results: Mapping, compare: Mapping | None = None) -> str:
    """Return the page of a sweep's results.json (and, beside it, of `compare`)."""
    tasks = results["tasks"]
    count = results["mean_of"]
    what = "the leaderboard's rule" if count == len(MAIN_TASKS) else f"{count} of 8 tasks"
    rows = "".join(_row(name, row, _runs(results, name), compare) for name, row in tasks.items())
    beside = '<th class="n">Beside</th>' if compare else ""
    legend = "Each dot is one seed, the bar their median; the gray tick is the majority baseline"
    if compare:
        legend += f", the hollow dot the median of {escape(compare['model'])}"
    cards = "".join(_card(name, row, _runs(results, name)) for name, row in tasks.items())
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>SuperGLUE</title>
<style>{CSS}{_OWN_CSS}</style></head><body><main>
<p class="eyebrow">SuperGLUE, validation</p><h1>{_percent(results["mean"])}</h1>
<p class="lead">Mean of the task medians ({what}), model <b>{escape(results["model"])}</b>.
The evaluation that was kept was chosen on this same validation set, so the numbers are optimistic;
the test sets are scored by the leaderboard alone.</p>
<div class="card"><div class="scroll"><table><tr><th>Task</th><th>Metric</th><th>0 to 100</th>
<th class="n">Median</th><th class="n">Min</th><th class="n">Max</th><th class="n">Majority</th>
{beside}<th class="n">Failed</th></tr>{rows}</table></div><p class="legend">{legend}.</p></div>
<h2>Tasks</h2><p>Validation score by epoch for every seed, and the confusion matrix of the seed
with the median score.</p>{cards}</main></body></html>
"""


def _runs(results: Mapping, name: str) -> list[Mapping]:
    return [run for run in results["runs"] if run["task"] == name]


def _percent(value: float | None) -> str:
    return "&ndash;" if value is None else f"{100 * value:.1f}"


def _row(name: str, row: Mapping, runs: Sequence[Mapping], compare: Mapping | None) -> str:
    other = compare["tasks"].get(name) if compare else None
    beside = other["score"]["median"] if other else None
    cells = [_percent(row["score"][key]) for key in ("median", "min", "max")]
    cells.append(_percent(row["baseline"]))
    if compare:
        cells.append(_percent(beside))
    cells.append(f"{row['failed']} of {row['seeds']}")
    metrics = " / ".join(row["metrics"]).replace("_", " ")
    line = (f"<tr><td><b>{name}</b></td><td class='quiet'>{metrics}</td>"
            f"<td class='wide'>{_dots(runs, row, beside)}</td>"
            + "".join(f"<td class='n'>{cell}</td>" for cell in cells) + "</tr>")  # fmt: skip
    for diagnostic, values in row["diagnostics"].items():
        text = ", ".join(f"{metric.replace('_', ' ')} {_percent(value['median'])}"
                         for metric, value in values.items())  # fmt: skip
        line += (f"<tr><td><b>{diagnostic}</b></td><td class='quiet' colspan='{2 + len(cells)}'>"
                 f"by the {name} models, medians: {text}</td></tr>")  # fmt: skip
    return line


def _dots(runs: Sequence[Mapping], row: Mapping, beside: float | None) -> str:
    def x(value: float) -> float:
        return round(8 + 284 * max(0.0, min(1.0, value)), 1)

    parts = ["<line x1='8' x2='292' y1='12' y2='12' stroke='var(--line)' stroke-width='2'/>"]
    if row["baseline"] is not None:
        at = x(row["baseline"])
        parts.append(f"<line x1='{at}' x2='{at}' y1='3' y2='21' stroke='var(--base)' "
                     "stroke-width='3'/>")  # fmt: skip
    if beside is not None:
        parts.append(f"<circle cx='{x(beside)}' cy='12' r='5' fill='none' stroke='var(--gen)' "
                     "stroke-width='2'/>")  # fmt: skip
    for run in runs:
        color = "var(--bad)" if run["failed"] else "var(--disc)"
        parts.append(f"<circle cx='{x(run['score'])}' cy='12' r='4' fill='{color}' "
                     "fill-opacity='.55'/>")  # fmt: skip
    at = x(row["score"]["median"])
    parts.append(f"<line x1='{at}' x2='{at}' y1='4' y2='20' stroke='var(--disc)' "
                 "stroke-width='2'/>")  # fmt: skip
    return f"<svg viewBox='0 0 300 24' width='300' role='img'>{''.join(parts)}</svg>"


def _card(name: str, row: Mapping, runs: Sequence[Mapping]) -> str:
    ordered = sorted(runs, key=lambda run: run["score"])
    median = ordered[(len(ordered) - 1) // 2]
    medians = ", ".join(f"{metric.replace('_', ' ')} {_percent(value['median'])}"
                        for metric, value in row["metrics"].items())  # fmt: skip
    failed = f"; {row['failed']} of {row['seeds']} runs failed" if row["failed"] else ""
    parts = [f"<div><h4>Score by epoch</h4>{_curves(name, row, runs)}</div>"]
    if "confusion" in median:
        parts.append(f"<div><h4>Predictions of seed {median['seed']}</h4>"
                     f"{_matrix(name, median['confusion'])}</div>")  # fmt: skip
    settings = ", ".join(f"{key} = {value}" for key, value in median["settings"].items())
    return (f"<section class='card task'><h3>{name}</h3><p>Medians: {medians}{failed}.</p>"
            f"<div class='parts'>{''.join(parts)}</div>"
            f"<details><summary>Settings</summary><code>{escape(settings)}</code></details>"
            "</section>")  # fmt: skip


def _curves(name: str, row: Mapping, runs: Sequence[Mapping]) -> str:
    metrics = task_named(name).metrics
    lines = [
        [(entry["epoch"], sum(entry[key] for key in metrics) / len(metrics))
         for entry in run["history"]]
        for run in runs
    ]  # fmt: skip
    values = [value for line in lines for _, value in line]
    if not values:
        return "<p>no evaluation was reached</p>"
    base = row["baseline"]
    shown = values + ([base] if base is not None else [])
    low, high = max(0.0, min(shown) - 0.03), min(1.0, max(shown) + 0.03)
    last = max(epoch for line in lines for epoch, _ in line)

    def point(epoch: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 8) * epoch / last
        y = 6 + (_HEIGHT - _BOTTOM - 6) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = []
    for value in (low, (low + high) / 2, high):
        y = point(0, value).split(",")[1]
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - 8}' y1='{y}' y2='{y}' "
                     f"stroke='var(--grid)'/><text x='{_LEFT - 6}' y='{float(y) + 4}' "
                     f"text-anchor='end'>{100 * value:.0f}</text>")  # fmt: skip
    if base is not None:
        start, end = point(0, base), point(last, base)
        parts.append(f"<polyline points='{start} {end}' stroke='var(--base)' "
                     "stroke-dasharray='4 4' fill='none'/>")  # fmt: skip
    for number, line in enumerate(lines):
        points = " ".join(point(*at) for at in line)
        parts.append(f"<polyline points='{points}' fill='none' stroke='var(--run{number % 5})' "
                     "stroke-width='1.8' stroke-linejoin='round'/>")  # fmt: skip
        for at in line:
            x, y = point(*at).split(",")
            parts.append(f"<circle cx='{x}' cy='{y}' r='2.2' fill='var(--run{number % 5})'/>")
    parts.append(f"<text x='{_WIDTH - 8}' y='{_HEIGHT - 4}' text-anchor='end'>epoch {last:g}</text>"
                 f"<text x='{_LEFT}' y='{_HEIGHT - 4}'>0</text>")  # fmt: skip
    return (f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' role='img'>"
            f"{''.join(parts)}</svg>")  # fmt: skip


def _matrix(name: str, counts: Sequence[Sequence[int]]) -> str:
    labels = task_named(name).labels
    head = "".join(f"<th class='top'>{escape(label)}</th>" for label in labels)
    rows = ""
    for label, row in zip(labels, counts, strict=True):
        total = max(sum(row), 1)
        cells = "".join(
            f"<td style='background:color-mix(in srgb,var(--disc) {60 * count // total}%,"
            f"transparent)'>{count}</td>"
            for count in row
        )
        rows += f"<tr><th>{escape(label)}</th>{cells}</tr>"
    return (f"<table class='matrix'><tr><th>gold \\ predicted</th>{head}</tr>{rows}</table>")
