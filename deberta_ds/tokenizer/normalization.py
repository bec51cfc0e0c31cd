"""The text rules of text.py as steps of a normalizer of Hugging Face `tokenizers`, and the decoder
that gives normalized text back.

The rules go into the tokenizer.json of what this project trains or derives, so that raw text gives
the ids of normalized text there. `Precompiled` would leave clusters of 6 bytes and more uncomposed.
"""

import itertools
import unicodedata
from functools import cache

import tokenizers
from tokenizers import decoders, normalizers

from deberta_ds.tokenizer import SPACE_MARK
from deberta_ds.tokenizer.text import is_removed

# A class of all characters that Python and our tokenizer take for white space.
_SPACES = "[" + "".join(f"\\x{{{code:X}}}" for code in range(0x3001) if chr(code).isspace()) + "]"

OUTER_SPACES = r"\A | \z"
LAST_SPACE = r" \z"  # for Metaspace, which needs the first to tell what follows a special token


def plain_spaces() -> list[normalizers.Normalizer]:
    """Return the step that makes every kind of white space U+0020."""
    return [normalizers.Replace(tokenizers.Regex(_SPACES), " ")]


def characters() -> list[normalizers.Normalizer]:
    """Return the steps of rules 1 to 3."""
    # What the text rules remove, but NUL, which SentencePiece cannot name.
    removed = "".join(f"\\x{{{code:X}}}" for code in range(1, 0x10000) if is_removed(chr(code)))
    # A text that began later than its first character would get no space mark from Metaspace.
    return [normalizers.Replace(tokenizers.Regex(rf"\A[{removed}]+"), " "),
            normalizers.Replace(tokenizers.Regex(f"[{removed}]"), ""),
            normalizers.Replace(SPACE_MARK, "_"), normalizers.NFC()]


def single_spaces(ends: str | None = None) -> list[normalizers.Normalizer]:
    """Return the steps of rule 4.

    ends: the spaces to take away at the ends, LAST_SPACE or OUTER_SPACES; None: all white space.
    """
    marks = tokenizers.Regex(f"[ {SPACE_MARK}]+")
    strip = normalizers.Replace(tokenizers.Regex(ends), "") if ends else normalizers.Strip()
    return [normalizers.Replace(marks, " "), strip]


def decoder() -> decoders.Decoder:
    """Return what turns pieces with the space mark, and bytes for the rest, into their text."""
    return decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(),
                              decoders.Fuse(), decoders.Strip(" ", 1, 0)])


# The text rules of text.py as rules of SentencePiece's own normalizer.
#
# They go into the model file, so that whoever encodes with it, here or elsewhere, turns soft
# hyphens, zero-width characters, odd spaces and decomposed letters into what the model was trained
# on. Text that is normalized already is not changed. What a table of sequences cannot say is left
# out: marks in another order than the canonical one that compose to no single character.


@cache  # half a second, and the same for every tokenizer of a process
def normalizer_tsv(lower_case: bool = False) -> str:
    """Return the table for SentencePiece: "source<TAB>target" in hexadecimal code points."""
    rules = {SPACE_MARK: "_"}
    for code in itertools.chain(range(1, 0xD800), range(0xE000, 0x110000)):
        character = chr(code)
        if is_removed(character):
            rules[character] = ""
        elif character.isspace() and character != " ":
            rules[character] = " "
        elif unicodedata.decomposition(character)[:1] not in ("", "<") or (
                "\uac00" <= character <= "\ud7a3"):  # Hangul syllables, composed by a formula
            rules |= dict.fromkeys(_decomposed(character), unicodedata.normalize("NFC", character))
    if lower_case:
        letters = {character: character for character in map(chr, range(0x110000))
                   if character.lower() != character}
        rules = {source: target.lower() for source, target in (letters | rules).items()}
    return "".join(f"{_codes(source)}\t{_codes(target)}\n"
                   for source, target in sorted(rules.items()))


def _decomposed(character: str) -> set[str]:
    """Return what composes to the same text as `character`, but is not composed yet."""
    target = unicodedata.normalize("NFC", character)
    parts = unicodedata.normalize("NFD", character)
    first, marks = parts[0], parts[1:]
    found = {character}
    for order in itertools.permutations(marks):
        whole = first + "".join(order)
        for cut in range(1, len(whole) + 1):
            found.add(unicodedata.normalize("NFC", whole[:cut]) + whole[cut:])
    return {text for text in found
            if text != target and unicodedata.normalize("NFC", text) == target}


def _codes(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
