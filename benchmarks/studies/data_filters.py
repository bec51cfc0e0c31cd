"""Measure the filters on novels and on pages as the web has them, compared with datatrove's rules.

    python -m benchmarks.studies.data_filters filters --text DIR_OF_TXT --scratch DIR
    python -m benchmarks.studies.data_filters pages --text DIR_OF_TXT --scratch DIR

datatrove is taken where it is installed (`pip install --no-deps datatrove loguru humanize`).
"""

import importlib.util
import random
import re
import time
from collections import Counter
from typing import get_args

from benchmarks.data import main

CLEAN, DEBRIS = 2000, (
    "Home | About us | Products | Contact | Login", "Cookie policy: this site uses cookies.",
    "- item one\n- item two\n- item three\n- item four\n- item five\n- item six",
    "Read more...", "#travel #food #love #instagood #photooftheday", "Share this: Facebook Twitter",
    "* * * * * * * * * *", "BUY NOW!!! BEST PRICE!!! " * 6, "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    "Copyright 2024. All rights reserved. Terms of use.", "lorem ipsum dolor sit amet",
    "404 Not Found", "Tags: a, b, c, d, e, f, g, h", "\u2022 one\n\u2022 two\n\u2022 three",
    "You must be logged in to post a comment\n" * 4, "{ \"key\": [1, 2, 3] }")


def measure_filters(args) -> dict:
    """On chapters of novels."""
    text = "".join(p.read_text("utf-8") for p in sorted(args.text.rglob("*.txt"))[:12])
    chapters = re.split(r"(?m)^(?=CHAPTER|Chapter)", text.replace("\r", ""))
    return _measure([chapter for chapter in chapters if len(chapter) > 1000])


def measure_pages(args) -> dict:
    """On pages of 200 to 6,000 characters: stretches of the texts among menus, notices, lists and
    repeated lines, from none of them to little else.
    """
    generator, pages = random.Random(0), []
    lines = [line for p in sorted(args.text.rglob("*.txt"))
             for line in p.read_text("utf-8").splitlines() if line.strip()]
    for _ in range(CLEAN):
        start = generator.randrange(len(lines) - 100)
        page = lines[start : start + generator.choice((2, 5, 10, 30, 80))]
        for _ in range(generator.choice((0, 0, 1, 3, 6, 12, 25))):
            debris = generator.choice(DEBRIS)
            page[generator.randrange(len(page) + 1) : 0] = [debris] * generator.choice((1, 1, 1, 3))
        pages.append("\n".join(page)[:6000])
    return _measure(pages)


def _measure(texts: list[str]) -> dict:
    """Return MB a core second of each rule; the verdicts of datatrove's rules beside ours where it
    is installed, on the same words and sentences (its own split needs spaCy's models).
    """
    from deberta_ds.corpus.documents import Document
    from deberta_ds.corpus.filter_rules import FilterRules, LanguageRule, LineRules, Rule
    from deberta_ds.corpus.filters import Filters

    documents = [Document(text, "", 0, "text") for text in texts]
    size = sum(len(document.text.encode()) for document in documents)
    options = {"lines": LineRules(end_mark=False), "language": LanguageRule(keep=("en",))}
    seconds, kept = {}, {}
    rules = get_args(Rule)
    for use in [*((rule,) for rule in rules), rules]:
        filters = Filters(FilterRules(use=use, **options))
        filters(documents[0])
        start = time.process_time()
        reasons = [filters(document).reason for document in documents]
        name = "all" if len(use) > 1 else use[0]
        seconds[name] = time.process_time() - start
        kept[name] = [not reason for reason in reasons]
    found = {"documents": len(documents), "megabytes": round(size / 1e6, 1),
             "mb_a_core_second": {n: round(size / s / 1e6, 2) for n, s in seconds.items()},
             "kept": {name: sum(which) for name, which in kept.items()}}
    if importlib.util.find_spec("datatrove"):
        found["datatrove"] = _beside_datatrove(documents, size, kept)
    return found


def _beside_datatrove(documents: list, size: int, kept: dict[str, list[bool]]) -> dict:
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    from deberta_ds.corpus.quality import Text

    theirs = {"gopher": (gopher_quality_filter, "GopherQualityFilter"),
              "repetition": (gopher_repetition_filter, "GopherRepetitionFilter"),
              "fineweb": (fineweb_quality_filter, "FineWebQualityFilter")}
    found = {}
    for name, (module, kind) in theirs.items():
        module.split_into_words = lambda text, language: Text(text).tokens
        rule = getattr(module, kind)()
        start = time.process_time()
        verdicts = [rule.filter(Document(text=document.text, id="")) for document in documents]
        seconds = time.process_time() - start
        same = sum((verdict is True) == ours
                   for verdict, ours in zip(verdicts, kept[name], strict=True))
        others = Counter(str(verdict) for verdict, ours in zip(verdicts, kept[name], strict=True)
                         if (verdict is True) != ours)
        found[name] = {"mb_a_core_second": round(size / seconds / 1e6, 2), "same_verdict": same,
                       "theirs where they differ": dict(others)}
    return found


if __name__ == "__main__":
    main(__doc__, {"filters": measure_filters, "pages": measure_pages})
