"""Where words begin by the text alone, and where masks take them to begin: two sources to compare.

By the text a word begins after white space, at punctuation or a symbol (not "_"), and at each
character of a script written without spaces. WordPiece also begins one after punctuation.
"""

import unicodedata
from collections import Counter

import numpy as np

from deberta_ds.data.masking import word_spans
from deberta_ds.tokenizer import UNSPACED_SCRIPTS, Tokenizer


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def _is_unspaced(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in UNSPACED_SCRIPTS)


def begins_in_text(text: str, kind: str) -> tuple[set[int], set[int]]:
    """Return (characters at which a word must begin, characters at which one may)."""
    must, may = set(), set()
    for place, character in enumerate(text):
        before = text[place - 1] if place else " "
        if character.isspace():
            continue
        if before.isspace():
            must.add(place)
        after_mark = kind == "wordpiece" and (_is_mark(before) or _is_unspaced(before))
        if before.isspace() or _is_mark(character) or _is_unspaced(character) or after_mark:
            may.add(place)
    return must, may


def compare_words(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """Return counts: words that must begin, those missed, those too many, characters split.

    A joiner or a mark spelled in bytes counts apart: an id cannot tell it from a symbol that
    begins with the same bytes.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    ids, spans = np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2)
    special = tokenizer.is_special()
    blank = np.array([not piece.strip() for piece in tokenizer.readable(ids)], dtype=bool)
    pieces_at = Counter(int(low) for low, high in spans if high == low + 1)
    in_bytes = {place for place, count in pieces_at.items() if count > 1}
    starts, lengths = word_spans(tokenizer.word_starts()[ids], special[ids])
    unknown = {place for low, high in spans[special[ids]] for place in range(low, high)}
    found, split, last = set(), 0, 0
    for start, length in zip(starts, lengths, strict=True):
        inside = np.arange(start, start + length)[~blank[start : start + length]]
        if not len(inside):
            continue
        low, high = spans[inside[0], 0], spans[inside[-1], 1]
        split += int(low < last)
        found.add(int(low))
        last = int(high)
    must, may = begins_in_text(text, tokenizer.kind)
    spelled = {place for place in found - may if place in in_bytes
               and unicodedata.category(text[place]) in ("Cf", "Mn", "Mc", "Me")}
    after_unknown = {place for place in found if place - 1 in unknown}
    return {"words": len(must), "missed": len(must - found - unknown),
            "extra": len(found - may - after_unknown - spelled), "split": split,
            "spelled": len(spelled)}
