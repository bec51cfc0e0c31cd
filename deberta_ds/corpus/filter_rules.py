"""What a filters file says: which rules are used, in which order, and their thresholds.

Defaults are the published ones: Gopher (Rae et al. 2021, arXiv 2112.11446, table A1 and section
A.1.1), C4 (Raffel et al. 2020, arXiv 1910.10683, section 2.2) and FineWeb (Penedo et al. 2024,
arXiv 2406.17557, section 3.6). They were chosen on English pages.
"""

import hashlib
from pathlib import Path
from typing import Literal, get_args

from pydantic.dataclasses import dataclass

from deberta_ds.config.options import STRICT, ConfigError, option, validate
from deberta_ds.config.toml_files import read_toml
from deberta_ds.corpus.language import check_languages

Rule = Literal["language", "lines", "c4", "gopher", "repetition", "fineweb", "personal"]
PersonalKind = Literal["email", "ip", "phone", "card", "iban"]
PERSONAL_KINDS: tuple[PersonalKind, ...] = get_args(PersonalKind)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LanguageRule:
    """Which languages are kept, by py3langid (97 languages)."""

    keep: tuple[str, ...] = option("ISO 639-1 codes, such as en; empty: all", ())
    probability: float = option("of the likeliest language, at least", 0.65, ge=0, le=1)
    characters: int = option("of a document that are looked at", 2000, ge=50)
    label: bool = option("count documents that have no label by their language", False)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LineRules:
    """Which lines are taken out of a document; C4's."""

    min_words: int = option("in a line; 0: any number", 3, ge=0)
    max_word_characters: int = option("a line with a longer word goes; 0: any", 1000, ge=0)
    end_mark: bool = option("a line must end in one of . ? ! or a quotation mark, or the like of "
                            "its script", True)
    phrases: tuple[str, ...] = option("a line with one of these goes, whatever its case", (
        "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies",
        "use of cookies", "use cookies"))
    repeated: bool = option("a line that the document had before goes", False)
    citation_marks: bool = option("take out [1], [edit] and [citation needed]", True)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class C4Rules:
    """C4's rules for a document; its rules for lines are `lines`, which comes before."""

    min_sentences: int = option("in what the lines rule has left", 5, ge=0)
    phrases: tuple[str, ...] = option("a document with one of these goes, whatever its case",
                                      ("lorem ipsum", "{"))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GopherRules:
    """Gopher's quality rules. In scripts without spaces each character is a word."""

    min_words: int = option("in a document", 50, ge=0)
    max_words: int = option("in a document; 0: any number", 100_000, ge=0)
    min_word_characters: float = option("mean, in scripts with spaces", 3.0, ge=0)
    max_word_characters: float = option("mean, in scripts with spaces; 0: any", 10.0, ge=0)
    max_symbol_share: float = option("hash signs, or ellipses, a word", 0.1, ge=0)
    max_bullet_share: float = option("of lines that begin with a bullet", 0.9, ge=0, le=1)
    max_ellipsis_share: float = option("of lines that end in an ellipsis", 0.3, ge=0, le=1)
    min_letter_word_share: float = option("of what stands between spaces: with a letter in it",
                                          0.8, ge=0, le=1)
    min_stop_words: int = option("different ones, in scripts with spaces; 0 for a language "
                                 "without a list here", 2, ge=0)
    stop_words: tuple[str, ...] = option("of the language", (
        "the", "be", "to", "of", "and", "that", "have", "with"))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class RepetitionRules:
    """Gopher's repetition rules: shares of lines, paragraphs and characters."""

    max_line_share: float = option("of lines that the document had before", 0.3, ge=0, le=1)
    max_paragraph_share: float = option("of such paragraphs", 0.3, ge=0, le=1)
    max_line_characters: float = option("of characters in such lines", 0.2, ge=0, le=1)
    max_paragraph_characters: float = option("of characters in such paragraphs", 0.2, ge=0, le=1)
    max_top_ngram: tuple[float, float, float] = option(
        "of characters in the most frequent run of 2, 3, 4 words", (0.2, 0.18, 0.16))
    max_repeated_ngram: tuple[float, float, float, float, float, float] = option(
        "of characters in repeated runs of 5, 6, ... 10 words",
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FinewebRules:
    """FineWeb's own rules."""

    min_end_mark_share: float = option("of lines that end in a mark", 0.12, ge=0, le=1)
    max_short_line_share: float = option("of lines of at most short_line characters", 0.67, ge=0,
                                         le=1)
    short_line: int = option("characters", 30, ge=1)
    max_repeated_characters: float = option("share in lines that the document had before", 0.01,
                                            ge=0, le=1)
    max_lines_a_word: float = option("line ends a word: lists", 0.3, ge=0)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PersonalRule:
    """What is done about personal data."""

    action: Literal["mask", "drop"] = option("mask: written over by a constant; drop: the document "
                                             "goes", "mask")
    kinds: tuple[PersonalKind, ...] = option(
        "what is looked for; card and iban by their check digits, ip public ones, phone with "
        "+country code", PERSONAL_KINDS)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FilterRules:
    """A filters file."""

    use: tuple[Rule, ...] = option("rules in their order", ())
    functions: tuple[str, ...] = option(
        "Python functions of your own, FILE.py:NAME, after the rules: text -> the text to keep, or "
        "None", ())
    language: LanguageRule = LanguageRule()
    lines: LineRules = LineRules()
    c4: C4Rules = C4Rules()
    gopher: GopherRules = GopherRules()
    repetition: RepetitionRules = RepetitionRules()
    fineweb: FinewebRules = FinewebRules()
    personal: PersonalRule = PersonalRule()
    examples: int = option("dropped documents shown of each reason", 20, ge=0, le=1000)

    def __post_init__(self):
        if not self.use and not self.functions:
            raise ValueError("uses no rule: name some under `use` or `functions`")
        if len(set(self.use)) < len(self.use):
            raise ValueError("`use` names a rule twice")


def read_rules(path: str | Path) -> FilterRules:
    """Return the rules of a TOML file; functions are found beside it. UserError for a bad one."""
    values = read_toml(path, "filters file", "data_prep/filters/web_en.toml")
    rules = validate(FilterRules, values, str(path))
    if "language" in rules.use:
        check_languages(rules.language.keep, f"{path}: language.keep")
    here = Path(path).resolve().parent
    found = []
    for name in rules.functions:
        file, separator, function = name.rpartition(":")
        if not separator or not file.endswith(".py") or not function.isidentifier():
            raise ConfigError(f"{path}: functions: {name!r} must be written FILE.py:NAME")
        if not (here / file).is_file():
            raise ConfigError(f"{path}: functions: {here / file}: no such file")
        found.append(f"{here / file}:{function}")
    return validate(FilterRules, values | {"functions": found}, str(path))


def function_digests(rules: FilterRules) -> list[str]:
    """Return name and sha256 of each function's file: a job is of other filters once one changes.
    """
    files = [name.rpartition(":") for name in rules.functions]
    return [f"{Path(file).name}:{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"
            for file, _, name in files]
