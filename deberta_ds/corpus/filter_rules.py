"""What a filters file says: which rules are used, in which order, and their thresholds.

Defaults are the published ones: Gopher (Rae et al. 2021, arXiv 2112.11446, table A1 and section
A.1.1), C4 (Raffel et al. 2020, arXiv 1910.10683, section 2.2) and FineWeb (Penedo et al. 2024,
arXiv 2406.17557, section 3.6). They were chosen on English pages.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds.base.errors import ConfigError, UserError, of_extra
from deberta_ds.base.user_code import is_own, split
from deberta_ds.config.options import STRICT, option, validate
from deberta_ds.config.toml_files import read_toml

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rule = Literal["language", "lines", "c4", "gopher", "repetition", "fineweb", "personal"]
PersonalKind = Literal["email", "ip", "phone", "card", "iban"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LanguageRule:
    """Which languages are kept, by py3langid (97 languages)."""

    keep: tuple[str, ...] = option("ISO 639-1 codes of the languages to keep, such as en; empty: "
                                   "all", ())
    probability: Share = option("smallest probability of the most likely language", 0.65)
    characters: int = option("characters of a document that are examined", 2000, ge=50)
    label: bool = option("count documents without a label by their language", False)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LineRules:
    """Which lines are taken out of a document; C4's."""

    min_words: Count = option("fewest words of a line; 0: any number", 3)
    max_word_characters: Count = option("longest word of a line, in characters; 0: any length",
                                        1000)
    end_mark: bool = option("a line must end in one of . ? ! or a quotation mark, or in the "
                            "equivalent of its script", True)
    phrases: tuple[str, ...] = option("remove lines with one of these phrases, in any case", (
        "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies",
        "use of cookies", "use cookies"))
    repeated: bool = option("remove lines that occurred earlier in the document", False)
    citation_marks: bool = option("remove [1], [edit] and [citation needed]", True)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class C4Rules:
    """C4's rules for a document; its rules for lines are `lines`, which comes before."""

    min_sentences: Count = option("fewest sentences of a document after the lines rule", 5)
    phrases: tuple[str, ...] = option("remove documents with one of these phrases, in any case",
                                      ("lorem ipsum", "{"))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GopherRules:
    """Gopher's quality rules. In scripts without spaces each character is a word."""

    min_words: Count = option("fewest words of a document", 50)
    max_words: Count = option("most words of a document; 0: any number", 100_000)
    min_word_characters: Number = option("smallest mean word length, in scripts with spaces", 3.0)
    max_word_characters: Number = option("largest mean word length, in scripts with spaces; 0: any "
                                         "length", 10.0)
    max_symbol_share: Number = option("most hash signs per word, and most ellipses per word", 0.1)
    max_bullet_share: Share = option("largest share of lines that begin with a bullet", 0.9)
    max_ellipsis_share: Share = option("largest share of lines that end in an ellipsis", 0.3)
    min_letter_word_share: Share = option("smallest share of words (text between spaces) with a "
                                          "letter", 0.8)
    min_stop_words: Count = option("fewest different stop words, in scripts with spaces; 0 for a "
                                   "language without a list", 2)
    stop_words: tuple[str, ...] = option("stop words of the language", (
        "the", "be", "to", "of", "and", "that", "have", "with"))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class RepetitionRules:
    """Gopher's repetition rules: shares of lines, paragraphs and characters."""

    max_line_share: Share = option("largest share of lines that repeat an earlier line", 0.3)
    max_paragraph_share: Share = option("largest share of paragraphs that repeat an earlier "
                                        "paragraph", 0.3)
    max_line_characters: Share = option("largest share of characters in repeated lines", 0.2)
    max_paragraph_characters: Share = option("largest share of characters in repeated paragraphs",
                                             0.2)
    max_top_ngram: tuple[float, float, float] = option(
        "largest share of characters in the most frequent n-gram of 2, 3, 4 words",
        (0.2, 0.18, 0.16))
    max_repeated_ngram: tuple[float, float, float, float, float, float] = option(
        "largest share of characters in repeated n-grams of 5, 6, ... 10 words",
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FinewebRules:
    """FineWeb's own rules."""

    min_end_mark_share: Share = option("smallest share of lines that end in a punctuation mark",
                                       0.12)
    max_short_line_share: Share = option("largest share of lines of at most short_line characters",
                                         0.67)
    short_line: int = option("length of a short line, in characters", 30, ge=1)
    max_repeated_characters: Share = option("largest share of characters in repeated lines", 0.01)
    max_lines_a_word: Number = option("most line ends per word; more is a list", 0.3)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PersonalRule:
    """What is done about personal data."""

    action: Literal["mask", "drop"] = option("mask: replace personal data by a constant; drop: "
                                             "remove the document", "mask")
    kinds: tuple[PersonalKind, ...] = option(
        "kinds of personal data to find. card and iban must have valid check digits, ip must be "
        "public, phone must have a +country code", get_args(PersonalKind))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FilterRules:
    """A filters file."""

    use: tuple[Rule, ...] = option("rules to apply, in order", ())
    functions: tuple[str, ...] = option("your own Python functions, FILE.py:NAME, applied after "
                                        "the rules: text -> the text to keep, or None", ())
    language: LanguageRule = LanguageRule()
    lines: LineRules = LineRules()
    c4: C4Rules = C4Rules()
    gopher: GopherRules = GopherRules()
    repetition: RepetitionRules = RepetitionRules()
    fineweb: FinewebRules = FinewebRules()
    personal: PersonalRule = PersonalRule()
    examples: int = option("dropped documents to show per reason", 20, ge=0, le=1000)

    def __post_init__(self):
        if not self.use and not self.functions:
            raise ValueError("uses no rule: name some under `use` or `functions`")
        if len(set(self.use)) < len(self.use):
            raise ValueError("`use` names a rule twice")


def read_rules(path: str | Path) -> FilterRules:
    """Return the rules of a TOML file; functions are found next to it. UserError for a bad one."""
    values = read_toml(path, "filters file", "data_prep/filters/web_en.toml")
    rules = validate(FilterRules, values, str(path))
    known = _identifier().labels if "language" in rules.use else rules.language.keep
    if unknown := sorted(set(rules.language.keep) - set(known)):
        raise UserError(f"{path}: language.keep: {', '.join(map(repr, unknown))}: not known; known "
                        f"are {' '.join(sorted(known))}")
    here = Path(path).resolve().parent
    found = []
    for name in rules.functions:
        file, function = split(name) if is_own(name) else ("", "")
        if not function:
            raise ConfigError(f"{path}: functions: {name!r} must be written FILE.py:NAME")
        if not (here / file).is_file():
            raise ConfigError(f"{path}: functions: {here / file}: no such file")
        found.append(f"{here / file}:{function}")
    return validate(FilterRules, values | {"functions": found}, str(path))


def language_of(text: str) -> tuple[str, float]:
    """Return (ISO 639-1 code, probability); UserError where py3langid is not installed."""
    code, probability = _identifier().classify(text)
    return code, float(probability)


@cache
def _identifier():
    with of_extra("languages", "the language rule"):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
