"""Filters between reading and tokenizing: which documents go, why, and what is changed in the rest.

Each document passes the rules of `filter_rules.FilterRules` in their order; the first that rejects
it names the reason. Rules see the raw text, with its lines. What a corpus lost is counted by reason
and kept in filters.json, with a sample of the documents: those with the smallest hashes of their
texts, so that it does not depend on the number of workers.
"""

import heapq
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import xxhash

from deberta_ds.base.command_line import find
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json, write_atomic
from deberta_ds.base.user_code import OwnCodeError, call, digest, load, short_name
from deberta_ds.corpus import quality
from deberta_ds.corpus.documents import Document, Extent, ReadOptions, bad_files_of
from deberta_ds.corpus.encode import add_up, token_count
from deberta_ds.corpus.filter_rules import FilterRules, language_of
from deberta_ds.corpus.quality import Text, find_personal, without_lines
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.units import Part, check_unchanged, extents_of, identified, job, run_units
from deberta_ds.tokenizer import Tokenizer

REPORT = "filters.json"
_SHOWN_CHARACTERS, _LINE_CHARACTERS = 2000, 60


class Verdict(NamedTuple):
    """What the filters make of a document: its text and label, or the reason why it goes."""

    text: str
    reason: str = ""
    changes: dict[str, int] = {}  # {what was taken out or masked: how often}
    label: str = ""


class Filters:
    """The rules of a filters file, ready to be applied in this process."""

    def __init__(self, rules: FilterRules):
        """UserError for a function that cannot be loaded."""
        changing = {"language": _language, "lines": _lines, "personal": _personal}
        self._steps: list[Callable[[Verdict], Verdict]] = [
            partial(changing[name], getattr(rules, name)) if name in changing else
            partial(_judge, name, getattr(quality, name), getattr(rules, name))
            for name in rules.use]
        self._steps += [partial(_apply_function, load("functions", name, ("text",)),
                                short_name(name)) for name in rules.functions]

    def __call__(self, document: Document) -> Verdict:
        verdict = Verdict(document.text, label=document.label)
        for step in self._steps:
            try:
                verdict = step(verdict)
            except OwnCodeError as error:
                raise UserError(f"{document.place()}: {error}") from error.__cause__
            if verdict.reason:
                return verdict
        return verdict


def _judge(name: str, rule, rules, verdict: Verdict) -> Verdict:
    reason = rule(_text(verdict.text), rules)
    return verdict._replace(reason=f"{name}: {reason}") if reason else verdict


_text = lru_cache(maxsize=1)(Text)  # the rules of a document share its words and lines


def _language(rules, verdict: Verdict) -> Verdict:
    code, probability = language_of(verdict.text[:rules.characters])
    if rules.keep and code not in rules.keep:
        return verdict._replace(reason=f"language: {code}")
    if probability < rules.probability:
        return verdict._replace(reason="language: not sure")
    return verdict._replace(label=verdict.label or code) if rules.label else verdict


def _lines(rules, verdict: Verdict) -> Verdict:
    text, gone = without_lines(verdict.text, rules)
    if gone and not text.strip():
        return verdict._replace(reason="lines: none left")
    return _changed(verdict, text, {f"line: {why}": count for why, count in gone.items()})


def _personal(rules, verdict: Verdict) -> Verdict:
    text, found = find_personal(verdict.text, rules.kinds)
    if found and rules.action == "drop":
        return verdict._replace(reason=f"personal: {next(iter(found))}")
    return _changed(verdict, text, {f"masked: {kind}": count for kind, count in found.items()})


def _apply_function(function, name: str, verdict: Verdict) -> Verdict:
    text = call(function, name, verdict.text)
    if text is None:
        return verdict._replace(reason=f"function: {name}")
    if not isinstance(text, str):
        raise OwnCodeError(f"{name} returned {type(text).__name__}; it must return the text to "
                           "keep, or None")
    return _changed(verdict, text, {f"changed by {name}": 1})


def _changed(verdict: Verdict, text: str, changes: dict[str, int]) -> Verdict:
    return verdict if text == verdict.text else verdict._replace(
        text=text, changes=verdict.changes | changes)


@dataclass
class Tally:
    """What the filters did: counts by reason, and documents as examples.

    dropped {reason: [documents, characters, tokens]}; changed {change: [documents, how often]};
    examples {reason: [[order, place, text], ...]}, those of the smallest order.
    """

    most: int
    documents: list[int] = field(default_factory=lambda: [0, 0, 0])  # characters, tokens: of all
    dropped: dict[str, list[int]] = field(default_factory=dict)
    changed: dict[str, list[int]] = field(default_factory=dict)
    examples: dict[str, list[list]] = field(default_factory=dict)

    def judged(self, document: Document, rules: FilterRules, counter: Tokenizer | None) -> Verdict:
        """Return what the rules make of a document, and count it, in tokens if there is a `counter`
        of those; one that cannot be read is dropped as such.
        """
        verdict = filters_of(rules)(document) if not document.problem else Verdict(
            "", "unreadable (verify.py says why)")
        sizes = (1, len(document.text), token_count(counter, document.text) if counter else 0)
        self.documents = list(map(sum, zip(self.documents, sizes, strict=True)))
        if verdict.reason:
            add_up(self.dropped, {verdict.reason: sizes})
            self._keep(verdict.reason, document)
        elif verdict.changes:
            add_up(self.changed, {change: (1, times) for change, times in verdict.changes.items()})
            self._keep(next(iter(verdict.changes)), document)
        return verdict

    def merge(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        self.documents = list(map(sum, zip(self.documents, other.documents, strict=True)))
        add_up(self.dropped, other.dropped)
        add_up(self.changed, other.changed)
        for name, found in other.examples.items():
            self.examples[name] = heapq.nsmallest(self.most, self.examples.get(name, []) + found)

    def _keep(self, name: str, document: Document) -> None:
        order = xxhash.xxh3_64_intdigest(document.text.encode(errors="surrogatepass"))
        found = self.examples.setdefault(name, [])
        if len(found) < self.most or found and order < found[-1][0]:
            found.append([order, document.offset(), document.text[:_SHOWN_CHARACTERS]])
            self.examples[name] = heapq.nsmallest(self.most, found)


# Try filters on inputs without tokenizing them, and the report of what filters have done.
_TRY_VERSION = 2


def try_filters(planned: list[list[Extent]], out: str | Path, rules: FilterRules, *,
                read: ReadOptions, workers: int = 1, part: Part = None,
                tokenizer: Tokenizer | None = None) -> dict | None:
    """Write what the filters would do to OUT/filters.json and return it; None for a part. Tokens
    are counted if there is a tokenizer.
    """
    filters_of(rules)  # a bad function or language is said before any work
    units = identified(planned, out, part)
    description = {"version": _TRY_VERSION, "read": asdict(read), "filters": describe(rules),
                   "tokenizer": tokenizer.sha256 if tokenizer else ""}
    with job(out, description, finished=REPORT, part=part, units=units) as is_done:
        if not is_done:
            jobs = {name: (unit, read, rules, tokenizer) for name, unit in units.items()}
            total = Tally(rules.examples)
            run_units(out, filter_unit, jobs, workers=workers, label="filter", part=part,
                      keep=lambda result: total.merge(Tally(**result)))
            if part:
                return None
            check_unchanged(extents_of(units.values()))
            write_report(out, rules, total, bad_files_of(planned))
    return read_json(Path(out) / REPORT)


def filter_unit(unit: list[Extent], read: ReadOptions, rules: FilterRules,
                counter: Tokenizer | None) -> dict:
    """Return the tally of one work unit."""
    tally = Tally(rules.examples)
    for document in read_unit(unit, read):
        tally.judged(document, rules, counter)
    return asdict(tally)


def describe(rules: FilterRules) -> dict:
    """Return what ties a job to its filters: all values, and the contents of its functions."""
    return asdict(rules) | {"functions": [f"{Path(name).name} {digest('functions', name)}"
                                          for name in rules.functions]}


def write_report(out: str | Path, rules: FilterRules, total: Tally,
                 bad_files: Mapping[str, str]) -> None:
    """Write OUT/filters.json, `total` being the sum of the units' tallies."""
    sizes = dict(zip(("documents", "characters", "tokens"), total.documents, strict=True))
    # Halves of surrogate pairs are spelled out: no reader takes them.
    examples = {name: [[place, text.encode(errors="backslashreplace").decode()]
                       for _, place, text in found]
                for name, found in sorted(total.examples.items())}
    report = {"rules": describe(rules), "summary": _summary(total, sizes), **sizes,
              "dropped": dict(sorted(total.dropped.items())),
              "changed": dict(sorted(total.changed.items())), "examples": examples,
              "bad_files": dict(bad_files)}
    write_atomic(Path(out) / REPORT, json.dumps(report, indent=1) + "\n")


def report_lines(report: dict, samples: int = 2) -> list[str]:
    """Return a filters.json for a console: what was dropped and changed, the most first."""
    lines, sizes = [], ("documents", "characters", "tokens")
    by_size = [sorted(report[kind].items(), key=lambda item: (-item[1][0], item[0]))
               for kind in ("dropped", "changed")]
    for reason, counts in itertools.chain(*by_size):
        if len(counts) == len(sizes):
            found = [f"{count:>12,} {count / report[what]:6.2%} of {what}"
                     for what, count in zip(sizes, counts, strict=True) if report[what]]
        else:
            found = [f"{counts[0]:>12,} documents changed, {counts[1]:,} times"]
        lines.append(" ".join([*found, f" {reason}"]))
        lines += [f"{'':14}{place}: {text[:_LINE_CHARACTERS]!r}"
                  for place, text in report["examples"].get(reason, [])[:samples]]
    return lines


def _summary(total: Tally, sizes: dict[str, int]) -> str:
    """Return how much was dropped, and which filters file suits the language of most of it."""
    gone = map(sum, zip([0, 0, 0], *total.dropped.values(), strict=True))
    shares = [f"{part:,} of {size:,} {what} ({part / size:.1%})"
              for part, (what, size) in zip(gone, sizes.items(), strict=True) if size]
    text = f"{', '.join(shares) or '0 documents'} dropped"
    for reason, (count, *_) in total.dropped.items():
        code = reason.removeprefix("language: ")
        if code != reason and count * 2 > sizes["documents"] and code != "not sure":
            preset = f"data_prep/filters/web_{code}.toml"
            if not find(preset).is_file():
                preset = "data_prep/filters/any_language.toml"
            text += f". Most are in another language ({code}): use --filters {preset}"
    return text


filters_of = cache(Filters)  # of this process
