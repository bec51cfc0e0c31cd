"""Entities of a text, {"text": "...", "label": [[0, 4, "PER"]]}, as characters [start, end) with a
name -> tags of words.

Every character of such a text has a tag: that of its token, of which the model learns one
(features.py). So entities may begin and end inside words, as Korean and German ones do.
"""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from deberta_ds.tokenizer.words import UNSPACED_SCRIPTS, is_unspaced

_WIDE = (*UNSPACED_SCRIPTS, (0x3001, 0x303F), (0xFF01, 0xFFEF))
PREFIXED = re.compile(r"[BIESLUM]-.+")  # a tag that says where an entity begins
Entity = tuple[int, int, str]
BAD_ENTITIES = (ValueError, TypeError, AttributeError, KeyError, IndexError)  # of `entities_of`


def is_entities(value: Any) -> bool:
    """Return whether a label is a list of entities (none of them: of nothing at all)."""
    return isinstance(value, list) and all(
        isinstance(part, dict) or (isinstance(part, list | tuple) and len(part) == 3)
        for part in value)


def entities_of(text: str, value: list) -> list[Entity]:
    """Return the entities of a text in order, without spaces at their ends."""
    found = sorted(_entity(text, part) for part in value)
    for (_, end, name), (start, _, other) in zip(found, found[1:], strict=False):
        if start < end:
            raise ValueError(f"{name} and {other} overlap at character {start}; a word has one tag,"
                             " so remove one of them")
    return found


def _entity(text: str, part: Any) -> Entity:
    start, end, name = part if isinstance(part, list | tuple) else (None, None, None)
    if type(start) is not int or type(end) is not int or not isinstance(name, str) or not name:
        raise ValueError(f"{part!r} is no entity; it is [start, end, label]. Convert exports of "
                         "annotation tools with examples/convert_annotations.py")
    if not 0 <= start < end <= len(text) or not text[start:end].strip():
        raise ValueError(f"{name} [{start}, {end}) is no part of a text of {len(text)} characters, "
                         "which are counted from 0, not bytes or units of UTF-16")
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip()), name


def words_in(text: str) -> list[tuple[int, int]]:
    """Return the characters [start, end) of every word: a run of letters, digits and marks, another
    character, or one of a script without spaces."""
    found: list[tuple[int, int]] = []
    goes_on = False  # the last word takes letters
    for place, character in enumerate(text):
        kind = unicodedata.category(character)
        letter = (kind[0] in "LN" or character == "_") and not is_unspaced(character)
        touches = bool(found) and found[-1][1] == place
        if touches and (kind[0] == "M" or kind == "Cf" or (letter and goes_on)):
            found[-1] = (found[-1][0], place + 1)
        elif not character.isspace():
            found.append((place, place + 1))
            goes_on = letter
    return found


def glued(words: list[str], spaces: bool) -> tuple[str, list[tuple[int, int]]]:
    """Return (words as one text, the characters of each): with spaces between, but for words of
    scripts without spaces; `spaces = False`: the words hold the spaces themselves."""
    text, places = "", []
    for word in words:
        if text and spaces and not (_is_wide(text[-1]) and _is_wide(word[:1])):
            text += " "
        places.append((len(text), len(text) + len(word)))
        text += word
    return text, places


def _is_wide(character: str) -> bool:
    """Return whether a script without spaces has this character, or its punctuation."""
    return any(low <= ord(character or " ") <= high for low, high in _WIDE)


def hold_spaces(words: Mapping[str, int]) -> bool:
    """Return whether words, with their counts, are all that a text is of: spaces are words too, or
    each is one character of a script that has none."""
    total = sum(words.values())
    blank = sum(count for word, count in words.items() if word.isspace())
    single = sum(count for word, count in words.items() if len(word) == 1)
    wide = sum(count for word, count in words.items() if _is_wide(word[:1]))
    return blank > 0.05 * total or (single == total and wide > total / 2)
