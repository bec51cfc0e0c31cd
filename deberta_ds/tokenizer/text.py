"""The rules by which raw text becomes the text that is tokenized.

1. U+FEFF, soft hyphens, zero-width spaces, bidirectional marks and control characters (category Cc,
   NUL among them) are removed; zero-width joiners U+200C and U+200D stay, scripts need them.
2. U+2581, the space mark of SentencePiece, becomes "_".
3. Unicode NFC.
4. Every run of white space (line ends too) becomes one space; none at either end.
A lone surrogate (from a JSON escape) is not text: the document is bad. The rules are idempotent,
and decode(encode(text)) == text afterwards for a tokenizer made by data_prep/train_tokenizer.py.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from deberta_ds.tokenizer import SPACE_MARK, UNSPACED_SCRIPTS

# What a word of a text is, in any script: letters and digits with the marks on them.
#
# A vowel sign of Devanagari or a vowel point of Hebrew is no letter by itself (Unicode's category
# M), and what stands before and behind it is one word all the same; so are the joiners of Persian
# and Bengali. In scripts written without spaces each letter, with its marks, is a word.
_JOINERS = (0x200C, 0x200D)


def _class_of(codes: list[int]) -> str:
    """Return ascending code points as the inside of a regular expression's [...]."""
    ranges = [list(group) for _, group in groupby(enumerate(codes), lambda pair: pair[1] - pair[0])]
    return "".join(f"{chr(group[0][1])}-{chr(group[-1][1])}" for group in ranges)


UNSPACED = "".join(f"{chr(low)}-{chr(high)}" for low, high in UNSPACED_SCRIPTS)
_CODES = [code for code in (*range(0x300, 0x1FFFF), *range(0xE0100, 0xE01F0))  # all that have any
          if code in _JOINERS or unicodedata.category(chr(code))[0] == "M"]
MARKS = _class_of(_CODES)
_MARK = re.compile(f"[{MARKS}]")
_UNSPACED_MARKS = _class_of([code for code in _CODES if any(low <= code <= high for low, high
                                                            in UNSPACED_SCRIPTS)])
# Most words end before ASCII, where a look at the marks is spared.
LETTERS = f"[^\\W_{UNSPACED}]+(?:(?![\\0-\\x7f])[{MARKS}]+[^\\W_{UNSPACED}]*)*"
UNSPACED_LETTER = f"(?=\\w)[{UNSPACED}][{_UNSPACED_MARKS}]*"
WORD = re.compile(f"{LETTERS}|{UNSPACED_LETTER}")


TEXT_RULES_VERSION = 1
TO_UTF8 = "convert the file, such as by: iconv -f ENCODING -t UTF-8"
ENCODE_CHARACTERS = 1 << 18
_LONG = 1 << 13  # characters; in fewer the calls of NumPy would cost more than the work
_FRONT = 64  # characters, of a text of which only the front is looked at

_APART = "\0"  # between texts that are normalized together
_REMOVED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]")
_OTHER_SPACES = [chr(code) for code in range(0x0A, 0x3001) if chr(code).isspace()]
_PRINTABLE_ASCII = bytes(range(0x20, 0x7F))


class BadTextError(ValueError):
    """The text of one document breaks a rule."""


def normalize(text: str) -> str:
    """Return `text` under the rules above; BadTextError if it holds a lone surrogate."""
    return normalize_and_count(text)[0]


def normalize_and_count(text: str) -> tuple[str, int]:
    """Return (normalized text, number of characters that rule 1 removed)."""
    text, removed = _without_line_ends(text), 0
    if not _is_printable(text):
        text, removed = _printable(text)
    return _composed(_collapse_spaces(text).strip(" ")), removed


def normalize_all(texts: list[str]) -> tuple[list[str], int]:
    """Return (normalized texts, number of characters that rule 1 removed from all of them).

    Texts go through most of the rules as one string, so that a short one costs its share and little
    more; those beyond ASCII apart from the others, whose characters take a byte each.
    """
    plain = [text for text in texts if text.isascii()]
    if len(plain) == len(texts):
        return _normalize_joined(texts)
    found, removed = _normalize_joined([text for text in texts if not text.isascii()])
    found_plain, removed_plain = _normalize_joined(plain)
    rest, ascii_rest = iter(found), iter(found_plain)
    return ([next(ascii_rest if text.isascii() else rest) for text in texts],
            removed + removed_plain)


def _normalize_joined(texts: list[str]) -> tuple[list[str], int]:
    joined, removed = _without_line_ends(_APART.join(texts)), 0
    if not _is_printable(joined, len(texts) - 1):
        parts = joined.split(_APART)
        if len(parts) != len(texts):  # one of them holds U+0000, or there is none
            found = [normalize_and_count(text) for text in texts]
            return [text for text, _ in found], sum(count for _, count in found)
        for number, part in enumerate(parts):
            if not part.isprintable():
                parts[number], count = _printable(part)
                removed += count
        joined = _APART.join(parts)
    joined = _composed(_collapse_spaces(joined))  # nothing composes with U+0000
    return [text.strip(" ") for text in joined.split(_APART)], removed


def has_text(text: str) -> bool:
    """Return whether `normalize` leaves any text, in a fraction of its time; as BadTextError."""
    if not text.isascii():
        _refuse_surrogates(text)
    first = text[:1]
    if first.isspace():
        first = text[:_FRONT].lstrip()[:1]
    return bool(first and first.isprintable() or normalize(text))  # rule 1 removes no printable one


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadTextError("a lone surrogate (broken \\u escape)") from error


def is_removed(character: str) -> bool:
    """Return whether rule 1 removes a character."""
    return bool(_REMOVED.match(character))


def _without_line_ends(text: str) -> str:
    """Return `text` with spaces for tabs and the usual line ends, at the speed of memory."""
    return text.replace("\t", " ").replace("\r", " ").replace("\n", " ")


def _is_printable(text: str, apart: int = 0) -> bool:
    """Return `text.isprintable()`, for ASCII in a fraction of its time; `apart`: characters that
    lie between texts, and do not count. With these, False beyond ASCII.
    """
    if not text.isascii():
        return not apart and text.isprintable()
    return len(text.encode().translate(None, _PRINTABLE_ASCII)) == apart


def _printable(text: str) -> tuple[str, int]:
    """Return (`text` without what rule 1 removes, and U+0020 for all white space; how many went)"""
    _refuse_surrogates(text)
    text, removed = _REMOVED.subn("", text)
    for space in _OTHER_SPACES:
        text = text.replace(space, " ")
    return text, removed


def _collapse_spaces(text: str) -> str:
    """Return `text` with one space for each run of spaces."""
    if len(text) < _LONG:
        return " ".join(filter(None, map(str.strip, text.split("  "))))
    data = np.frombuffer(text.encode(), np.uint8)
    space = data == ord(" ")
    kept = np.ones(len(data), bool)
    np.logical_not(space[1:] & space[:-1], out=kept[1:])
    return data[kept].tobytes().decode()


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text.replace(SPACE_MARK, "_"))


def encodable_parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (part, starts_document): parts of bounded length whose encodings concatenate exactly.

    Cuts are at spaces, where SentencePiece starts afresh anyway. A stretch of 2**18 characters
    without a space is cut hard, and the rest starts a new document.
    """
    begin, starts_document = 0, True
    while len(text) - begin > ENCODE_CHARACTERS:
        space = text.rfind(" ", begin + 1, begin + ENCODE_CHARACTERS)
        end = space if space > 0 else begin + ENCODE_CHARACTERS
        yield text[begin:end], starts_document
        starts_document = space < 0
        begin = end + (space > 0)
    yield text[begin:], starts_document


def letter_share(text: str) -> float:
    """Return the share of letters among characters that are neither white space nor marks."""
    visible = len(text) - text.count(" ") - (0 if text.isascii() else len(_MARK.findall(text)))
    return sum(map(str.isalpha, text)) / visible if visible else 0.0
