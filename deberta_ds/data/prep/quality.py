"""Rules that keep or drop a document as it is: each returns why it goes, or ""."""

from itertools import accumulate

import numpy as np

from deberta_ds.data.prep.filter_rules import C4Rules, FinewebRules, GopherRules, RepetitionRules
from deberta_ds.data.prep.filter_words import END_MARKS, QUOTES, Text

_TOP_RUNS, _REPEATED_RUNS = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_UNSPACED_WORD_LETTERS = 2  # of a mean Chinese or Japanese word: runs of 5 letters are everywhere
_BULLETS = ("•", "-", "*", "‣", "●")


def gopher(text: Text, rules: GopherRules) -> str:
    """Gopher, section A.1.1."""
    words, spaced = text.words, not text.is_unspaced
    if len(words) < max(rules.min_words, 1):
        return "few words"
    if rules.max_words and len(words) > rules.max_words:
        return "many words"
    if spaced:
        mean = sum(map(len, words)) / len(words)
        if mean < rules.min_word_characters:
            return "short words"
        if rules.max_word_characters and mean > rules.max_word_characters:
            return "long words"
    raw, tokens, lines = text.text, text.tokens, text.lines
    if raw.count("#") > rules.max_symbol_share * len(tokens):
        return "hash signs"
    if raw.count("...") + raw.count("…") > rules.max_symbol_share * len(tokens):
        return "ellipses"
    if sum(line.lstrip().startswith(_BULLETS) for line in lines) > (
            rules.max_bullet_share * len(lines)):
        return "bullets"
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) > (
            rules.max_ellipsis_share * len(lines)):
        return "lines end in ellipses"
    parts = raw.split()
    if not spaced:  # marks belong to the letter before them here too, and those alone count
        parts = words + [part for part in parts if not any(map(str.isalnum, part))]
    if sum(any(map(str.isalpha, part)) for part in parts) < (
            rules.min_letter_word_share * len(parts)):
        return "few letters"
    if spaced and rules.min_stop_words:
        if len(set(rules.stop_words).intersection(words)) < rules.min_stop_words:
            return "few stop words"
    return ""


def c4(text: Text, rules: C4Rules) -> str:
    """C4, section 2.2; the rules for its lines are in `lines.py`."""
    lowered = text.text.lower()
    for phrase in rules.phrases:
        if phrase.lower() in lowered:
            return f"{phrase!r}"
    return "few sentences" if text.sentences() < rules.min_sentences else ""


def fineweb(text: Text, rules: FinewebRules) -> str:
    """FineWeb, section 3.6."""
    lines = text.lines
    if not lines:
        return "empty"
    ended = sum(line.rstrip().endswith((*END_MARKS, *QUOTES)) for line in lines)
    if ended < rules.min_end_mark_share * len(lines):
        return "few lines end in a mark"
    short = sum(len(line) <= rules.short_line for line in lines)
    if short > rules.max_short_line_share * len(lines):
        return "short lines"
    if _repeated(lines)[1] > rules.max_repeated_characters * sum(map(len, lines)):
        return "repeated lines"
    if text.text.count("\n") > rules.max_lines_a_word * len(text.tokens):
        return "lists"
    return ""


def repetition(text: Text, rules: RepetitionRules) -> str:
    """Gopher, table A1. In scripts without spaces a run of n words is one of 2 n letters."""
    size = max(len(text.text), 1)
    for parts, name, share, characters in (
            (text.paragraphs, "paragraphs", rules.max_paragraph_share,
             rules.max_paragraph_characters),
            (text.lines, "lines", rules.max_line_share, rules.max_line_characters)):
        count, length = _repeated(parts)
        if count > share * len(parts) or length > characters * size:
            return f"repeated {name}"
    runs, tokens_a_word = _Runs(text.tokens), _UNSPACED_WORD_LETTERS if text.is_unspaced else 1
    for count, share in zip(_TOP_RUNS, rules.max_top_ngram, strict=True):
        if runs.top_characters(count * tokens_a_word) > share * size:
            return f"one run of {count} words"
    for count, share in zip(_REPEATED_RUNS, rules.max_repeated_ngram, strict=True):
        if runs.repeated_characters(count * tokens_a_word, share * size) > share * size:
            return f"repeated runs of {count} words"
    return ""


def _repeated(parts: list[str]) -> tuple[int, int]:
    """Return (number, characters) of the parts that came before."""
    if len(set(parts)) == len(parts):
        return 0, 0
    seen, count, length = set(), 0, 0
    for part in parts:
        if part in seen:
            count, length = count + 1, length + len(part)
        seen.add(part)
    return count, length


class _Runs:
    """Runs of n words of one document, each known by a number."""

    def __init__(self, words: list[str]):
        numbers: dict[str, int] = {}
        self._words = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words),
                                  np.int64, len(words))
        self._ends = np.fromiter(accumulate(map(len, words), initial=0), np.int64, len(words) + 1)
        self._runs, self._length = self._words, 1  # the runs of `_length` words, numbered

    def _of(self, count: int) -> np.ndarray:
        """Return the number of the run of `count` words at each place; call with rising counts."""
        while self._length < count and len(self._runs) > 1:
            pairs = self._runs[:-1] * (len(self._words) + 1) + self._words[self._length:]
            self._runs = np.unique(pairs, return_inverse=True)[1]
            self._length += 1
        return self._runs if self._length == count else self._runs[:0]

    def _characters(self, count: int) -> np.ndarray:
        return self._ends[count:] - self._ends[:-count]

    def top_characters(self, count: int) -> int:
        """Return the characters, with the spaces between words, in the most frequent run."""
        runs = self._of(count)
        if not len(runs):
            return 0
        times = np.bincount(runs)
        first = int(np.flatnonzero(times[runs] == times.max())[0])
        return int(times.max()) * (int(self._characters(count)[first]) + count - 1)

    def repeated_characters(self, count: int, enough: float) -> int:
        """Return the characters in runs that came before, without overlaps (at most `enough`
        characters: some number that is not more).
        """
        runs = self._of(count)
        is_new = np.zeros(len(runs), bool)
        is_new[np.unique(runs, return_index=True)[1]] = True
        lengths = self._characters(count)
        if int(lengths[~is_new].sum() if len(runs) else 0) <= enough:
            return 0
        seen, place, total = set(), 0, 0
        numbers = runs.tolist()
        while place < len(numbers):
            if numbers[place] in seen:
                total += int(lengths[place])
                place += count
            else:
                seen.add(numbers[place])
                place += 1
        return total
