"""Which language a text is in: py3langid (97 languages), whose model comes with the package.

fastText's lid.176, which FineWeb uses, must be downloaded: a function of one's own can call it.
"""

from functools import cache

from deberta_ds.base.errors import UserError


def language_of(text: str) -> tuple[str, float]:
    """Return (ISO 639-1 code, probability); UserError where py3langid is not installed."""
    code, probability = _identifier().classify(text)
    return code, float(probability)


def check_languages(codes: tuple[str, ...], place: str) -> None:
    """UserError, which begins with `place`, unless all codes are known."""
    unknown = sorted(set(codes) - set(_identifier().labels))
    if unknown:
        raise UserError(f"{place}: {', '.join(map(repr, unknown))}: not known; known are "
                        f"{' '.join(sorted(_identifier().labels))}")


@cache
def _identifier():
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise UserError("the language rule needs py3langid: pip install py3langid") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
