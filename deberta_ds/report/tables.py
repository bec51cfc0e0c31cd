"""The tables of the pages, each a function to a Table; None when there is no data."""

import json
from dataclasses import dataclass
from typing import Any

from deberta_ds.base.numbers import format_duration, format_value
from deberta_ds.config.toml_files import flatten
from deberta_ds.objectives.base import Metric
from deberta_ds.report.charts import color_of
from deberta_ds.report.facts import cost, header
from deberta_ds.report.rundata import Run, Stage, baseline_name
from deberta_ds.tracking.records import corpora_of

MAX_EVAL_ROWS = 12
MAX_DIFFERENCES = 40
_LARGEST_READABLE = 10**15  # whole numbers beyond stand for "never"


@dataclass(frozen=True)
class Cell:
    """Text, and the measured number behind it, unrounded."""

    text: str
    value: float | None = None
    kind: str = "n"  # CSS classes; n: a number, at the right
    color: str = ""  # name of a CSS variable
    span: int = 1
    below: str = ""  # a second line, in gray: the baseline
    below_value: float | None = None


@dataclass(frozen=True)
class Table:
    """A heading, a sentence, and cells. `groups` is a row above the column titles."""

    title: str
    note: str
    head: list[Cell]
    rows: list[list[Cell]]
    groups: list[Cell] | None = None
    last_is_bold: bool = False


def number(value: float | None, unit: str, kind: str = "n") -> Cell:
    return Cell(format_value(value, unit), value, kind)


def comparison(runs: list[Run], price: float | None = None) -> Table:
    """Return the table that stands in for the tiles when several runs share a page."""
    declared = list({metric.key: metric for run in runs for metric in run.metrics
                     if metric.in_tile}.values())
    head = ["State", "Step", "Tokens", "Tokens/s", "Time", *["Cost"] * (price is not None),
            *(m.title for m in declared)]
    rows = []
    for n, run in enumerate(runs):
        cells = [Cell(run.name, kind="name", color=f"run{n}"), Cell(header(run).state, kind="what"),
                 Cell(f"{run.last_step:,}", run.last_step),
                 number(run.last("tokens_seen"), "count"),
                 number(run.middle("tokens_per_second"), "count"),
                 number(run.training_seconds(), "duration")]
        if price is not None:
            paid = cost(run, price)[1]
            cells.append(Cell(f"{paid:,.2f}", paid))
        scores = run.scores if run.evals else {}
        rows.append(cells + [number(scores.get(m.key), m.unit) for m in declared])
    return Table("", "", [Cell("Run", kind=""), Cell(head[0], kind=""), *map(Cell, head[1:])], rows)


def differences(runs: list[Run]) -> Table | None:
    """Return the settings in which the runs differ, apart from their names."""
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values)
            if key not in ("name", "out_dir")
            and len({_plain(values.get(key)) for values in flat}) > 1]
    if not keys:
        return None
    rows = [[Cell(key, kind="what"), *(Cell(_plain(values.get(key, "–")), kind="code")
                                       for values in flat)] for key in keys[:MAX_DIFFERENCES]]
    head = [Cell("Setting", kind=""), *(Cell(run.name, kind="", color=f"run{n}")
                                        for n, run in enumerate(runs))]
    more = len(keys) - MAX_DIFFERENCES
    return Table("What differs", "The settings in which these runs are not alike"
                 + (f"; {more} more are not shown." if more > 0 else "."), head, rows)


def evaluation(run: Run) -> Table | None:
    """Return the table of evaluations: all, or MAX_EVAL_ROWS spread over the run."""
    if not run.evals:
        return None
    records, count = run.evals, len(run.evals)
    if count > MAX_EVAL_ROWS:
        picks = {round(k * (count - 1) / (MAX_EVAL_ROWS - 1)) for k in range(MAX_EVAL_ROWS)}
        records = [records[k] for k in sorted(picks)]
    head, groups, shown_metrics = [], [Cell("", kind="")], []
    for network in dict.fromkeys(metric.network for metric in run.metrics):
        metrics = [metric for metric in run.metrics if metric.network == network]
        shown_metrics += metrics
        head += [Cell(metric.short_title, below=baseline_name(metric)) for metric in metrics]
        groups.append(Cell(network, kind="", span=len(metrics), color=color_of(metrics[0], run)))
    rows = [[Cell(f"{record['step']:,}", record["step"]),
             *(_beside_baseline(metric, record) for metric in shown_metrics)]
            for record in records]
    shown = f"{len(records)} of {count} evaluations" if len(records) < count else "All evaluations"
    return Table("Evaluation", f"{shown}, on the same held-out sequences and masks every time; in "
                 "gray, the baseline.", [Cell("Step"), *head], rows, groups, True)


def evaluation_by_corpus(run: Run) -> Table | None:
    """Return the last evaluation's scores of each held-out corpus, where a run has several."""
    names = corpora_of(run.scores)
    if not names:
        return None
    metrics = [metric for metric in run.metrics if f"{metric.key}/{names[0]}" in run.scores]
    rows = []
    for name in names:
        record = {key.removesuffix(f"/{name}"): value for key, value in run.scores.items()
                  if key.endswith(f"/{name}")}
        rows.append([Cell(name, kind="name"),
                     *(_beside_baseline(metric, record) for metric in metrics)])
    head = [Cell(metric.title, below=baseline_name(metric)) for metric in metrics]
    return Table("By held-out corpus", "The last evaluation, each corpus of data.heldout alone.",
                 [Cell("Corpus", kind=""), *head], rows)


def _beside_baseline(metric: Metric, record: dict) -> Cell:
    baseline = metric.baseline_of(record)
    return Cell(format_value(record.get(metric.key), metric.unit), record.get(metric.key),
                below="" if baseline is None else format_value(baseline, metric.unit),
                below_value=baseline)


def stages(run: Run) -> tuple[str, list[tuple[Stage, Cell, float]]]:
    """Return (how many and how long, each with its time and percent of the longest one's)."""
    times = [stage.seconds or 0.0 for stage in run.stages]
    longest = max(times, default=0.0) or 1.0
    rows = [(stage, number(stage.seconds or None, "duration"), round(100 * seconds / longest, 1))
            for stage, seconds in zip(run.stages, times, strict=True)]
    return f"{len(rows)} stages in {format_duration(sum(times))}.", rows


# A section of the configuration: title, preview, (key, value, origin if it is not a default).
Fold = tuple[str, str, list[tuple[str, str, str]]]


def configuration(run: Run) -> list[Fold]:
    """Return the run config, the machine's side and the software versions."""
    sections = {"Run": {k: v for k, v in run.config.items() if not isinstance(v, dict)}}
    sections |= {_title(k): {k: v} for k, v in run.config.items() if isinstance(v, dict)}
    sections["Environment"] = {k: v for k, v in run.rest.items() if not isinstance(v, dict)}
    sections |= {_title(k): v for k, v in run.rest.items() if isinstance(v, dict)}
    sections["Software versions"] = run.saved.versions
    return [_fold(title, values, run.saved.origins) for title, values in sections.items() if values]


def _title(name: str) -> str:
    return {"deepspeed": "DeepSpeed"}.get(name, name.replace("_", " ").capitalize())


def _fold(title: str, values: dict[str, Any], origins: dict[str, str]) -> Fold:
    flat = flatten(values)
    prefix = f"{next(iter(values))}." if len(values) == 1 else ""
    names = {key: key.removeprefix(prefix) for key in flat}
    origin = {key: origins.get(key, "default") for key in flat}
    telling = [key for key in flat if origin[key] != "default"] if flat.keys() & origins.keys() \
        else list(flat)
    telling.sort(key=lambda key: isinstance(flat[key], list))  # sources are long
    preview = ", ".join(f"{names[key]} {_plain(flat[key])}" for key in telling[:3])
    return title, preview or "all defaults", [
        (names[key], _plain(value), "" if origin[key] == "default" else origin[key])
        for key, value in flat.items()]


def _plain(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= _LARGEST_READABLE:
        return f"{value:.3g}"
    return value if isinstance(value, str) and value else json.dumps(value)
