"""Which documents are kept, and their text under the rules of text.py: a batch at a time."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from deberta_ds.data.prep.documents import Document
from deberta_ds.data.prep.text import (
    TO_UTF8,
    BadTextError,
    has_text,
    letter_share,
    normalise_all,
)
from deberta_ds.errors import UserError
from deberta_ds.numbers import counted

COUNTS = ("documents", "characters", "tokens", "empty", "too_short", "few_letters", "duplicate",
          "contaminated", "filtered", "held_out", "bad", "cut", "removed_characters")
_BATCH_CHARACTERS = 1 << 17
_BATCH_DOCUMENTS = 1 << 12  # of which many are empty
_PROBLEMS_NAMED = 20


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
        """`is_read`: somebody reads the normalised text; else it is not made."""
        self._clean, self._is_read = clean, is_read
        self._takes_all = clean.min_characters <= 1 and not clean.min_letter_share
        self.counts = dict.fromkeys(COUNTS, 0)
        self.problems: list[str] = []

    def texts(self, documents: list[Document]) -> list[str]:
        """Return the normalised text of each document (the raw one where nobody reads it), or ""
        (and count why) for those that are left out; UserError where too many are bad.
        """
        if not any([document.problem for document in documents]):
            with suppress(BadTextError):  # in one of them: which, is found below
                texts, removed = self._looked_at([document.text for document in documents])
                self.counts["removed_characters"] += removed
                return texts if self._takes_all and all(texts) else list(map(self._kept, texts))
        return list(map(self._one, documents))

    def _looked_at(self, texts: list[str]) -> tuple[list[str], int]:
        if self._is_read:
            return normalise_all(texts)
        return [text if has_text(text) else "" for text in texts], 0

    def _one(self, document: Document) -> str:
        problem = document.problem
        if not problem:
            try:
                (text,), removed = self._looked_at([document.text])
                self.counts["removed_characters"] += removed
                return self._kept(text)
            except BadTextError as error:
                problem = str(error)
        self.counts["bad"] += 1
        if len(self.problems) < _PROBLEMS_NAMED:
            self.problems.append(f"{document.place()}: {problem}")
        check_problems(self.problems, self.counts["bad"], self._clean)
        return ""

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
        remedy = TO_UTF8 if "invalid UTF-8" in problems[0] else "mend the input"
        raise UserError(
            f"{problems[0]} ({counted(count, 'bad document')}, --max_bad allows {clean.max_bad}); "
            f"{remedy}, or allow more and they are left out and listed"
        )
