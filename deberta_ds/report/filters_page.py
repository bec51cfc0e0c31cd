"""The page of filters.json: what filters dropped and changed, by reason, with samples."""

from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from deberta_ds.data.prep.filtering import mend_report
from deberta_ds.data.prep.filters import REPORT
from deberta_ds.files import write_atomic
from deberta_ds.report.pages import render
from deberta_ds.report.reading import READ, read_checked
from deberta_ds.report.tables import Cell, Table

PAGE = "filters.html"
_SHOWN = 10
_TEXT_CHARACTERS = 600


@dataclass(config=READ, frozen=True)
class _Report:
    """What the page draws of filters.json."""

    documents: int
    characters: int
    dropped: dict[str, tuple[int, int]]
    changed: dict[str, tuple[int, int]]
    examples: dict[str, list[tuple[str, str]]]
    rules: dict[str, Any]


def write_filters_page(directory: str | Path) -> Path:
    """Write DIRECTORY/filters.html from its filters.json; return its path."""
    mend_report(directory)
    report, _ = read_checked(Path(directory) / REPORT, _Report)
    path = Path(directory) / PAGE
    write_atomic(path, filters_page(report, Path(directory).resolve().name))
    return path


def filters_page(report: _Report, name: str) -> str:
    """Return the page as one HTML document."""
    gone, characters = (sum(counts[part] for counts in report.dropped.values()) for part in (0, 1))
    samples = [(reason, [(place, text[:_TEXT_CHARACTERS] + "…" * (len(text) > _TEXT_CHARACTERS))
                         for place, text in report.examples.get(reason, [])[:_SHOWN]])
               for reason in (*_by_size(report.dropped), *_by_size(report.changed))]
    return render(
        "filters.html", name=name, documents=f"{report.documents:,}", dropped=f"{gone:,}",
        share=f"{gone / max(report.documents, 1):.1%}",
        characters=f"{characters / max(report.characters, 1):.1%}",
        rules=", ".join(map(str, (*report.rules.get("use", []),
                                  *report.rules.get("functions", [])))),
        tables=[table for table in (_dropped(report), _changed(report)) if table.rows],
        samples=[(reason, found) for reason, found in samples if found])


def _dropped(report: _Report) -> Table:
    rows = [[Cell(reason, kind=""), Cell(f"{count:,}", count),
             Cell(f"{count / max(report.documents, 1):.2%}"),
             Cell(f"{size / max(report.characters, 1):.2%}")]
            for reason, (count, size) in _by_size(report.dropped).items()]
    head = [Cell("Reason", kind=""), Cell("Documents"), Cell("of all"), Cell("of all characters")]
    return Table("Dropped", "Each document under the first rule that refused it.", head, rows)


def _changed(report: _Report) -> Table:
    rows = [[Cell(change, kind=""), Cell(f"{count:,}", count), Cell(f"{times:,}", times)]
            for change, (count, times) in _by_size(report.changed).items()]
    return Table("Changed", "In documents that stay.",
                 [Cell("Change", kind=""), Cell("Documents"), Cell("Times")], rows)


def _by_size(counts: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1][0], item[0])))
