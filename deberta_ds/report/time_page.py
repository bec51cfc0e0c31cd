"""Where the time of runs went, as a bar a run: steps, saves, evaluations, restarts."""

from dataclasses import dataclass

from deberta_ds.base.numbers import format_duration
from deberta_ds.report.rundata import Run

_COLORS = {"steps": "main", "saves": "second", "evaluations": "main-soft",
           "starts and repeated steps": "amber"}
_KEYS = ("seconds", "saves_seconds", "evaluations_seconds", "restarts_seconds")


@dataclass(frozen=True)
class Part:
    """One piece of a bar; `percent` of the whole bar."""

    name: str
    color: str  # name of a CSS variable
    seconds: float
    percent: float
    text: str


@dataclass(frozen=True)
class Bar:
    """The time of one run."""

    name: str
    whole: str
    parts: list[Part]


def bars(runs: list[Run]) -> list[Bar]:
    """Return the bars of the runs that have recorded where their time went."""
    return [bar for run in runs if (bar := _bar(run))]


def _bar(run: Run) -> Bar | None:
    """Return the bar of a run's newest record that says it."""
    records = [record for record in run.train + run.events
               if all(record.get(key) is not None for key in _KEYS)]
    if not records:
        return None
    newest = max(records, key=lambda r: (r["step"], r["seconds"] + r["restarts_seconds"]))
    training, saves, evaluations, restarts = (newest[key] for key in _KEYS)
    values = [training - saves - evaluations, saves, evaluations, restarts]
    whole = sum(values)
    if min(values) < 0 or whole <= 0:  # not what a run writes
        return None
    return Bar(run.name, format_duration(whole), [
        Part(name, color, seconds, round(100 * seconds / whole, 2),
             f"{seconds / whole:.1%}, {format_duration(seconds)}")
        for (name, color), seconds in zip(_COLORS.items(), values, strict=True)])
