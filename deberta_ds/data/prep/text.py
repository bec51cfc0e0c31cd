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

import numpy as np

from deberta_ds.tokenizer import SPACE_MARK

TEXT_RULES_VERSION = 1
ENCODE_CHARACTERS = 1 << 18
_LONG = 1 << 13  # characters
_FRONT = 64  # characters, of a text of which only the front is looked at

_REMOVED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]"
)
_OTHER_SPACES = [chr(code) for code in range(0x0A, 0x3001) if chr(code).isspace()]
_PRINTABLE_ASCII = bytes(range(0x20, 0x7F))


class BadTextError(ValueError):
    """The text of one document breaks a rule."""


def normalise(text: str) -> str:
    """Return `text` under the rules above; BadTextError if it holds a lone surrogate."""
    return normalise_and_count(text)[0]


def normalise_and_count(text: str) -> tuple[str, int]:
    """Return (normalised text, number of characters that rule 1 removed)."""
    removed = 0
    # Replacements of single characters run at memory speed; other white space comes below.
    text = text.replace("\t", " ").replace("\r", " ").replace("\n", " ")
    if not _is_printable(text):  # it may hold other white space, or what is to be removed
        _refuse_surrogates(text)
        text, removed = _REMOVED.subn("", text)
        for space in _OTHER_SPACES:
            text = text.replace(space, " ")
    text = _collapse_spaces(text).strip(" ")
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.replace(SPACE_MARK, "_"))
    return text, removed


def has_text(text: str) -> bool:
    """Return whether `normalise` leaves anything of `text`, in a fraction of its time; BadTextError
    as there.
    """
    if not text.isascii():
        _refuse_surrogates(text)
    first = text[:1]
    if first.isspace():
        first = text[:_FRONT].lstrip()[:1]
    return bool(first and first.isprintable() or normalise(text))  # rule 1 removes no printable one


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadTextError("a lone surrogate (broken \\u escape)") from error


def is_removed(character: str) -> bool:
    """Return whether rule 1 removes a character."""
    return bool(_REMOVED.match(character))


def _is_printable(text: str) -> bool:
    """Return `text.isprintable()`, for ASCII in a fraction of its time."""
    if not text.isascii():
        return text.isprintable()
    data = text.encode()
    if len(data) < _LONG:  # here the calls of NumPy would cost more than the work
        return not data.translate(None, _PRINTABLE_ASCII)
    codes = np.frombuffer(data, np.uint8)
    return bool(codes.min() >= 0x20 and codes.max() < 0x7F)


def _collapse_spaces(text: str) -> str:
    """Return `text` with one space for each run of spaces."""
    if len(text) < _LONG:
        return " ".join(filter(None, map(str.strip, text.split("  "))))
    data = np.frombuffer(text.encode(), np.uint8)
    space = data == ord(" ")
    kept = np.ones(len(data), bool)
    np.logical_not(space[1:] & space[:-1], out=kept[1:])
    return data[kept].tobytes().decode()


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
    """Return the share of letters among the characters that are not white space."""
    visible = len(text) - text.count(" ")
    return sum(map(str.isalpha, text)) / visible if visible else 0.0
