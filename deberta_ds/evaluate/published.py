"""Published scores on BLiMP to stand beside a model's: n-gram to GPT-2, and people."""

import json
from pathlib import Path

_FILE = Path(__file__).with_name("blimp_published.json")


def columns(paradigms: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return {model: {"overall" or phenomenon: accuracy}} for {paradigm: phenomenon}.

    Empty unless the paradigms are all 67 of BLiMP. Filtered versions of BLiMP have the same names
    and fewer pairs, so their scores differ by a few points.
    """
    published = json.loads(_FILE.read_text(encoding="utf-8"))
    if paradigms.keys() != published["paradigms"].keys():
        return {}
    return {model: _means(published["paradigms"], number, paradigms)
            for number, model in enumerate(published["columns"])}


def _means(scores: dict[str, list[float]], number: int, paradigms: dict[str, str]
           ) -> dict[str, float]:
    groups = {"overall": list(scores)}
    for paradigm, phenomenon in sorted(paradigms.items()):
        groups.setdefault(phenomenon, []).append(paradigm)
    return {group: sum(scores[name][number] for name in names) / len(names)
            for group, names in groups.items()}
