"""The tables of the page, each a function from a run to HTML; empty when there is no data.

A cell that shows a measured number carries it unrounded in `data-value`.
"""

import json
from html import escape
from typing import Any

from deberta_ds.config import flatten
from deberta_ds.log import format_duration
from deberta_ds.report.charts import value_text
from deberta_ds.report.rundata import Run

MAX_EVAL_ROWS = 12
_QUIET = ("Unigram", "Prior")  # baselines


_Columns = tuple[tuple[str, str, str], ...]  # title, key of metrics.jsonl, unit

_GENERATOR: _Columns = (
    ("Accuracy", "generator_accuracy", "share"), ("Unigram", "unigram_accuracy", "share"),
    ("Loss", "generator_loss", "number"), ("Perplexity", "generator_perplexity", "tenths"),
)  # fmt: skip
_DISCRIMINATOR: _Columns = (
    ("Accuracy", "discriminator_accuracy", "share"), ("Prior", "prior_accuracy", "share"),
    ("Gain", "discriminator_gain", "gain"), ("ROC-AUC", "roc_auc", "number"),
    ("AP", "average_precision", "number"), ("Loss", "discriminator_loss", "number"),
)  # fmt: skip


def comparison(runs: list[Run]) -> str:
    """Return the table that stands in for the tiles when several runs share a page."""
    columns = (
        ("Tokens", "train", "tokens_seen", "count"),
        ("Tokens/s", "train", "tokens_per_second", "count"),
        ("Masked accuracy", "eval", "generator_accuracy", "share"),
        ("Gain over prior", "eval", "discriminator_gain", "gain"),
        ("ROC-AUC", "eval", "roc_auc", "number"),
        ("Average precision", "eval", "average_precision", "number"),
    )
    rows = []
    for number, run in enumerate(runs):
        cells = [_number_cell(run.last(kind, key), unit) for _, kind, key, unit in columns]
        rows.append(
            f'<tr><td><b style="color:var(--run{number})">{escape(run.name)}</b></td>'
            f'<td class="n">{run.last_step:,}</td>{"".join(cells)}</tr>'
        )
    heads = "".join(f'<th class="n">{title}</th>' for title, *_ in columns)
    return _table(f'<tr><th>Run</th><th class="n">Step</th>{heads}</tr>', rows)


def _number_cell(value: float | None, unit: str, kind: str = "n") -> str:
    return f'<td class="{kind}"{_data(value)}>{value_text(value, unit)}</td>'


def _data(value: float | None) -> str:
    return "" if value is None else f' data-value="{value!r}"'


def _table(head: str, rows: list[str], kind: str = "") -> str:
    return (
        f'<div class="card scroll"><table class="{kind}"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def evaluation(run: Run) -> str:
    """Return the table of evaluations: all, or MAX_EVAL_ROWS spread over the run."""
    if not run.evals:
        return ""
    records, count = run.evals, len(run.evals)
    if count > MAX_EVAL_ROWS:
        picks = {round(k * (count - 1) / (MAX_EVAL_ROWS - 1)) for k in range(MAX_EVAL_ROWS)}
        records = [records[k] for k in sorted(picks)]
    columns = _GENERATOR + (_DISCRIMINATOR if run.has_discriminator else ())
    name = "Generator" if run.has_discriminator else "Masked language model"
    groups = f'<th></th><th colspan="{len(_GENERATOR)}" style="color:var(--gen)">{name}</th>'
    if run.has_discriminator:
        groups += (
            f'<th colspan="{len(_DISCRIMINATOR)}" style="color:var(--disc)">Discriminator</th>'
        )
    heads = "".join(f'<th class="n">{title}</th>' for title, *_ in columns)
    rows = []
    for record in records:
        cells = "".join(
            _number_cell(record.get(key), unit, "n quiet" if title in _QUIET else "n")
            for title, key, unit in columns
        )
        last = ' class="last"' if record is records[-1] else ""
        rows.append(f'<tr{last}><td class="n">{record["step"]:,}</td>{cells}</tr>')
    shown = f"{len(records)} of {count} evaluations" if len(records) < count else "All evaluations"
    return (
        f"<h2>Evaluation</h2><p>{shown}, on the same held-out rows and masks every time.</p>"
        + _table(f'<tr class="group">{groups}</tr><tr><th class="n">Step</th>{heads}</tr>', rows)
    )


def superglue(run: Run) -> str:
    """Return the fine-tuning scores: a bar to the median, a whisker over seeds, the majority."""
    if not run.superglue:
        return ""
    rows = []
    for name, task in run.superglue.items():
        median, majority = task["score"]["median"], task["baseline"]
        gain = None if majority is None else median - majority
        tone = "" if gain is None else "up" if gain > 0 else "down"
        failed = f" ({task['failed']} failed)" if task["failed"] else ""
        metrics = ", ".join(task["metrics"]).replace("_", " ")
        rows.append(
            f'<tr><td><b>{escape(name)}</b></td><td class="what">{escape(metrics)}</td>'
            f'<td class="wide">{_bar(task["score"], majority)}</td>{_number_cell(median, "share")}'
            f"{_number_cell(majority, 'share', 'n quiet')}"
            f'<td class="n {tone}">{value_text(gain, "points")}</td>'
            f'<td class="n quiet">{task["seeds"]}{failed}</td></tr>'
        )
    head = (
        '<tr><th>Task</th><th>Metric</th><th>0 to 100%</th><th class="n">Median</th>'
        '<th class="n">Majority</th><th class="n">Difference</th><th class="n">Seeds</th></tr>'
    )
    return (
        "<h2>SuperGLUE</h2><p>Validation scores of the exported model after fine-tuning. The bar "
        "ends at the median over seeds, the thin line spans them, and the upright mark is the "
        "majority class.</p>" + _table(head, rows, "tasks")
    )


def _bar(score: dict[str, float], majority: float | None) -> str:
    # Only the diagnostic AX-b can score below 0 (a correlation); its bar then has no length.
    low, median, high = (100 * max(score[key], 0.0) for key in ("min", "median", "max"))
    mark = "" if majority is None else f'<s style="left:{100 * majority:.2f}%"></s>'
    return (
        f'<div class="track"><i class="done" style="width:{median:.2f}%"></i>'
        f'<i class="spread" style="left:{low:.2f}%;right:{100 - high:.2f}%"></i>{mark}</div>'
    )


def stages(run: Run) -> str:
    """Return the summary table: what each stage did, its result and its time."""
    if not run.summary:
        return ""
    times = [row["seconds"] or 0 for row in run.summary]
    rows = []
    for number, row in enumerate(run.summary, start=1):
        stage, what, result = (escape(str(row[key])) for key in ("stage", "what", "result"))
        seconds = row["seconds"]
        width = 100 * times[number - 1] / (max(times) or 1)
        rows.append(
            f'<tr><td class="stage"><span class="step">{number}</span><b>{stage}</b></td>'
            f'<td class="what">{what}</td><td>{result}</td>'
            f'<td class="n"{_data(seconds)}>{value_text(seconds, "duration")}</td>'
            f'<td class="share"><i class="dur" style="width:{width:.1f}%"></i></td></tr>'
        )
    head = '<tr><th>Stage</th><th>What it did</th><th>Result</th><th class="n">Time</th><th></th>'
    return (
        f"<h2>From raw text to scores</h2><p>{len(rows)} stages in "
        f"{format_duration(sum(times))}.</p>" + _table(head + "</tr>", rows)
    )


def configuration(run: Run) -> str:
    """Return the run config, the machine's side and the software versions, folded away.

    A value that differs from the default is bold and names its origin under the pointer.
    """
    sections = {"Run": {k: v for k, v in run.config.items() if not isinstance(v, dict)}}
    sections |= {_title(k): {k: v} for k, v in run.config.items() if isinstance(v, dict)}
    sections["Environment"] = {k: v for k, v in run.machine.items() if not isinstance(v, dict)}
    sections |= {_title(k): v for k, v in run.machine.items() if isinstance(v, dict)}
    sections["Software versions"] = run.versions
    folds = "".join(_details(name, value, run.origins) for name, value in sections.items() if value)
    return (
        "<h2>Configuration</h2><p>As resolved at the start from presets, file and command line; "
        f'what is not a default is bold.</p><div class="card folds">{folds}</div>'
    )


def _title(name: str) -> str:
    return {"deepspeed": "DeepSpeed"}.get(name, name.replace("_", " ").capitalize())


def _details(title: str, values: dict[str, Any], origins: dict[str, str]) -> str:
    flat = flatten(values)
    prefix = f"{next(iter(values))}." if len(values) == 1 else ""
    names = {key: key.removeprefix(prefix) for key in flat}
    preview = ", ".join(f"{names[key]} {_plain(value)}" for key, value in list(flat.items())[:3])
    rows = ""
    for key, value in flat.items():
        origin = origins.get(key, "default")
        mark = "" if origin == "default" else f' class="set" title="{escape(origin)}"'
        rows += f"<div><dt>{escape(names[key])}</dt><dd{mark}>{escape(_plain(value))}</dd></div>"
    return (
        f"<details><summary>{escape(title)}<small>{escape(preview)}</small></summary>"
        f"<dl>{rows}</dl></details>"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
