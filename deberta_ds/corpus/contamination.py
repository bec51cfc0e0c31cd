"""Find documents that hold text of evaluation files: overlap of word n-grams.

The strings of the evaluation files (every text field of a record, every cell of a table, every
line of text) become n-grams of lower-cased words without punctuation; in scripts written without
spaces each character is a word. Strings of fewer than n words, but at least SHORTEST, count whole.
A document that holds one of these n-grams is contaminated. n = 13 is what GPT-3 and others since
took (Brown et al. 2020, appendix C): shorter ones find idioms, longer ones miss edited copies.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import xxhash

from deberta_ds.base.errors import UserError, still_at_work
from deberta_ds.base.files import read_json, typed, write_atomic
from deberta_ds.corpus import findings
from deberta_ds.corpus.documents import Document, Extent, ReadOptions, plan_units
from deberta_ds.corpus.findings import FOUND, merge_found, number_of, save_found
from deberta_ds.corpus.units import Part, check_unchanged, extents_of, identified, job, run_units
from deberta_ds.data.corpus import map_array
from deberta_ds.data.shards import MANIFEST, save_array
from deberta_ds.files.tables import TABLE_KINDS, read_table, text_lines
from deberta_ds.tokenizer.text import TEXT_RULES_VERSION, WORD, BadTextError, normalize

SHORTEST = 8  # words: shorter strings are everywhere
MANY = 10  # examples
REPORT = "report.json"
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, of the polynomial that hashes an n-gram
_BATCH_WORDS = 1 << 16
_END = "\0"  # no word, so that no run of words that an example has goes over the end of a document
_SAMPLES, _SHOWN = 5, 100  # documents shown of each unit, and in all


@dataclass(frozen=True)
class Contamination:
    """`examples` {evaluation file: [examples long enough to be searched, examples found, those that
    are too short, those found by words alone that more than MANY examples have, such as a license]}
    (version 0.2.0 wrote two numbers), `documents` [searched, found], `samples` of what was found:
    place, evaluation file, words.
    """

    examples: dict[str, list[int]]
    documents: list[int]
    samples: list[dict]


def find_contamination(planned: list[list[Extent]], against: list[str], out: str | Path, *,
                       read: ReadOptions, words: int = 13, workers: int = 1, part: Part = None
                      ) -> Contamination | None:
    """Write the evaluation text found in inputs to `out`; return the report, None for a part."""
    if words < SHORTEST:
        raise UserError(f"--words {words}: shorter n-grams than {SHORTEST} words are in any text")
    out = Path(out)
    (against_digest, evaluation), = identified(
        [extents_of(plan_units(against, ReadOptions()))], out).items()
    kinds = {extent.path: extent.kind for extent in evaluation}  # a large file has many extents
    units = identified(planned, out, part)
    description = {"version": findings.FINDINGS_VERSION, "read": asdict(read),
                   "text_rules": TEXT_RULES_VERSION, "against": against_digest, "words": words}
    with job(out, description, finished=MANIFEST, part=part, units=units) as is_done:
        if not is_done:
            with still_at_work(lambda: "reading the evaluation files"):
                firsts, examples = _save_grams(out, kinds, words)
            check_unchanged(evaluation)
            met: set[int] = set()
            own: set[int] = set()  # by words of their own

            def keep(result: dict) -> dict:
                own.update(result.pop("own", result["examples"]))  # 0.2.0 has none
                met.update(result.pop("examples"))  # of each unit they may be all
                return result

            jobs = {name: (str(out), name, unit, read) for name, unit in units.items()}
            results = run_units(out, search_unit, jobs, workers=workers, label="search", part=part,
                                keep=keep)
            if part:
                return None
            findings.check_any_read(results)
            report = _report(firsts, examples, met, own, results)
            write_atomic(out / REPORT, json.dumps(asdict(report), indent=1, ensure_ascii=False))
            counts = {"documents": report.documents[0], "contaminated": report.documents[1]}
            numbers = number_of(extents_of(units.values()))
            merge_found(out, "", len(numbers), {
                name: [numbers[source] for source in number_of(unit)]
                for name, unit in units.items()})
            findings.finish_findings(out, units, read, "contaminated", counts)
    values = read_json(out / REPORT)
    try:
        return typed(Contamination, values)
    except ValueError as error:
        raise UserError(f"{out / REPORT}: damaged ({error}); run this again into a new directory"
                        ) from None


def gram_hashes(words: list[str], lengths: Iterable[int]) -> Iterator[np.ndarray]:
    """Yield for each of the ascending `lengths` the u64 hash of each run of so many words."""
    each = np.fromiter(map(_hash_word, words), np.uint64, len(words))
    total, done = np.zeros(len(words), np.uint64), 0
    for length in lengths:
        total = total[: max(0, len(words) - length + 1)]
        for offset in range(done, length):
            total = total * _BASE + each[offset : offset + len(total)]
        yield total
        done = length


def words_of(text: str) -> list[str]:
    """Return the lower-cased words of a normalized text, without punctuation."""
    return WORD.findall(text.lower())


@lru_cache(1 << 18)
def _hash_word(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode())


def _strings(path: str, kind: str) -> Iterator[list[str]]:
    """Yield the texts of each example of an evaluation file."""
    if kind == "text":
        yield from ([line] for _, line in text_lines(path))
    elif kind in TABLE_KINDS.values():
        # No header: some of GLUE's tables have none, and rows of any number of cells.
        yield from (list(_texts_in(values)) for _, values in read_table(path, names=None))
    else:
        raise UserError(f"{path}: evaluation files are JSON lines, tables, parquet, Arrow or text")


def _texts_in(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def _save_grams(out: Path, kinds: dict[str, str], count: int
                ) -> tuple[list[int], dict[str, list[int]]]:
    """Write the n-grams of all examples of {file: kind}; return (the first example of each file,
    the `examples` of a report, as long as nothing is found).

    lengths.npy: words of an n-gram, all that occur; for each of them grams-N.npy, sorted hashes,
    and owners-N.npy, the example that each is of.
    """
    found: dict[int, tuple[array, array]] = {}
    example, firsts, examples = 0, [], {path: [0, 0, 0, 0] for path in kinds}
    for path, kind in kinds.items():
        firsts.append(example)
        for texts in _strings(path, kind):
            grams = list(_example_grams(texts, count))
            for length, gram in grams:
                hashes, owners = found.setdefault(length, (array("Q"), array("q")))
                hashes.append(gram)
                owners.append(example)
            examples[path][0 if grams else 2] += 1
            example += 1
    if not found:
        raise UserError("the evaluation files hold no text of "
                        f"{SHORTEST} words or more: {', '.join(kinds)}")
    lengths = sorted(found)
    for length in lengths:
        hashes_of, owners_of = map(np.array, found[length])
        order = np.argsort(hashes_of, kind="stable")
        save_array(out / f"grams-{length}.npy", hashes_of[order])
        save_array(out / f"owners-{length}.npy", owners_of[order])
    save_array(out / "lengths.npy", np.array(lengths))
    return firsts, examples


def _example_grams(texts: Iterable[str], count: int) -> Iterator[tuple[int, int]]:
    for text in texts:
        with suppress(BadTextError):  # no document has a lone surrogate
            text = normalize(text)
        words = words_of(text)
        if len(words) >= SHORTEST:
            length = min(count, len(words))
            hashes, = gram_hashes(words, [length])
            yield from {(length, gram) for gram in hashes.tolist()}


def search_unit(out: str, name: str, unit: list[Extent], read: ReadOptions) -> dict:
    """Write the contaminated documents of one unit; return counts, examples met and samples."""
    numbers = number_of(unit)
    directory = Path(out)
    tables = [_Grams(directory, length) for length in map_array(directory / "lengths.npy").tolist()]
    places: list[tuple[int, int]] = []
    samples: list[dict] = []
    counts: dict = {}
    for documents, firsts, words in _batches(findings.read_normalized(unit, read, counts)):
        found: dict[int, tuple[int, str]] = {}
        for place, example, matching in hits(words, tables):
            found.setdefault(bisect_right(firsts, place) - 1, (example, matching))
        for index, (example, matching) in sorted(found.items()):
            document = documents[index]
            places.append((numbers[document.path], document.where))
            if len(samples) < _SAMPLES:
                samples.append({"document": document.offset(), "example": example,
                                "words": matching})
    save_found(out, name, np.array(places, FOUND))
    examples, own = (sorted(set().union(*(grams.examples_met(most) for grams in tables)))
                     for most in (1 << 62, MANY))
    return counts | {"found": len(places), "examples": examples, "own": own, "samples": samples}


def _batches(source: Iterable[tuple[Document, str]]
             ) -> Iterator[tuple[list[Document], list[int], list[str]]]:
    """Yield (documents, the first word of each, words), many short documents at a time: NumPy takes
    as long to be called as to hash some hundred words. _END stands behind each document.
    """
    documents: list[Document] = []
    firsts: list[int] = []
    words: list[str] = []
    for document, text in source:
        firsts.append(len(words))
        words += [*words_of(text), _END]
        documents.append(document._replace(text=""))
        if len(words) >= _BATCH_WORDS:
            yield documents, firsts, words
            documents, firsts, words = [], [], []
    yield documents, firsts, words


class _Grams:
    """The n-grams of one length: sorted hashes, the example of each, and which top bits occur (a
    look-up there rules out most n-grams of a document in a tenth of the time of a search).
    """

    def __init__(self, directory: Path, length: int):
        self.length = length
        self.hashes = map_array(directory / f"grams-{length}.npy")
        self.owners = map_array(directory / f"owners-{length}.npy")
        bits = min(len(self.hashes).bit_length() + 5, 24)  # a small table stays in the cache
        self._shift = np.uint64(64 - bits)
        self._occurs = np.zeros(1 << bits, bool)
        self._occurs[self.hashes >> self._shift] = True
        self._met: set[int] = set()

    def places(self, hashes: np.ndarray) -> tuple[list[int], list[int]]:
        """Return (the indices of those of `hashes` that an example has, the first example of each),
        and remember which n-grams they are: all examples of one may be many, as of a common text.
        """
        likely = np.flatnonzero(self._occurs[hashes >> self._shift])
        index = np.searchsorted(self.hashes, hashes[likely]).clip(max=len(self.hashes) - 1)
        is_there = self.hashes[index] == hashes[likely]
        self._met.update(index[is_there].tolist())
        return likely[is_there].tolist(), self.owners[index[is_there]].tolist()

    def examples_met(self, most: int) -> set[int]:
        """Return the examples of all n-grams that were found and at most `most` examples have."""
        firsts = np.array(sorted(self._met), np.int64)
        lasts = np.searchsorted(self.hashes, self.hashes[firsts], "right").tolist()
        return {example for first, last in zip(firsts.tolist(), lasts, strict=True)
                if last - first <= most for example in self.owners[first:last].tolist()}


def hits(words: list[str], tables: list[_Grams]) -> Iterator[tuple[int, int, str]]:
    """Yield (place, an example, matching words) for each n-gram of `words` that examples have."""
    all_hashes = gram_hashes(words, [grams.length for grams in tables])
    for grams, hashes in zip(tables, all_hashes, strict=True):
        for place, example in zip(*grams.places(hashes), strict=True):
            yield place, example, " ".join(words[place : place + grams.length])


def _report(firsts: list[int], examples: dict[str, list[int]], met: set[int], own: set[int],
            results: list[dict]) -> Contamination:
    names = list(examples)
    for example in met:
        counts = examples[names[bisect_right(firsts, example) - 1]]
        counts[1] += 1
        counts[3] += example not in own
    samples = []
    for sample in islice(chain.from_iterable(one["samples"] for one in results), _SHOWN):
        file = bisect_right(firsts, sample["example"]) - 1
        place = f"{names[file]}, example {sample['example'] - firsts[file]}"
        samples.append(sample | {"example": place})
    documents = [sum(one[key] for one in results) for key in ("documents", "found")]
    return Contamination(examples, documents, samples)
