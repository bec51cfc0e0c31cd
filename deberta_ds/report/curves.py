"""Which charts a page of runs has: what the objective declares, then what the machine did."""

from dataclasses import dataclass

from deberta_ds.numbers import format_value
from deberta_ds.objectives.base import Metric
from deberta_ds.report.charts import Chart, Drawing, Series, draw
from deberta_ds.report.rundata import Run

# What a run did rather than what it learned: drawn as it is, from zero. The third is its headline.
COURSE = (
    (Metric("tokens_per_second", "Throughput", "Tokens per second.", "count"), "Median"),
    (Metric("learning_rate", "Learning rate", "As scheduled.", "rate"), "Peak"),
    (Metric("grad_norm", "Gradient norm", "Before clipping."), "Median"),
)
_AGREE = 1e-9  # baselines of runs on the same rows


@dataclass(frozen=True)
class Group:
    """A heading with charts below it, in `columns` columns."""

    title: str
    note: str
    columns: int
    charts: list[Drawing]


def groups(runs: list[Run]) -> list[Group]:
    """Return all charts. One run: lines by data set and baseline; several: one line a run."""
    declared = list({metric.key: metric for run in runs for metric in run.metrics}.values())
    several = len(runs) > 1
    rows = "Every logged training step, and the evaluations on fixed held-out rows."
    found = [
        Group("Learning curves", "One line a run." if several else rows, 2,
              _charts([metric for metric in declared if metric.is_loss], runs)),
        Group("What was learned", "Measured on held-out rows, beside what needs no learning.", 2,
              _charts([metric for metric in declared if not metric.is_loss], runs)),
        Group("Course of the run", "What the hardware and the optimizer did.", 3,
              [chart for metric, headline in COURSE for chart in _course(metric, headline, runs)]),
    ]
    return [group for group in found if group.charts]


def color_of(metric: Metric, run: Run) -> str:
    """Return the color of a metric's network; the last one declared is the one that is kept.

    What is measured beside an objective's own scores is measured of that one.
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
        series.append(Series("training", train, soft, "trend"))
    if held_out:
        series.append(Series("held out", held_out, color, "dots"))
    headline = format_value(series[-1].points[-1][1], metric.unit)
    if base := _baseline(metric, run):
        series.append(Series(metric.baseline[0], base, "base", "baseline"))
    return draw(Chart(metric.key, metric.title, metric.note, metric.unit, series, headline,
                      last_x=run.last_step, marks=run.resumed_at, mark_name="resumed"))


def _several(metric: Metric, runs: list[Run]) -> Drawing:
    """One line a run: held-out rows where every run was evaluated, else training rows."""
    having = [(n, run) for n, run in enumerate(runs) if metric in run.metrics]
    kind = "eval" if all(run.points("eval", metric.key) for _, run in having) else "train"
    style = "dots" if kind == "eval" else "trend"
    series = [Series(run.name, points, f"run{n}", style) for n, run in having
              if (points := run.points(kind, metric.key))]
    bases = [(n, base) for n, run in having if (base := _baseline(metric, run))]
    if bases and len({round(base[-1][1] / _AGREE) for _, base in bases}) == 1:
        longest = max((base for _, base in bases), key=lambda base: base[-1][0])
        series.append(Series(metric.baseline[0], longest, "base", "baseline"))
    else:
        series += [Series(f"{metric.baseline[0]}, {runs[n].name}", base, f"run{n}", "baseline")
                   for n, base in bases]
    rows = "Held-out rows." if kind == "eval" else "Training rows."
    return draw(Chart(metric.key, metric.title, f"{metric.note} {rows}", metric.unit, series,
                      last_x=max(run.last_step for run in runs), legend=True))


def _course(metric: Metric, headline: str, runs: list[Run]) -> list[Drawing]:
    series = [Series(run.name if len(runs) > 1 else "", points,
                     f"run{n}" if len(runs) > 1 else "main", "plain")
              for n, run in enumerate(runs) if (points := run.points("train", metric.key))]
    if not series:
        return []
    one = len(runs) == 1
    value = max(y for _, y in series[0].points) if headline == "Peak" else runs[0].middle(
        metric.key)
    return [draw(Chart(metric.key, metric.title, metric.note, metric.unit, series,
                       format_value(value, metric.unit) if one else "", headline if one else "",
                       from_zero=True, last_x=max(run.last_step for run in runs), legend=True))]


def _baseline(metric: Metric, run: Run) -> list[tuple[float, float]]:
    """Return the baseline of a run's evaluations as a line over the whole width."""
    points = [(record["step"], value) for record in run.evals
              if (value := metric.beside(record)) is not None]
    if not points:
        return []
    return [(0, points[0][1]), *points, (run.last_step, points[-1][1])]
