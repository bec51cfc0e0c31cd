"""The bounded sample of text that a tokenizer is trained on: from the inputs, or by language.

By language, one with the share p of all characters has the share p ** (1 / temperature) of the
sample, over the sum of these. Each piece of text is taken with the chance of what its language
still lacks over what is still to come (Fan, Muller and Rezucha 1962): spread over all of the input,
exact to one piece. Where a language has less than its share the chance is above 1: pieces repeat.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import xxhash
from tqdm import tqdm

from deberta_ds.data.mixture import temperature_weights
from deberta_ds.data.prep.clean import Cleaner, CleanOptions
from deberta_ds.data.prep.documents import Extent, ReadOptions
from deberta_ds.data.prep.readers import read_unit
from deberta_ds.data.prep.units import FORK
from deberta_ds.errors import UserError
from deberta_ds.splitmix import mix64

SENTENCE_CHARACTERS = 1000  # SentencePiece drops sentences over 4192 bytes without a word
Languages = dict[str, tuple[int, float]]  # {label: (characters there, characters wanted)}


def sample_texts(units: list[list[Extent]], sample_bytes: int, read: ReadOptions,
                 languages: Languages | None = None, max_bad: int = 0) -> Iterator[str]:
    """Yield about `sample_bytes` of normalised text: evenly from the start of every unit, or what
    `languages` says. UserError if there is none, or for more than `max_bad` unreadable documents;
    others are named on stderr.
    """
    cleaner, is_empty = Cleaner(CleanOptions(max_bad=max_bad), is_read=True), True
    pieces = _by_language(units, read, languages, cleaner) if languages else \
        _evenly(units, read, sample_bytes, cleaner)
    for piece in pieces:
        is_empty = False
        yield piece
    for line in cleaner.problems:
        print(f"left out: {line}", file=sys.stderr, flush=True)
    if is_empty:
        raise UserError(f"{units[0][0].path}: no text in it or in the other inputs")


def _evenly(units: list[list[Extent]], read: ReadOptions, sample_bytes: int, cleaner: Cleaner
            ) -> Iterator[str]:
    quota, spent = sample_bytes / len(units), 0.0
    for number, unit in enumerate(units):
        allowed = (number + 1) * quota
        for document in read_unit(unit, read):
            if spent >= allowed:
                break
            for piece in _pieces(cleaner.texts([document])[0]):  # a document may be a whole file
                if spent >= allowed:
                    break
                spent += len(piece.encode())
                yield piece


def languages_of(units: list[list[Extent]], read: ReadOptions, sample_bytes: int,
                 temperature: float, workers: int = 1, max_bad: int = 0) -> Languages:
    """Return how much there is of each language, and how much of it a sample of `sample_bytes`
    takes (of all bytes, if those are fewer). Reads all of the input; prints the shares.
    """
    if not (read.label_key or read.label_from_directory):
        raise UserError("--temperature needs to know the languages; give --label_key or "
                        "--label_from_directory")
    totals: dict[str, list[int]] = {}
    with ProcessPoolExecutor(workers, FORK) as pool:
        counted = pool.map(partial(_count, read=read, max_bad=max_bad), units)
        for counts in tqdm(counted, desc="counting languages", total=len(units), unit="unit",
                           disable=None):
            for label, (characters, size) in counts.items():
                row = totals.setdefault(label, [0, 0])
                row[:] = [row[0] + characters, row[1] + size]
    if not totals:
        raise UserError(f"{units[0][0].path}: no text in it or in the other inputs")
    if totals.keys() == {""}:
        raise UserError(f"{units[0][0].path}: no document here or in the other inputs has a label, "
                        "so --temperature has nothing to weigh; name their field with --label_key, "
                        "or leave --temperature out")
    totals = dict(sorted(totals.items()))
    shares = temperature_weights([characters for characters, _ in totals.values()], temperature)
    mean = sum(share * size / characters for share, (characters, size) in zip(
        shares, totals.values(), strict=True))  # bytes of a character of the sample
    wanted = min(sample_bytes, sum(size for _, size in totals.values())) / mean
    found = {label: (characters, wanted * share) for share, (label, (characters, _)) in zip(
        shares, totals.items(), strict=True)}
    for label, (characters, taken) in found.items():
        print(f"{label or '(no label)'}: {characters:,} characters, {taken / wanted:.2%} of the "
              f"sample ({taken / characters:.2f} times what is there)", file=sys.stderr)
    return found


def _count(unit: list[Extent], read: ReadOptions, max_bad: int) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    cleaner = Cleaner(CleanOptions(max_bad=max_bad), is_read=True)
    for document in read_unit(unit, read):
        if text := cleaner.texts([document])[0]:
            characters, size = counts.get(document.label, (0, 0))
            counts[document.label] = characters + len(text), size + len(text.encode())
    return counts


def _by_language(units: list[list[Extent]], read: ReadOptions, languages: Languages,
                 cleaner: Cleaner) -> Iterator[str]:
    left = {label: list(counts) for label, counts in languages.items()}
    seeds = {label: xxhash.xxh3_64_intdigest(label.encode()) for label in languages}
    number = 0
    for document in (document for unit in units for document in read_unit(unit, read)):
        for piece in _pieces(cleaner.texts([document])[0]):
            there, wanted = left[document.label]
            chance = mix64(seeds[document.label] + number) / 2**64
            copies = int(max(0.0, wanted / there) + chance)
            left[document.label] = [there - len(piece), wanted - copies * len(piece)]
            number += 1
            yield from [piece] * copies


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + SENTENCE_CHARACTERS]
            for start in range(0, len(text), SENTENCE_CHARACTERS))
