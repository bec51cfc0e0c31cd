"""What a word of a text is, in any script: letters and digits with the marks on them.

A vowel sign of Devanagari or a vowel point of Hebrew is no letter by itself (Unicode's category M),
and what stands before and behind it is one word all the same; so are the joiners of Persian and
Bengali. In scripts written without spaces each letter, with its marks, is a word.
"""

import re
import unicodedata
from itertools import groupby

from deberta_ds.tokenizer import UNSPACED_SCRIPTS

_JOINERS = (0x200C, 0x200D)


def _class_of(codes: list[int]) -> str:
    """Return ascending code points as the inside of a regular expression's [...]."""
    ranges = [list(group) for _, group in groupby(enumerate(codes), lambda pair: pair[1] - pair[0])]
    return "".join(f"{chr(group[0][1])}-{chr(group[-1][1])}" for group in ranges)


UNSPACED = "".join(f"{chr(low)}-{chr(high)}" for low, high in UNSPACED_SCRIPTS)
_CODES = [code for code in (*range(0x300, 0x1FFFF), *range(0xE0100, 0xE01F0))  # all that have any
          if code in _JOINERS or unicodedata.category(chr(code))[0] == "M"]
MARKS = _class_of(_CODES)
_UNSPACED_MARKS = _class_of([code for code in _CODES if any(low <= code <= high for low, high
                                                            in UNSPACED_SCRIPTS)])
# Most words end before ASCII, where a look at the marks is spared.
LETTERS = f"[^\\W_{UNSPACED}]+(?:(?![\\0-\\x7f])[{MARKS}]+[^\\W_{UNSPACED}]*)*"
UNSPACED_LETTER = f"(?=\\w)[{UNSPACED}][{_UNSPACED_MARKS}]*"
WORD = re.compile(f"{LETTERS}|{UNSPACED_LETTER}")
