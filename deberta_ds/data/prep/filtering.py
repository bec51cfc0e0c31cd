"""Try filters on inputs without tokenizing them, and the report of what filters have done."""

import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

from deberta_ds.data.prep.documents import Extent, ReadOptions, units_digest
from deberta_ds.data.prep.filter_rules import FilterRules, function_digests
from deberta_ds.data.prep.filters import REPORT, Filters, Tally
from deberta_ds.data.prep.readers import read_unit
from deberta_ds.data.prep.units import Part, job, run_units
from deberta_ds.files import write_atomic
from deberta_ds.json_files import parse_json, read_json

_TRY_VERSION = 1


def try_filters(
    units: list[list[Extent]], out: str | Path, rules: FilterRules, *, read: ReadOptions,
    workers: int = 1, part: Part = None,
) -> dict | None:
    """Write OUT/filters.json, what these filters would do to the inputs, and return it; None after
    one part of an array of jobs.
    """
    filters_of(rules)  # a bad function or language is said before any work
    description = {"version": _TRY_VERSION, "units": units_digest(units), "read": read.describe(),
                   "filters": describe(rules)}
    with job(out, description, finished=REPORT, part=part) as is_done:
        if not is_done:
            jobs = {f"filter-{number:05d}": (unit, read, rules)
                    for number, unit in enumerate(units)}
            total = Tally(rules.examples)
            done = run_units(out, filter_unit, jobs, workers=workers, label="filter", part=part,
                             keep=lambda result: total.merge(Tally(**result)))
            if done is None:
                return None
            write_report(out, rules, total)
    mend_report(out)
    return read_json(Path(out) / REPORT)


def filter_unit(unit: list[Extent], read: ReadOptions, rules: FilterRules) -> dict:
    """Return the tally of one work unit; unreadable documents are not judged."""
    filters, tally = filters_of(rules), Tally(rules.examples)
    for document in read_unit(unit, read):
        if not document.problem:
            tally.add(document, filters(document))
    return asdict(tally)


def describe(rules: FilterRules) -> dict:
    """Return what ties a job to its filters: all values, and the contents of its functions."""
    return asdict(rules) | {"functions": function_digests(rules)}


def write_report(out: str | Path, rules: FilterRules, total: Tally) -> None:
    """Write OUT/filters.json, `total` being the sum of the units' tallies."""
    report = {"rules": describe(rules), "documents": total.documents[0],
              "characters": total.documents[1], "dropped": dict(sorted(total.dropped.items())),
              "changed": dict(sorted(total.changed.items())),
              "examples": {name: [found[1:] for found in examples]
                           for name, examples in sorted(total.examples.items())}}
    write_atomic(Path(out) / REPORT, _text_of(report))


def mend_report(out: str | Path) -> None:
    """Write OUT/filters.json anew if it is of a version that left half characters as they were;
    who reads it says what else may be wrong with it.
    """
    path = Path(out) / REPORT
    try:
        text = path.read_text("utf-8")
        whole = _text_of(parse_json(text, strict=False))
    except (OSError, ValueError):
        return
    if "\\ud" in text and whole != text:
        write_atomic(path, whole)


def _text_of(report: dict) -> str:
    """Return a report as JSON, halves of surrogate pairs spelled out: no reader takes them."""
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\\\u{ord(half[0]):x}",
                  json.dumps(report, ensure_ascii=False))
    return json.dumps(json.loads(text), indent=1) + "\n"


@cache
def filters_of(rules: FilterRules) -> Filters:
    """Return the filters of this process."""
    return Filters(rules)
