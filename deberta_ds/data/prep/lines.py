"""Lines that are no text: menus, notices, calls for JavaScript. C4's rules (section 2.2)."""

import re

from deberta_ds.data.prep.filter_rules import LineRules
from deberta_ds.data.prep.filter_words import END_MARKS, QUOTES

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")


def without_lines(text: str, rules: LineRules) -> tuple[str, dict[str, int]]:
    """Return (the text that is left, {why lines went: how many})."""
    kept, gone, seen = [], {}, set()
    for line in text.split("\n"):
        if rules.citation_marks and "[" in line:
            line = _CITATION.sub("", line)
        reason = _why(line, rules, seen) if line.strip() else ""
        if reason:
            gone[reason] = gone.get(reason, 0) + 1
        else:
            kept.append(line)
    return "\n".join(kept), gone


def _why(line: str, rules: LineRules, seen: set[str]) -> str:
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
