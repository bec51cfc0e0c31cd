"""Documents -> token shards, one work unit at a time."""

import bisect
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from itertools import compress
from operator import attrgetter
from pathlib import Path

import numpy as np
import xxhash

from deberta_ds.base.errors import UserError, tell
from deberta_ds.base.files import link
from deberta_ds.base.user_code import OwnCodeError
from deberta_ds.corpus import encode
from deberta_ds.corpus.documents import Document, Extent, ReadOptions, bad_files_of
from deberta_ds.corpus.encode import COUNTS, Cleaner, CleanOptions, add_up
from deberta_ds.corpus.filter_rules import FilterRules
from deberta_ds.corpus.filters import Tally, describe, filters_of, write_report
from deberta_ds.corpus.findings import Findings
from deberta_ds.corpus.origins import DIRECTORY, OriginWriter, write_origins_manifest
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.units import (
    MARKERS,
    Part,
    check_unchanged,
    extents_of,
    identified,
    job,
    run_units,
)
from deberta_ds.data import shards
from deberta_ds.data.shards import MANIFEST, Manifest, ShardInfo, read_manifest
from deberta_ds.tokenizer import Tokenizer, unknown_tokens
from deberta_ds.tokenizer.segmented import SegmentedTokenizer
from deberta_ds.tokenizer.text import TEXT_RULES_VERSION

SHARD_TOKENS = 1 << 27
FOLDERS = {"tokens": ".npy", "ends": ".npy", DIRECTORY: ".parquet"}
JOB_VERSION = 3


def tokenize_corpus(planned: list[list[Extent]], out: str | Path, tokenizer: Tokenizer, *,
                    read: ReadOptions, clean: CleanOptions, heldout_out: str | Path | None = None,
                    heldout_share: float = 0.0, drop_heldout: bool = False,
                    leave_out: Sequence[str] = (), filters: FilterRules | None = None,
                    words: str = "", workers: int = 1, part: Part = None) -> dict[str, Manifest]:
    """Write the corpus `out` (and the held-out one) and return {directory: manifest}; {} after one
    part of an array of jobs.

    `leave_out`: directories of findings over these inputs (and others). A document is held out by a
    hash of its text, so the split does not depend on its place; with `drop_heldout` such documents
    are left out and no held-out corpus is written. With `filters`, what they did is written to
    OUT/filters.json. `words`: FILE.py:NAME, which says where words start (tokenizer/segmented.py).
    """
    targets = [str(out)] + ([str(heldout_out)] if heldout_out else [])
    _check_heldout(targets, heldout_share, drop_heldout)
    if tokenizer.lost:
        tell(f"note: {tokenizer.path}: has no subword for {tokenizer.lost} and none for what is "
             "unknown, so these are left out of the text")
    share = heldout_share if heldout_out or drop_heldout else 0.0
    units = identified(planned, out, part)
    searches = [Findings(directory) for directory in leave_out]
    for search in searches:
        search.check(extents_of(units.values(), part), read)
    if filters:
        filters_of(filters)  # a bad function or language is said before any work
    if words:
        tokenizer = SegmentedTokenizer(tokenizer, words)
    description = _description(tokenizer, read, clean, share, drop_heldout, searches, filters)
    with ExitStack() as stack:
        finished = [stack.enter_context(job(target, description, finished=MANIFEST, part=part,
                                            other=Path(out), units=units))
                    for target in reversed(targets)]
        if not all(finished):
            work = [f"{out}/{MARKERS}/{side}" for side in range(len(targets))]
            found = [(search.directory, search.content_hash) for search in searches]
            jobs = {name: (name, unit, work, tokenizer, read, clean, share, found, filters)
                    for name, unit in units.items()}
            total = Tally(filters.examples) if filters else None

            def keep(result: dict) -> dict:
                if total:  # each unit's tally has many texts
                    total.merge(Tally(**result.pop("filters")))
                return result

            results = run_units(out, tokenize_unit, jobs, workers=workers, label="tokenize",
                                part=part, keep=keep)
            if part:
                return {}
            problems = [line for result in results for line in result["problems"]]
            encode.check_problems(problems, sum(one["counts"]["bad"] for one in results), clean)
            for line in problems:
                tell(f"left out: {line}")
            check_unchanged(extents_of(units.values()))
            for name, content_hash in found:  # they may have been read from for hours
                _findings.__wrapped__(name, content_hash)
            if filters and total:
                write_report(out, filters, total, bad_files_of(planned))
            results = _publish(results, work, targets)
            _write_manifests(results, targets, tokenizer, bad_files_of(planned))
    return {target: read_manifest(target)[0] for target in targets}


def _publish(results: list[dict], work: list[str], targets: list[str]) -> list[dict]:
    """Link what the units have written to where it belongs, under names that begin with the number
    of the unit; return the results with these names.
    """
    for target, folder in itertools.product(targets, FOLDERS):
        shutil.rmtree(Path(target, folder), ignore_errors=True)
    renamed = []
    for number, result in enumerate(results):
        for side, written in enumerate(result["shards"]):
            for (folder, suffix), shard in itertools.product(FOLDERS.items(), written):
                name = f"{number:05d}-{shard['name'].partition('-')[2]}{suffix}"
                link(Path(work[side], folder, shard["name"] + suffix),
                     Path(targets[side], folder, name))
        renamed.append(json.loads(re.sub('"[0-9a-f]{32}-', f'"{number:05d}-', json.dumps(result))))
    return renamed


def _description(tokenizer: Tokenizer, read: ReadOptions, clean: CleanOptions, share: float,
                 drop_heldout: bool, searches: list[Findings], filters: FilterRules | None) -> dict:
    """Return what an earlier run's parts must have been made with to be kept."""
    description = {
        "version": JOB_VERSION, "tokenizer": tokenizer.sha256, "read": asdict(read),
        "clean": asdict(clean) | {"max_bad": 0},  # decides at the end: a higher one goes on
        "text_rules": "tokenizer's own" if tokenizer.normalizes_itself else TEXT_RULES_VERSION,
        "heldout_share": share, "drop_heldout": drop_heldout,
        "leave_out": [search.content_hash for search in searches]}
    return description | ({"filters": describe(filters)} if filters else {}) | (
        {"words": tokenizer.words} if tokenizer.words else {})


def _check_heldout(targets: list[str], share: float, drop: bool) -> None:
    places = [Path(os.path.realpath(target)) for target in targets]
    if len(set(places)) < len(places):
        raise UserError(f"{targets[0]}: given for the corpus and for the held-out one; give two "
                        "directories")
    if (places[1:] or drop) and not 0 < share < 1:
        raise UserError(f"held-out share {share}: must be between 0 and 1, and 0.01 is one of a "
                        "hundred documents")
    if places[1:] and places[0] in places[1].parents:
        raise UserError(f"{targets[1]}: inside of {targets[0]}, which is a corpus of its own; put "
                        "the held-out one next to it")
    if places[1:] and drop:
        raise UserError("held-out documents are either written or dropped; choose one")


def tokenize_unit(name: str, unit: list[Extent], targets: list[str], tokenizer: Tokenizer,
                  read: ReadOptions, clean: CleanOptions, heldout_share: float,
                  leave_out: list[tuple[Path, str]], filters: FilterRules | None = None) -> dict:
    """Write the shards of one unit; return their ShardInfos, counts and named problems."""
    tally = Tally(filters.examples) if filters else None
    # A tokenizer of rules of its own is given the raw text: then often nobody asks for this one.
    is_read = not tokenizer.normalizes_itself or bool(
        heldout_share or clean.min_characters > 1 or clean.min_letter_share)
    cleaner = Cleaner(clean, is_read)
    counts = cleaner.counts
    with ExitStack() as stack:
        writers = [_Rolling(target, name, tokenizer, counts) for target in targets]
        for writer in writers:
            stack.callback(writer.abandon)
        for documents in encode.batches(_wanted(unit, read, leave_out, filters, tally, counts,
                                                getattr(tokenizer, "plain", tokenizer))):
            texts = cleaner.texts(documents)
            sides = [int(is_held_out(text, heldout_share)) if text else None for text in texts
                     ] if heldout_share or not all(texts) else []
            if tokenizer.normalizes_itself:
                # Line ends that part the documents of a text file belong to neither.
                parting = "" if read.documents == "file" else "\r\n"
                texts = [document.text.strip(parting) for document in documents]
            if not sides:
                writers[0].write(texts, documents)
                continue
            if len(writers) == 1:
                counts["held_out"] += sides.count(1)
            for side, writer in enumerate(writers):
                chosen = [found == side for found in sides]
                writer.write(list(compress(texts, chosen)), list(compress(documents, chosen)))
        if tokenizer.normalizes_itself:
            counts["removed_characters"] = 0  # removed from what was looked at, not from the text
        infos = [[asdict(shard) for shard in writer.finish()] for writer in writers]
    return {"shards": infos, "labels": [writer.labels for writer in writers],
            "origins": [writer.origins for writer in writers], "counts": counts,
            "unknown_tokens": sum(writer.unknown_tokens for writer in writers),
            "problems": cleaner.problems} | ({"filters": asdict(tally)} if tally else {})


def _wanted(unit: list[Extent], read: ReadOptions, leave_out: list[tuple[Path, str]],
            filters: FilterRules | None, tally: Tally | None, counts: dict[str, int],
            tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the documents of one unit but those that searches found or filters drop."""
    searches = [_findings(*found) for found in leave_out]
    documents = read_unit(unit, read)
    if not searches and not filters:
        yield from documents
        return
    for document in documents:
        reason = next((search.reason for search in searches if search.has(
            document.path, document.where)), "")
        if not reason and filters and tally and not document.problem:
            verdict = tally.judged(document, filters, tokenizer)
            reason = "filtered" if verdict.reason else ""
            document = document._replace(text=verdict.text, label=verdict.label)
        if reason:
            counts[reason] += 1
        else:
            yield document


def is_held_out(text: str, share: float) -> bool:
    """Return whether a document belongs to the held-out part: a function of its text alone."""
    return xxhash.xxh3_64_intdigest(text.encode()) < share * 2**64


def _write_manifests(results: list[dict], targets: list[str], tokenizer: Tokenizer,
                     bad_files: Mapping[str, str]) -> None:
    tokens = 0
    for side, target in reversed(list(enumerate(targets))):
        write_origins_manifest(target, {
            name: file for result in results for name, file in result["origins"][side].items()},
            bad_files)
        infos = tuple(ShardInfo(**info) for result in results for info in result["shards"][side])
        labels: dict[str, list[int]] = {}
        for result in results:
            add_up(labels, result["labels"][side])
        counts = {name: sum(result["counts"][name] for result in results) for name in COUNTS}
        counts |= {"documents": sum(shard.documents for shard in infos),
                   "characters": sum(row[1] for row in labels.values()),
                   "tokens": sum(shard.tokens for shard in infos)}
        tokens += counts["tokens"]
        counts |= {"bad_files": len(bad_files)} if bad_files else {}
        shards.write_manifest(target, Manifest(
            dtype=shards.token_dtype(tokenizer.stored_size).str, vocab_size=tokenizer.size,
            tokenizer_sha256=tokenizer.sha256, special_ids=tokenizer.special_ids, counts=counts,
            labels=dict(sorted(labels.items())), shards=infos, words=tokenizer.words))
    # Not in the manifest, whose hash names a corpus by its shards.
    if lost := unknown_tokens(sum(result["unknown_tokens"] for result in results), tokens):
        tell(f"warning: {lost}; train a tokenizer on text like this")


@cache
def _findings(directory: Path, content_hash: str) -> Findings:
    """Return what a search has found, read once per process; UserError if it is another one."""
    found = Findings(directory)
    if found.content_hash != content_hash:
        raise UserError(f"{directory}: changed while this command read it; run it again when "
                        "nothing writes to it any more")
    return found


class _Rolling:
    """Writes one unit's documents to shards of at most about SHARD_TOKENS tokens."""

    def __init__(self, target: str, unit: str, tokenizer: Tokenizer, counts: dict[str, int]):
        self._counts = counts
        self._target, self._unit, self._tokenizer = target, unit, tokenizer
        self._dtype = shards.token_dtype(tokenizer.stored_size)
        self._shards: list[ShardInfo] = []
        self._writer: shards.ShardWriter | None = None
        self._origins: OriginWriter | None = None
        self.origins: dict[str, list] = {}
        self.labels: dict[str, list[int]] = {}
        self.unknown_tokens = 0

    def abandon(self) -> None:
        """Remove a shard that is not finished."""
        for writer in (self._writer, self._origins):
            if writer is not None:
                writer.abandon()

    def write(self, texts: list[str], documents: list[Document]) -> None:
        """Add documents; `texts`: what the tokenizer is given of each."""
        try:
            ids, lengths, owners = encode.encode_joined(self._tokenizer, texts)
        except OwnCodeError:
            for document, text in zip(documents, texts, strict=True):  # which is it?
                try:
                    encode.encode_joined(self._tokenizer, [text])
                except OwnCodeError as error:
                    raise UserError(f"{document.place()}: {error}") from error.__cause__
            raise
        if (unknown := self._tokenizer.unk_id) is not None:
            self.unknown_tokens += int(np.count_nonzero(ids == unknown))
            if self._tokenizer.words:
                self.unknown_tokens += int(np.count_nonzero(ids == unknown + self._tokenizer.size))
        if 0 in lengths:  # such as of characters that the tokenizer removes
            owners = list(compress(owners, lengths))
            lengths = list(filter(None, lengths))
        characters = list(map(len, texts))
        if owners != range(len(documents)):
            documents = [documents[owner] for owner in owners]
            characters = [0 if owner == before else characters[owner]  # of a cut one: at its first
                          for before, owner in zip([None, *owners], owners, strict=False)]
        begin = written = 0
        for label, run in itertools.groupby(documents, attrgetter("label")):
            end = begin + len(list(run))
            whole = set(owners[begin:end])
            add_up(self.labels, {label: [len(whole), sum([len(texts[owner]) for owner in whole]),
                                         sum(lengths[begin:end])]})
            begin, written = end, written + len(whole)
        self._counts["empty"] += len(texts) - written
        self._counts["cut"] += len(documents) - written
        self._append(ids, lengths, documents, characters)

    def _append(self, ids: np.ndarray, lengths: list[int], documents: list[Document],
                characters: list[int]) -> None:
        """Add documents, back to back in `ids`, to the shard; begin another where it is full."""
        ends, begin = list(itertools.accumulate(lengths, initial=0)), 0
        while begin < len(lengths):
            if self._writer is None or self._origins is None:
                name = f"{self._unit}-{len(self._shards):03d}"
                self._writer = shards.ShardWriter(self._target, name, self._dtype)
                self._origins = OriginWriter(self._target, name)
            full = ends[begin] + SHARD_TOKENS - self._writer.tokens
            stop = min(bisect.bisect_left(ends, full, begin + 1), len(lengths))
            self._writer.append_many(ids[ends[begin] : ends[stop]], lengths[begin:stop])
            _, sources, places, _, labels, _, ids_of = map(list, zip(
                *documents[begin:stop], strict=True))
            self._origins.add(sources, places, ids_of, labels, characters[begin:stop])
            begin = stop
            if self._writer.tokens >= SHARD_TOKENS:
                self._end_shard()

    def _end_shard(self) -> None:
        assert self._writer is not None and self._origins is not None, "a shard is begun"
        self.origins[self._writer.name] = self._origins.finish()
        self._shards.append(self._writer.finish())
        self._writer = self._origins = None

    def finish(self) -> list[ShardInfo]:
        if self._writer is not None:
            self._end_shard()
        return self._shards
