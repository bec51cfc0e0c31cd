"""The text rules of text.py as rules of SentencePiece's own normalizer.

They go into the model file, so that whoever encodes with it, here or elsewhere, turns soft hyphens,
zero-width characters, odd spaces and decomposed letters into what the model was trained on. Text
that is normalised already is not changed. What a table of sequences cannot say is left out: marks
in another order than the canonical one that compose to no single character.
"""

import itertools
import unicodedata

from deberta_ds.data.prep.text import is_removed
from deberta_ds.tokenizer import SPACE_MARK

_HANGUL, _LEADS, _VOWELS, _TAILS = 0xAC00, 0x1100, 0x1161, 0x11A7
_VOWEL_COUNT, _TAIL_COUNT = 21, 28


def normalizer_tsv() -> str:
    """Return the table for SentencePiece: "source<TAB>target" in hexadecimal code points."""
    rules = {SPACE_MARK: "_"}
    for code in itertools.chain(range(1, 0xD800), range(0xE000, 0x110000)):
        character = chr(code)
        if is_removed(character):
            rules[character] = ""
        elif character.isspace() and character != " ":
            rules[character] = " "
        elif unicodedata.decomposition(character)[:1] not in ("", "<"):
            rules |= dict.fromkeys(_decomposed(character), unicodedata.normalize("NFC", character))
    rules |= _hangul()
    return "".join(f"{_codes(source)}\t{_codes(target)}\n"
                   for source, target in sorted(rules.items()))


def _decomposed(character: str) -> set[str]:
    """Return what composes to the same text as `character`, but is not composed yet."""
    target = unicodedata.normalize("NFC", character)
    first, *marks = unicodedata.normalize("NFD", character)
    found = {character}
    for order in itertools.permutations(marks):
        whole = first + "".join(order)
        for cut in range(1, len(whole) + 1):
            found.add(unicodedata.normalize("NFC", whole[:cut]) + whole[cut:])
    return {text for text in found
            if text != target and unicodedata.normalize("NFC", text) == target}


def _hangul() -> dict[str, str]:
    """Return jamo -> syllable, whole or with the first two composed."""
    rules = {}
    for index in range(19 * _VOWEL_COUNT * _TAIL_COUNT):
        rest, tail = divmod(index, _TAIL_COUNT)
        lead, vowel = divmod(rest, _VOWEL_COUNT)
        start = chr(_LEADS + lead) + chr(_VOWELS + vowel)
        syllable = chr(_HANGUL + index)
        if tail:
            rules[start + chr(_TAILS + tail)] = syllable
            rules[chr(_HANGUL + index - tail) + chr(_TAILS + tail)] = syllable
        else:
            rules[start] = syllable
    return rules


def _codes(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
