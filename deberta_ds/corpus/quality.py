"""Rules that keep or drop a document as it is: each returns why it goes, or ""."""

import ipaddress
import re
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from deberta_ds.corpus import filter_rules
from deberta_ds.tokenizer.text import LETTERS, UNSPACED, UNSPACED_LETTER

# A document's words, lines and sentences, as the filters count them.
# A word with what ties its parts (don't, well-known, 3.5); one letter of a script without spaces;
# or a run of one mark of punctuation.
_TOKEN = re.compile(f"{LETTERS}(?:['’.\\-]{LETTERS})*|{UNSPACED_LETTER}" r"|([^\w\s]|_)\1*")
_UNSPACED_LETTER = re.compile(UNSPACED_LETTER)
END_MARKS = (".", "?", "!", "…", "。", "？", "！", "｡", "।", "॥", "؟", "۔", "።", "፧", "။", "།",
             "។", "៕", "։")
QUOTES = ('"', "'", "”", "’", "»", "」", "』")
_SENTENCE_END = re.compile(f"[{re.escape(''.join(END_MARKS))}]+[{re.escape(''.join(QUOTES))})\\]]*"
                           f"(?=\\s|$|[{UNSPACED}])")
_LINE_END = re.compile("\r\n?|\x85|\u2028")
_PARAGRAPH_END = re.compile(r"\n{2,}")


class Text:
    """One document's text, split once however many rules ask for it."""

    def __init__(self, text: str):
        self.text = _LINE_END.sub("\n", text.replace("\u2029", "\n\n"))

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
        """Paragraphs, which end at an empty line."""
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


_TOP_RUNS, _REPEATED_RUNS = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_UNSPACED_WORD_LETTERS = 2  # of a mean Chinese or Japanese word: runs of 5 letters are everywhere
_BULLETS = ("•", "-", "*", "‣", "●")


def gopher(text: Text, rules: filter_rules.GopherRules) -> str:
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


def c4(text: Text, rules: filter_rules.C4Rules) -> str:
    """C4, section 2.2; the rules for its lines are those of `without_lines`."""
    lowered = text.text.lower()
    for phrase in rules.phrases:
        if phrase.lower() in lowered:
            return f"{phrase!r}"
    return "few sentences" if text.sentences() < rules.min_sentences else ""


def fineweb(text: Text, rules: filter_rules.FinewebRules) -> str:
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


def repetition(text: Text, rules: filter_rules.RepetitionRules) -> str:
    """Gopher, table A1. In scripts without spaces a run of n words is one of 2 n letters."""
    size = max(len(text.text), 1)
    for parts, name, share, characters in (
            (text.paragraphs, "paragraphs", rules.max_paragraph_share,
             rules.max_paragraph_characters),
            (text.lines, "lines", rules.max_line_share, rules.max_line_characters)):
        count, length = _repeated(parts)
        if count > share * len(parts) or length > characters * size:
            return f"repeated {name}"
    runs, tokens_a_word = Runs(text.tokens), _UNSPACED_WORD_LETTERS if text.is_unspaced else 1
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


class Runs:
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
        if times.max() == 1:  # what occurs once repeats nothing
            return 0
        first = int(np.flatnonzero(times[runs] == times.max())[0])
        return int(times.max()) * (int(self._characters(count)[first]) + count - 1)

    def repeated_characters(self, count: int, enough: float) -> int:
        """Return the characters in runs that came before, no overlaps, counted up to `enough`."""
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


# Lines that are no text: menus, notices, calls for JavaScript. C4's rules (section 2.2).
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")


def without_lines(text: str, rules: filter_rules.LineRules) -> tuple[str, dict[str, int]]:
    """Return (the text that is left, {why lines went: how many})."""
    kept = []
    gone: dict[str, int] = {}
    seen: set[str] = set()
    for line in text.split("\n"):
        if rules.citation_marks and "[" in line:
            line = _CITATION.sub("", line)
        reason = _why(line, rules, seen) if line.strip() else ""
        if reason:
            gone[reason] = gone.get(reason, 0) + 1
        else:
            kept.append(line)
    return "\n".join(kept), gone


def _why(line: str, rules: filter_rules.LineRules, seen: set[str]) -> str:
    words = line.split()
    if rules.max_word_characters and max(map(len, words)) > rules.max_word_characters:
        return "a very long word"
    stripped = line.strip()
    if rules.end_mark and (not stripped.endswith((*END_MARKS, *QUOTES))
                           or stripped.endswith(("...", "…"))):
        return "no end mark"
    if len(words) < rules.min_words and len(stripped) < 4 * rules.min_words:
        return "few words"
    lowered = stripped.lower()
    for phrase in rules.phrases:
        if phrase.lower() in lowered:
            return phrase
    if rules.repeated:
        if stripped in seen:
            return "repeated"
        seen.add(stripped)
    return ""


# Personal data in text: e-mail and public IP addresses, telephone, card and account numbers.
#
# What is found is masked by a constant that stands for nobody: a name under example.com, an
# address reserved for documentation (RFC 2606, RFC 5737), zeros. Card numbers must pass Luhn's
# check (ISO/IEC 7812-1) and account numbers the one of ISO 13616 (mod 97), so that other long
# numbers stay.
# What stands next to them is looked at in ASCII: Han, Kana or Thai letters follow without a space.
_EMAIL = re.compile(r"(?<![A-Za-z0-9_.+-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+"
                    r"[A-Za-z]{2,24}(?![A-Za-z0-9_-])")
_IP = re.compile(r"(?<![A-Za-z0-9_.])(?:\d{1,3}\.){3}\d{1,3}(?![A-Za-z0-9_.]*\d)")
_PHONE = re.compile(r"(?<![A-Za-z0-9_+])\+[1-9]\d{0,2}(?:[ ().-]{0,2}\d){6,12}(?!\d)")
_CARD = re.compile(r"(?<![A-Za-z0-9_.-])\d(?:[ -]?\d){12,18}(?![A-Za-z0-9_-])")
_IBAN = re.compile(r"(?<![A-Za-z0-9_])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?"
                   r"(?![A-Za-z0-9_])")


def find_personal(text: str, kinds: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """Return (the text with what was found masked, {kind: how many})."""
    found: dict[str, int] = {}
    for kind in kinds:
        mark, pattern, *_ = _KINDS[kind]
        if mark in text:
            text = pattern.sub(partial(_masked, kind=kind, found=found), text)
    return text, found


def _masked(match: re.Match, kind: str, found: dict[str, int]) -> str:
    """Return the mask of a match that is what it looks like, and count it; the match of another."""
    *_, is_one, mask = _KINDS[kind]
    if match[0] == mask or not is_one(match[0]):
        return match[0]
    found[kind] = found.get(kind, 0) + 1
    return mask


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_card(text: str) -> bool:
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    plain = text.replace(" ", "")
    rotated = plain[4:] + plain[:4]
    return int("".join(str(int(character, 36)) for character in rotated)) % 97 == 1


_KINDS = {"email": ("@", _EMAIL, lambda text: True, "name@example.com"),
          "ip": (".", _IP, _is_public, "192.0.2.1"),
          "iban": ("", _IBAN, _is_iban, "XX00 0000 0000 0000 0000"),
          "card": ("", _CARD, _is_card, "0000 0000 0000 0000"),
          "phone": ("+", _PHONE, lambda text: True, "+1 555 0100")}
