r"""When two answers are the same text: SQuAD's rule, by language MLQA's, and for Korean KorQuAD's.

SQuAD's scripts know English: lower case, no ASCII punctuation, no a, an, the, words between spaces.
mlqa_evaluation_v1.py removes the punctuation of all of Unicode and each language's own articles,
and takes every Chinese character for a word. Japanese, Thai and others without spaces follow its
Chinese rule here, with the characters of their scripts. evaluate-v1.0.py of KorQuAD takes every
character for a word, and its marks of quotation for spaces.
"""

import re
import string
import unicodedata
from collections import Counter

# Articles as MLQA has them: the Arabic expression too, in which "^" never matches.
_ARTICLES = {
    "en": r"\b(a|an|the)\b",  # and SQuAD
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "hi": "",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
}
_MLQA_CHINESE = "[\u4e00-\u9fa5]"
# Thai, Lao, Tibetan, Burmese, Khmer; Han and kana with their extensions and half widths.
_UNSPACED = ("[\u0e00-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
             "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]")
_CHARACTERS = {"zh": _MLQA_CHINESE} | dict.fromkeys(("ja", "th", "lo", "my", "km"), _UNSPACED)
_HANGUL, _KOREAN_MARKS = "[\uac00-\ud7a3]", "['\"《》<>〈〉()‘’]"
LANGUAGES = (*_ARTICLES, *_CHARACTERS, "ko")
_LEAST_SHARE = 0.2  # of a text's characters: English ones with a few Chinese names stay below


def language_of(text: str) -> str:
    """Return the rule for answers in `text`: "ja" for scripts without spaces, "ko" for Hangul,
    else "" (SQuAD's).
    """
    for language, characters in (("ja", _UNSPACED), ("ko", _HANGUL)):
        found = len(re.findall(characters, text))
        if found and found >= _LEAST_SHARE * len(text):
            return language
    return ""


def normalize(answer: str, language: str = "") -> str:
    """Return an answer's words as they are compared, spaces between; "": SQuAD's rule."""
    if language == "ko":  # words are its characters; two spaces are where one was
        answer = re.sub(_KOREAN_MARKS, " ", answer.lower())
        kept = "".join(letter for letter in answer if letter not in string.punctuation)
        return "  ".join(map(" ".join, kept.split()))
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation
                   and not (language and unicodedata.category(letter).startswith("P")))
    if language in _CHARACTERS:
        kept = re.sub(f"({_CHARACTERS[language]})", r" \1 ", kept)
    elif articles := _ARTICLES[language or "en"]:
        kept = re.sub(articles, " ", kept)
    return " ".join(kept.split())


def token_f1(predicted: str, gold: str) -> float:
    """Return the F1 of two normalized answers as bags of words."""
    first, second = predicted.split(), gold.split()
    shared = sum((Counter(first) & Counter(second)).values())
    return 2 * shared / (len(first) + len(second)) if shared else 0.0
