"""Documents of any length -> ids, a batch at a time, in bounded memory.

A long document is encoded in parts whose ids concatenate to those of the whole. SentencePiece
starts afresh at every space, so that any space will do. Of another tokenizer nothing is assumed: a
seam is taken only where the text behind it, encoded as behind other text, gives the ids it has in
its context.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from deberta_ds.data.prep.text import ENCODE_CHARACTERS, encodable_parts
from deberta_ds.tokenizer import Tokenizer

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


def _encode_long(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
    documents: list[list[np.ndarray]] = []
    parts = _parts_by_seam if tokenizer.normalizes_itself else _parts_by_space
    for ids, starts_document in parts(tokenizer, text):
        if starts_document:
            documents.append([])
        documents[-1].append(ids)
    return [np.concatenate(ids) for ids in documents]


def _parts_by_space(tokenizer: Tokenizer, text: str) -> Iterator[tuple[np.ndarray, bool]]:
    for part, starts_document in encodable_parts(text):
        yield tokenizer.encode_array(part), starts_document


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
    """Return the ids of text at the beginning of its document, where normalizers take a space away
    or put one, or behind other text.
    """
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
