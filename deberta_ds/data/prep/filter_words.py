"""A document's words, lines and sentences, as the filters count them."""

import re
from functools import cached_property

from deberta_ds.data.prep.words import LETTERS, UNSPACED, UNSPACED_LETTER

# A word with what ties its parts (don't, well-known, 3.5); one letter of a script without spaces;
# or a run of one mark of punctuation.
_TOKEN = re.compile(f"{LETTERS}(?:['’.\\-]{LETTERS})*|{UNSPACED_LETTER}" r"|([^\w\s]|_)\1*")
_UNSPACED_LETTER = re.compile(UNSPACED_LETTER)
END_MARKS = (".", "?", "!", "…", "。", "？", "！", "｡", "।", "॥", "؟", "۔", "።", "፧", "။", "།",
             "។", "៕", "։")
QUOTES = ('"', "'", "”", "’", "»", "」", "』")
_SENTENCE_END = re.compile(f"[{re.escape(''.join(END_MARKS))}]+[{re.escape(''.join(QUOTES))})\\]]*"
                           f"(?=\\s|$|[{UNSPACED}])")
_PARAGRAPH_END = re.compile(r"\n{2,}")


class Text:
    """One document's text, split once however many rules ask for it."""

    def __init__(self, text: str):
        self.text = text.replace("\r\n", "\n") if "\r" in text else text

    @cached_property
    def tokens(self) -> list[str]:
        """Words and marks in order."""
        return [match[0] for match in _TOKEN.finditer(self.text)]

    @cached_property
    def words(self) -> list[str]:
        """The tokens that begin with a letter or digit."""
        return [token for token in self.tokens if token[0].isalnum()]

    @cached_property
    def lines(self) -> list[str]:
        """The lines that hold anything."""
        return [line for line in self.text.split("\n") if line.strip()]

    @cached_property
    def paragraphs(self) -> list[str]:
        return _PARAGRAPH_END.split(self.text.strip())

    @cached_property
    def is_unspaced(self) -> bool:
        """Whether most of its words are single characters of a script without spaces."""
        if self.text.isascii():
            return False
        return sum(1 for _ in _UNSPACED_LETTER.finditer(self.text)) * 2 > len(self.words)

    def sentences(self) -> int:
        """Return how many sentences end here; a line without an end mark is one."""
        ends = sum(1 for _ in _SENTENCE_END.finditer(self.text))
        return ends + sum(not line.rstrip().endswith((*END_MARKS, *QUOTES, ")"))
                          for line in self.lines)
