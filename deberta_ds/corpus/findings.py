"""Documents that a search has found and tokenize_corpus shall leave out: duplicates, contamination.

They are named by input file and place in it (byte offset or row), with the states of the inputs and
the options that divide them into documents, so any subset of the inputs can be tokenized, in any
units, and findings of other documents are rejected.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic, xxh3
from deberta_ds.corpus.documents import Document, Extent, ReadOptions, bad_files_of
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.units import Units, check_unchanged, extents_of
from deberta_ds.data.corpus import map_array
from deberta_ds.data.shards import MANIFEST, check_file, read_checked, save_array
from deberta_ds.tokenizer.text import TEXT_RULES_VERSION, TO_UTF8, BadTextError, normalize

FINDINGS_VERSION = 4
FOUND = np.dtype([("file", "<u4"), ("where", "<u8")])
_MERGED_AT_ONCE = 1 << 20
_COUNTS = {"duplicate": {"documents", "exact", "near"},
           "contaminated": {"documents", "contaminated"}}
_AGAIN = "run that search again, into a new directory"
_OPTIONS_THAT_DIVIDE = ("documents", "text_key", "max_document_bytes", "extract_html")


@dataclass(frozen=True)
class _Manifest:
    """What the manifest of findings holds, and as what."""

    reason: Literal["duplicate", "contaminated"]
    text_rules: int
    inputs: dict[str, tuple[str, dict[str, Any]]]  # source: its state, how it was divided
    files: dict[str, tuple[int, str]]  # name: size and xxh3
    counts: dict[str, int]


class Findings:
    """What one search has found.

    Attributes: directory, content_hash (hex) of it all, reason: why they go, counts: of documents
    and findings.
    """

    def __init__(self, directory: str | Path):
        """UserError if `directory` holds none, or damaged ones."""
        self.directory = Path(directory)
        self._manifest, self.content_hash = read_checked(
            directory, _Manifest, FINDINGS_VERSION, "not finished", "run data_prep/dedup.py or "
            "data_prep/decontaminate.py to the end, or again into a new directory")
        self.reason, self.counts = self._manifest.reason, self._manifest.counts
        if missing := _COUNTS[self.reason] - self.counts.keys():
            raise UserError(f"{self.directory / MANIFEST}: damaged manifest (counts.{min(missing)}"
                            f" is missing); {_AGAIN}")
        for name, (size, digest) in self._manifest.files.items():
            check_file(self.directory / f"{name}.npy", size, digest, _AGAIN)
        self._numbers = {source: number for number, source in enumerate(self._manifest.inputs)}
        self._starts = map_array(self.directory / "starts.npy")
        self._places = map_array(self.directory / "places.npy")

    def check(self, extents: Iterable[Extent], read: ReadOptions) -> None:
        """UserError unless these inputs, as they are, were searched with the same options."""
        path, inputs = self.directory / MANIFEST, self._manifest.inputs
        same_rules = self._manifest.text_rules == TEXT_RULES_VERSION
        for extent in extents:
            state, then = inputs.get(extent.source, ("", {}))
            if state != extent.state:
                what = "changed since" if extent.source in inputs else "not among the inputs of"
                raise UserError(f"{extent.path}: {what} the search in {self.directory}; {_AGAIN}")
            if then != (now := _dividing(extent.read or read)) or not same_rules:
                raise UserError(f"{path}: found with other reading options, {then}, where now they "
                                f"are {now}; {_AGAIN}")

    def has(self, source: str, where: int) -> bool:
        """Return whether the document at `where` of an input was found."""
        number = self._numbers[source]
        low, high = int(self._starts[number]), int(self._starts[number + 1])
        index = bisect_left(self._places, where, low, high)
        return index < high and int(self._places[index]) == where


def read_normalized(unit: list[Extent], read: ReadOptions, counts: dict
                   ) -> Iterator[tuple[Document, str]]:
    """Yield the documents of a unit and their normalized texts; `counts` says how many `documents`
    there were, how many of them `unreadable`, and where and why the first of these was (`problem`).
    """
    counts |= {"documents": 0, "unreadable": 0, "problem": ""}
    for document in read_unit(unit, read):
        counts["documents"] += 1
        if document.problem:
            counts["unreadable"] += 1
            counts["problem"] = counts["problem"] or f"{document.offset()}: {document.problem}"
        text = ""
        with suppress(BadTextError):  # tokenize_corpus will complain, as of an unreadable document
            text = normalize(document.text)
        yield document, text


def check_any_read(counts: list[dict]) -> None:
    """UserError if all of the documents are unreadable, by what `read_normalized` says of units."""
    documents, unreadable = (sum(one[key] for one in counts) for key in ("documents", "unreadable"))
    if documents == unreadable > 0:
        problem = next(one["problem"] for one in counts if one["problem"])
        remedy = f"; {TO_UTF8}" * ("invalid UTF-8" in problem)
        raise UserError(f"none of {documents:,} documents can be read; {problem}{remedy}")


def number_of(extents: Iterable[Extent]) -> dict[str, int]:
    """Return {source: its number} of inputs: among all of them, or those of one unit."""
    sources = dict.fromkeys(extent.source for extent in extents)
    return {source: number for number, source in enumerate(sources)}


def finish_findings(out: Path, units: Units, read: ReadOptions, reason: str, counts: dict) -> None:
    """Write the manifest, which completes the findings; what the units have saved is merged."""
    check_unchanged(extents := extents_of(units.values()))
    sums = {name: [(out / f"{name}.npy").stat().st_size, xxh3(out / f"{name}.npy")]
            for name in ("starts", "places")}
    inputs = {extent.source: (extent.state, _dividing(extent.read or read)) for extent in extents}
    manifest = {"version": FINDINGS_VERSION, "reason": reason,
                "text_rules": TEXT_RULES_VERSION, "inputs": inputs, "files": sums,
                "bad_files": bad_files_of([extents]), "counts": counts}
    write_atomic(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _dividing(read: ReadOptions) -> dict:
    return {name: getattr(read, name) for name in _OPTIONS_THAT_DIVIDE}


def save_found(out: str, name: str, found: np.ndarray) -> None:
    """Write which documents a unit has found (FOUND), ordered by (file, place in it)."""
    order = np.lexsort((found["where"], found["file"]))
    save_array(Path(out) / "found" / f"{name}.npy", found[order])


def merge_found(out: Path, kind: str, num_files: int,
                numbers: Mapping[str, list[int]] | None = None) -> int:
    """Write starts.npy i64[files + 1] and places.npy u64: the places of file f, sorted, are
    places[starts[f] : starts[f + 1]]. Return how many. Memory: 36 bytes for each.

    `numbers`: {what a unit has saved: the number of each of its files}, where it knows its own.
    """
    found, pending = np.zeros(0, FOUND), []
    for path in sorted((out / "found").glob(f"{kind}*.npy")):
        part = np.array(map_array(path))
        if numbers:
            part["file"] = np.array(numbers[path.stem])[part["file"]]
        pending.append(part)
        if sum(map(len, pending)) > max(len(found), _MERGED_AT_ONCE):  # most are found many times
            found, pending = np.unique(np.concatenate([found, *pending])), []
    found = np.unique(np.concatenate([found, *pending]))
    counts = np.bincount(found["file"], minlength=num_files)
    save_array(out / "starts.npy", np.concatenate([[0], np.cumsum(counts)]).astype("<i8"))
    save_array(out / "places.npy", found["where"])
    return len(found)
