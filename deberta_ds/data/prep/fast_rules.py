"""The text rules of text.py as steps of a normalizer of Hugging Face `tokenizers`, and the decoder
that gives normalised text back.

The rules go into the tokenizer.json of what this project trains or derives, so that raw text gives
the ids of normalised text there. `Precompiled` would leave clusters of 6 bytes and more uncomposed.
"""

import tokenizers
from tokenizers import decoders, normalizers

from deberta_ds.data.prep.text import is_removed
from deberta_ds.tokenizer import SPACE_MARK

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
