"""Documents of any length -> ids, a batch at a time, in bounded memory.

A long document is encoded in parts whose ids concatenate to those of the whole. SentencePiece
starts afresh at every space, so that any space will do. Of another tokenizer nothing is assumed: a
seam is taken only where the text behind it, encoded as behind other text, gives the ids it has in
its context.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.base.numbers import counted
from deberta_ds.corpus.documents import Document
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.text import (
    ENCODE_CHARACTERS,
    TO_UTF8,
    BadTextError,
    encodable_parts,
    has_text,
    letter_share,
    normalize,
    normalize_all,
)

_CONTEXT = 256  # characters behind a seam by which ids before it may still change
_SEARCHED = 2048  # characters in which a seam is looked for
_TRIES = 64


def encode_joined(tokenizer: Tokenizer, texts: list[str]
                  ) -> tuple[np.ndarray, list[int], Sequence[int]]:
    """Return (the ids of all texts back to back, how many each document has, the number of its
    text): a text is one document, or several where it had to be cut.
    """
    if max(map(len, texts), default=0) <= ENCODE_CHARACTERS:
        return *tokenizer.encode_joined(texts), range(len(texts))
    documents = [[tokenizer.encode_array(text)] if len(text) <= ENCODE_CHARACTERS
                 else _encode_long(tokenizer, text) for text in texts]
    ids = [part for parts in documents for part in parts]
    owners = [owner for owner, parts in enumerate(documents) for _ in parts]
    return np.concatenate(ids), list(map(len, ids)), owners


def token_count(tokenizer: Tokenizer, text: str) -> int:
    """Return how many tokens a text has as it was read; 0 if it cannot be encoded."""
    with suppress(BadTextError):
        return len(encode_joined(tokenizer, [text if tokenizer.normalizes_itself else normalize(
            text)])[0])
    return 0


def _encode_long(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
    documents: list[list[np.ndarray]] = []
    parts = _parts_by_seam(tokenizer, text) if tokenizer.normalizes_itself else (
        (tokenizer.encode_array(part), starts) for part, starts in encodable_parts(text))
    for ids, starts_document in parts:
        if starts_document:
            documents.append([])
        documents[-1].append(ids)
    return [np.concatenate(ids) for ids in documents]


def _parts_by_seam(tokenizer: Tokenizer, text: str) -> Iterator[tuple[np.ndarray, bool]]:
    begin, starts_document = 0, True
    while len(text) - begin > ENCODE_CHARACTERS:
        window = text[begin : begin + ENCODE_CHARACTERS]
        ids = _encode(tokenizer, window, starts_document)
        place, kept = _seam(tokenizer, window, ids)
        yield ids[:kept], starts_document
        starts_document = place == len(window)
        begin += place
    yield _encode(tokenizer, text[begin:], starts_document), starts_document


def _encode(tokenizer: Tokenizer, text: str, starts_document: bool) -> np.ndarray:
    """Return the ids of text at the beginning of its document, or behind other text."""
    if starts_document:
        return tokenizer.encode_array(text)
    return np.array(tokenizer.encode_after(text), dtype=np.int32)


def _seam(tokenizer: Tokenizer, window: str, ids: np.ndarray) -> tuple[int, int]:
    """Return (character, number of ids before it) of a seam near the end of a window.

    The end itself where there is none, as inside 2 KB of a single word: the document is cut there.
    """
    last = len(window) - _CONTEXT
    near = range(last, last - _SEARCHED, -1)
    spaces = [place for place in near if window[place].isspace()]
    behind = [place + 1 for place in spaces]  # where a space at the front gives one more piece
    for place in [*spaces[:_TRIES], *behind[:_TRIES], *near[:_TRIES]]:
        tail = _encode(tokenizer, window[place:], starts_document=False)
        if len(tail) and np.array_equal(ids[-len(tail):], tail):
            return place, len(ids) - len(tail)
    return len(window), len(ids)


# Which documents are kept, and their text under the rules of text.py: a batch at a time.
COUNTS = ("documents", "characters", "tokens", "empty", "too_short", "few_letters", "duplicate",
          "contaminated", "filtered", "held_out", "bad", "cut", "removed_characters")
_KEPT = COUNTS[:3]
_BATCH_CHARACTERS = 1 << 17
_BATCH_DOCUMENTS = 1 << 12  # of which many are empty
_PROBLEMS_NAMED = 20


def left_out(counts: dict[str, int]) -> str:
    """Return what `counts` say was left out or changed: "empty 3, held_out 1,204"; "" if nothing.
    """
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()
                     if count and name not in _KEPT)


def add_up(total: dict[str, list[int]], more: Mapping[str, Sequence[int]]) -> None:
    """Add to the counts of each name those of `more`."""
    for name, counts in more.items():
        total[name] = list(map(sum, zip(total.get(name, [0] * len(counts)), counts, strict=True)))


@dataclass(frozen=True)
class CleanOptions:
    """Which documents are kept. `max_bad`: unreadable documents allowed in the whole input."""

    min_characters: int = 1
    min_letter_share: float = 0.0
    max_bad: int = 0


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in order, about _BATCH_CHARACTERS of text at a time."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class Cleaner:
    """Looks at the documents of one unit. `counts` and `problems`: what it met."""

    def __init__(self, clean: CleanOptions, is_read: bool):
        """`is_read`: somebody reads the normalized text; else it is not made."""
        self._clean, self._is_read = clean, is_read
        self.counts = dict.fromkeys(COUNTS, 0)
        self.problems: list[str] = []

    def texts(self, documents: list[Document]) -> list[str]:
        """Return the normalized text of each document (the raw one where nobody reads it), or ""
        (and count why) for those that are left out; UserError where too many are bad.
        """
        problem = next(filter(None, [document.problem for document in documents]), "")
        if not problem:
            try:
                texts, removed = self._looked_at([document.text for document in documents])
                self.counts["removed_characters"] += removed
                return list(map(self._kept, texts))
            except BadTextError as error:
                problem = str(error)
        if len(documents) > 1:  # which of them is it?
            return [self.texts([document])[0] for document in documents]
        self.counts["bad"] += 1
        if len(self.problems) < _PROBLEMS_NAMED:
            self.problems.append(f"{documents[0].place()}: {problem}")
        check_problems(self.problems, self.counts["bad"], self._clean)
        return [""]

    def _looked_at(self, texts: list[str]) -> tuple[list[str], int]:
        if self._is_read:
            return normalize_all(texts)
        return [text if has_text(text) else "" for text in texts], 0

    def _kept(self, text: str) -> str:
        if not text:
            self.counts["empty"] += 1
        elif len(text) < self._clean.min_characters:
            self.counts["too_short"] += 1
            return ""
        elif self._clean.min_letter_share and letter_share(text) < self._clean.min_letter_share:
            self.counts["few_letters"] += 1
            return ""
        return text


def check_problems(problems: list[str], count: int, clean: CleanOptions) -> None:
    """UserError if `count` bad documents, of which `problems` names some, are more than allowed."""
    if count > clean.max_bad:
        remedy = TO_UTF8 if "invalid UTF-8" in problems[0] else "fix the input"
        raise UserError(
            f"{problems[0]} ({counted(count, 'bad document')}, --max_bad allows {clean.max_bad}); "
            f"{remedy}, or allow more and they are left out and listed")
