"""The pages of plans, minimal pairs and filters: bars to one scale, tables, samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as checked

from deberta_ds.base.files import write_atomic
from deberta_ds.corpus.filters import REPORT
from deberta_ds.planner.gpus import Gpu
from deberta_ds.planner.plan import RESERVED_BYTES, Choice, recommended
from deberta_ds.report.pages import render
from deberta_ds.report.rundata import READ, read_checked
from deberta_ds.report.tables import Cell, Table

PARTS = (("weights", "main"), ("optimizer", "main-soft"),
         ("forward, backward and update", "second-soft"), ("reserve", "base"))
_SHORT = 0.6  # of a GPU's memory: bars below are not drawn to its scale
_WIDEST = 2.5  # times a GPU's memory: a bar that is longer ends there


def plan_page(title: str, facts: list[str], choices: list[Choice], name: str, gpu: Gpu,
              ranks: int) -> str:
    """Return one self-contained HTML document."""
    best, limit = recommended(choices), gpu.memory
    largest = max(sum(_segments(choice)) for choice in choices)
    scale = min(max(limit, largest), _WIDEST * limit)
    if largest < _SHORT * limit:
        scale = 1.05 * largest  # the card's line is then off the frame, and said in words
    return render(
        "plan.html", title=title, facts=facts, gpu=name.upper(), parts=PARTS,
        best=best and f"ZeRO-{best.stage}, activation checkpointing {best.checkpointing}",
        cost=best and f"{best.days:.1f} days, {best.days * 24 * ranks:,.0f} GPU-hours",
        bars=[(*_bar(choice, scale), _kind(choice, best)) for choice in choices],
        limit=round(100 * limit / scale, 2), limit_text=f"{limit / 1e9:.0f} GB",
        times=f"{limit / largest:.1f}",
        table=_table(choices, ranks, best))


def _segments(choice: Choice) -> list[float]:
    memory = choice.memory
    work = max(memory.work, memory.update)
    return [memory.weights + memory.buffers, memory.optimizer, work, RESERVED_BYTES]


def _kind(choice: Choice, best: Choice | None) -> str:
    return "best" if choice is best else "" if choice.fits else "over"


def _bar(choice: Choice, scale: float) -> tuple[str, list[float], str]:
    """Return (name, widths of the PARTS in percent of the scale, note)."""
    left, widths = 0.0, []
    for size in _segments(choice):
        widths.append(round(min(100 * size / scale, 100 - left), 2))
        left += widths[-1]
    note = f"{sum(_segments(choice)) / 1e9:.1f} GB" + ("" if choice.fits else ", too much")
    return f"ZeRO-{choice.stage}, {choice.checkpointing}", widths, note


def _table(choices: list[Choice], ranks: int, best: Choice | None) -> Table:
    heads = ("Compute / step", "Communication / step", "Step", "Tokens/s", "Days", "GPU-hours")
    rows = []
    for choice in choices:
        kind = _kind(choice, best)
        seconds = (choice.compute_seconds, choice.communication_seconds, choice.step_seconds)
        texts = (*(f"{value:.3f} s" for value in seconds),
                 f"{choice.tokens_per_second:,.0f}", f"{choice.days:.2f}",
                 f"{choice.days * 24 * ranks:,.0f}")
        rows.append([Cell(f"ZeRO-{choice.stage}", kind=f"stage {kind}"),
                     Cell(choice.checkpointing, kind=kind),
                     *(Cell(text, kind=f"n {kind}") for text in texts)])
    head = [Cell("Stage", kind=""), Cell("Checkpointing", kind=""), *map(Cell, heads)]
    note = ("What hides behind computation: under ZeRO-3 all communication, but a step lasts at "
            "least as long as Python takes to gather the weights; under ZeRO-1 and 2 the gradients "
            "but the last bucket, if overlap_comm is true; the new weights never. The rest adds to "
            "the step.")
    return Table("Time", note, head, rows)


# The page of minimal_pairs.json: a bar per phenomenon, with published models and chance.
@dataclass(frozen=True)
class PairBar:
    """One group of pairs: accuracy and interval in percent, and marks of published models."""

    name: str
    value: float
    low: float
    high: float
    marks: list[tuple[str, float]]


def pairs_page(result: dict, titles: dict[str, str], published: dict[str, dict[str, float]]) -> str:
    """Return one self-contained HTML document.

    result: minimal_pairs.json. titles: {scorer: how it is called}. published: {model: {"overall" or
    phenomenon: accuracy}}, empty where none applies.
    """
    charts = [(titles[name], _bars(result["scorers"][name], published))
              for name in result["headlines"]]
    return render("pairs.html", model=result["model"], data=result["data"], charts=charts,
                  pairs=f"{result['pairs']:,}", interval=result["interval"],
                  overall=charts[0][1][0], table=_pairs_table(result, titles, published))


def _bars(scores: dict, published: dict) -> list[PairBar]:
    groups = {"overall": scores} | scores["phenomena"]
    bars = []
    for name, group in groups.items():
        value, low, high = (round(100 * share, 1)
                            for share in (group["accuracy"], *group["interval"]))
        marks = [(model, round(100 * column[name], 1)) for model, column in published.items()]
        bars.append(PairBar(name.replace("_", " "), value, low, high, marks))
    return bars


def _pairs_table(result: dict, titles: dict[str, str], published: dict) -> Table:
    head = [Cell("Phenomenon", kind=""), *(Cell(titles[name]) for name in result["scorers"]),
            *map(Cell, published)]
    rows = []
    for name in ("overall", *next(iter(result["scorers"].values()))["phenomena"]):
        groups = [scores if name == "overall" else scores["phenomena"][name]
                  for scores in result["scorers"].values()]
        rows.append([Cell(name.replace("_", " "), kind=""),
                     *(Cell(f"{100 * group['accuracy']:.1f}") for group in groups),
                     *(Cell(f"{100 * column[name]:.1f}") for column in published.values())])
    return Table("All scorers", "Percent of pairs in which the grammatical sentence has the higher "
                 "score. Chance is 50.", head, rows)


# The page of filters.json: what filters dropped and changed, by reason, with samples.
PAGE = "filters.html"
_SHOWN = 10
_TEXT_CHARACTERS = 600


@checked(config=READ, frozen=True)
class _Report:
    """What the page draws of filters.json."""

    documents: int
    characters: int
    tokens: int
    summary: str
    dropped: dict[str, tuple[int, int, int]]
    changed: dict[str, tuple[int, int]]
    examples: dict[str, list[tuple[str, str]]]
    rules: dict[str, Any]


def write_filters_page(directory: str | Path) -> Path:
    """Write DIRECTORY/filters.html from its filters.json; return its path."""
    report: _Report = read_checked(Path(directory) / REPORT, _Report)[0]
    samples = [(reason, [(place, text[:_TEXT_CHARACTERS] + "…" * (len(text) > _TEXT_CHARACTERS))
                         for place, text in report.examples.get(reason, [])[:_SHOWN]])
               for reason in (*_by_size(report.dropped), *_by_size(report.changed))]
    path = Path(directory) / PAGE
    write_atomic(path, render(
        "filters.html", name=path.parent.resolve().name, summary=report.summary,
        rules=", ".join(map(str, (*report.rules.get("use", []),
                                  *report.rules.get("functions", [])))),
        tables=[table for table in (_dropped(report), _changed(report)) if table.rows],
        samples=[(reason, found) for reason, found in samples if found]))
    return path


def _dropped(report: _Report) -> Table:
    sizes = {"Documents": report.documents, "Characters": report.characters,
             "Tokens": report.tokens}
    rows = [[Cell(reason, kind=""), *(
        cell for count, size in zip(counts, sizes.values(), strict=True) if size
        for cell in (Cell(f"{count:,}", count), Cell(f"{count / size:.2%}")))]
            for reason, counts in _by_size(report.dropped).items()]
    head = [Cell("Reason", kind=""), *(Cell(text) for name, size in sizes.items() if size
                                       for text in (name, "of all"))]
    return Table("Dropped", "Each document under the first rule that rejected it.", head, rows)


def _changed(report: _Report) -> Table:
    rows = [[Cell(change, kind=""), Cell(f"{count:,}", count), Cell(f"{times:,}", times)]
            for change, (count, times) in _by_size(report.changed).items()]
    return Table("Changed", "In documents that stay.",
                 [Cell("Change", kind=""), Cell("Documents"), Cell("Times")], rows)


def _by_size(counts: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1][0], item[0])))
