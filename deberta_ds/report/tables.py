"""The tables of the pages, each a function to a Table (None when there is no data), and the top of
a run's page: its state, what was learned in a sentence, and the numbers to know.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from deberta_ds.base.files import flatten
from deberta_ds.base.numbers import counted, format_count, format_duration, format_value
from deberta_ds.base.user_code import short_name
from deberta_ds.objectives.base import Metric
from deberta_ds.report.charts import color_of
from deberta_ds.report.rundata import Run, baseline_name
from deberta_ds.tracking.log import corpora_of

_TOLD = {"save": ("checkpoint saved", "checkpoints saved"),
         "skip": ("update skipped", "updates skipped"), "rollback": ("rollback", "rollbacks"),
         "overflow": ("fp16 overflow", "fp16 overflows")}
_NUMBER = re.compile(r"(?<![\w-])([+−-]?\d[\d,]*(?:\.\d+)?\s?%?)")
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
    """Return the cell of a number in `unit` (deberta_ds/base/numbers.py)."""
    return Cell(format_value(value, unit), value, kind)


def comparison(runs: list[Run], price: float | None = None) -> Table:
    """Return the table that stands in for the tiles when several runs share a page."""
    declared = list({metric.key: metric for run in runs for metric in run.metrics
                     if metric.in_tile}.values())
    head = ["State", "Step", "Tokens", "Tokens/s", "Time", *["Cost"] * (price is not None),
            *(m.title for m in declared)]
    rows = []
    for n, run in enumerate(runs):
        cells = [Cell(run.name, kind="name", color=f"run{n}"), Cell(_state(run)[0], kind="what"),
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
    last = run.evals[-1] if run.evals else {}  # data.heldout may have been another before
    names = corpora_of(last)
    if not names:
        return None
    metrics = [metric for metric in run.metrics if f"{metric.key}/{names[0]}" in last]
    rows = []
    for name in names:
        record = {key.removesuffix(f"/{name}"): value for key, value in last.items()
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


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page; `value` is the measured one, unrounded."""

    key: str
    title: str
    text: str
    note: str
    value: float | None = None
    tone: str = ""  # up, down or none
    is_name: bool = False


def header(run: Run) -> dict[str, Any]:
    """Return where a run stands; `tone` is good, wait, quiet or bad, and `lead` what was learned in
    a sentence, in which text and numbers alternate.
    """
    state, tone = _state(run)
    counts = {kind: sum(event["event"] == kind for event in run.events) for kind in _TOLD}
    return {"state": state, "tone": tone, "lead": _NUMBER.split(_sentence(run)),
            "failure": run.events[-1].get("detail", "") if state == "Failed" else "",
            "history": ", ".join(f"{count:,} {_TOLD[kind][count != 1]}"
                                 for kind, count in counts.items() if count or kind == "save"),
            "resumed": _resumed(run)}


def _state(run: Run) -> tuple[str, str]:
    """Return what the run is doing, and how good that is: green only if something was learned."""
    last = run.events[-1]["event"] if run.events else ""
    if last == "stop":
        return "Stopped", "wait"
    if last == "fail":
        return "Failed", "bad"
    if last != "end":
        return ("In progress", "wait") if run.is_running else ("Interrupted", "bad")
    compared = [ahead for metric in run.metrics
                if (ahead := ahead_of_baseline(metric, run.scores)) is not None]
    if not compared:
        return "Finished, not evaluated" if not run.evals else "Finished", "quiet"
    if not any(compared):
        return "Finished, but nothing was learned", "bad"
    if not all(compared):
        return "Finished, partly at its baselines", "wait"
    return "Finished", "good"


def ahead_of_baseline(metric: Metric, scores: dict[str, float]) -> bool | None:
    """Return whether a score is better than the baseline; None: not known, or noise."""
    score, baseline = scores.get(metric.key), metric.baseline_of(scores)
    if score is None or baseline is None:
        return None
    if metric.noise and abs(score - baseline) <= metric.noise:
        return None
    return metric.is_better(score, baseline)


def _sentence(run: Run) -> str:
    if not run.evals:
        return "Not evaluated yet: the curves below show training steps only."
    # A hyphen at which no line breaks, as in ROC-AUC.
    return re.sub(r"(?<=[A-Z])-(?=[A-Z])", "\u2011", run.objective.headline(run.scores))


def _resumed(run: Run) -> str:
    """Return "resumed at step 30 (twice), 60": each place once."""
    steps = [event["step"] for event in run.events if event["event"] == "resume"]
    times = {step: steps.count(step) for step in run.resumed_at}
    often = {1: "", 2: " (twice)"}
    places = [f"{step:,}{often.get(count, f' ({count} times)')}" for step, count in times.items()]
    if len(places) > 4:
        return f"resumed {len(steps)} times, last at step {run.resumed_at[-1]:,}"
    return f"resumed at step {', '.join(places)}" if places else ""


def tiles(run: Run, price: float | None = None) -> list[Tile]:
    """Return the model, the work done, what was learned, and what it cost."""
    learned = [_learned(metric, run) for metric in run.metrics if metric.in_tile]
    size = run.saved.parameters
    parameters = Tile("parameters", "Parameters", format_value(size, "count"),
                      f"vocabulary of {run.saved.run.model.vocab_size:,}", size)
    return [_model(run), parameters, _tokens(run), _speed(run), *learned, *_costs(run, price)]


def _learned(metric: Metric, run: Run) -> Tile:
    value = run.scores.get(metric.key)
    baseline, ahead = metric.baseline_of(run.scores), ahead_of_baseline(metric, run.scores)
    note = "held out" if baseline is None else \
        f"{baseline_name(metric)} {format_value(baseline, metric.unit)}"
    tone = "" if ahead is None else "up" if ahead else "down"
    return Tile(metric.key, metric.title, format_value(value, metric.unit), note, value, tone)


def _model(run: Run) -> Tile:
    shape, objective = run.saved.run.model, run.saved.run.objective
    note = (f"{shape.num_layers:,} layers · {shape.hidden_size:,} hidden · "
            f"{shape.num_heads:,} heads")
    names = [short_name(objective.kind).upper()]
    if len({m.network for m in run.objective.METRICS}) > 1:
        names.append(objective.embedding_sharing.upper())
    return Tile("model", "Model", " + ".join(names), note, is_name=True)


def _tokens(run: Run) -> Tile:
    tokens, rows, epochs = (run.last(key) for key in ("tokens_seen", "sequences_seen", "epochs"))
    notes = [f"{rows:,.0f} packed sequences"] if rows is not None else []
    if epochs is not None:
        notes.append(f"{epochs:.2f} epochs")
    return Tile("tokens_seen", "Tokens seen", format_value(tokens, "count"), " · ".join(notes),
                tokens)


def _speed(run: Run) -> Tile:
    speed, share, flops = (run.middle(key)
                           for key in ("tokens_per_second", "mfu", "flops_per_second"))
    note = "tokens/s, median"
    if share is not None:
        note += f" · {share:.1%} of peak FLOP/s"
    elif flops is not None:
        note += f" · {format_count(flops / 1e9)} GFLOP/s"
    return Tile("tokens_per_second", "Throughput", format_value(speed, "count"), note, speed)


def cost(run: Run, price: float) -> tuple[float, float]:
    """Return (hours of all ranks that were paid for, starts and repeated steps too; their cost)."""
    lost = run.time_use.get("starts and repeated steps", 0.0) * run.world_sizes()[-1]
    hours = (run.rank_seconds() + lost) / 3600
    return hours, hours * price


def _costs(run: Run, price: float | None) -> list[Tile]:
    """Return time, cost, machine and source; memory and goodput where they were measured."""
    seconds, sizes = run.training_seconds(), run.world_sizes()
    of = "GPU" if run.saved.device == "cuda" else "rank"
    ranks = (f"{sizes[0]:,} to " if len(sizes) > 1 else "") + counted(sizes[-1], of)
    hours = run.rank_seconds() / 3600
    note = f"{ranks} · {hours:,.{2 if hours < 10 else 0}f} {of}-hours"
    found = [Tile("seconds", "Training time", format_duration(seconds), note, seconds)]
    if price is not None:
        paid, whole = cost(run, price)
        found.append(Tile("cost", "Cost", f"{whole:,.2f}", f"{paid:,.2f} {of}-hours at {price:g}, "
                          "starts and repeated steps included", whole))
    if run.saved.hardware:
        found.append(Tile("hardware", "Hardware", run.saved.hardware, ranks, is_name=True))
    if peaks := [value for _, value in run.points("train", "peak_memory_bytes")]:
        found.append(Tile("peak_memory_bytes", "Peak memory", format_value(max(peaks), "bytes"),
                          "of the first rank", max(peaks)))
    if whole := sum(run.time_use.values()):
        share = run.time_use["steps"] / whole
        found.append(Tile("goodput", "Goodput", format_value(share, "share"),
                          "of its jobs' time went into steps that count", share))
    return found
