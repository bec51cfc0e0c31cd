"""Numbers of README and docs are those of benchmarks/results, of a shipped file or of a test.

A comment below a table names the source of each of its numbers:

    <!-- sources
    given: 8 50
    68.4 = 100 * novels.json:runs/scratch_mlm/blimp/all 67,000 pairs/pll_word/accuracy
    150k = first_contact-h100.txt:150k  15.2%
    -->

`given` are settings, not results. A source is a file of benchmarks/results (or a path of the
repository) and the keys of its JSON with / between, words of a text file, or a number; several are
joined by + - * and / with spaces around, from left to right. median, min, max, len before a file
take that of a list. In README, CHANGELOG and the cards of models every number of a table needs
one. On a page of evidence each section with such a table names a file, a command, a test or a
commit, or says that no file was kept.
"""

import json
import re
import statistics

import pytest
from launching import ROOT

REPOSITORY = re.search(r'REPOSITORY = "(.+)"', (ROOT / "setup.py").read_text()).group(1)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "examples/models").rglob("README.md"))]
_SOURCES = re.compile(r"<!-- sources\n(.*?)-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[kMBT]\b)?(?![\w-]*[A-Za-z]|\.?\d)")
_FILE = re.compile(r"`([\w./-]+\.(?:jsonl?|txt|py)|tests/\w+)`|python -m (benchmarks[\w.]+)")
_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_TAKE = {"median": statistics.median, "min": min, "max": max, "len": len}


def printed(word: str) -> tuple[float, float]:
    """Return a printed number and half a unit of its last digit."""
    unit = _UNITS.get(word[-1], 1.0)
    digits = word.rstrip("kMBT").replace(",", "")
    return float(digits) * unit, 0.5 * unit * 10.0 ** -len(digits.partition(".")[2])


def value_of(term: str, number: float) -> float:
    """Return what one term of a source is; `number` for words that a text file has."""
    if re.fullmatch(r"-?[\d.]+(e\d+)?", term):
        return float(term)
    take, _, rest = term.partition(" ")
    name, _, keys = (rest if take in _TAKE else term).partition(":")
    path = ROOT / name if "/" in name else ROOT / "benchmarks/results" / name
    if path.suffix != ".json":
        assert keys.strip(":") in path.read_text(encoding="utf-8"), term
        return number
    found = json.loads(path.read_text(encoding="utf-8"))
    for key in keys.split("/") if keys else ():
        found = found[int(key)] if isinstance(found, list) else found[key]
    return float(_TAKE[take](found) if take in _TAKE else found)


def value_of_source(source: str, number: float) -> float:
    """Return the value of a whole source, from left to right."""
    first, *rest = re.split(r" ([-+*/]) ", source.strip())
    total = value_of(first, number)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        other = value_of(term, number)
        total = {"+": total + other, "-": total - other, "*": total * other,
                 "/": total / other if sign == "/" else 0.0}[sign]
    return total


def claims(text: str) -> list[tuple[set[str], list[tuple[str, str]], str]]:
    """Return for each comment of a page: given numbers, (number, source), the text before it."""
    found, start = [], 0
    for match in _SOURCES.finditer(text):
        given, sourced = set(), []
        for line in match.group(1).splitlines():
            if line.startswith("given:"):
                given |= set(line.removeprefix("given:").split())
            elif line.strip():
                number, _, source = line.partition(" = ")
                sourced.append((number.strip(), source))
        found.append((given, sourced, text[start:match.start()]))
        start = match.end()
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_number_with_a_source_is_that_of_the_source(page):
    wrong = []
    for _, sourced, before in claims(page.read_text(encoding="utf-8")):
        for word, source in sourced:
            number, tolerance = printed(word)
            value = value_of_source(source, number)
            if abs(value - number) > tolerance * (1 + 1e-6) or word not in before:
                wrong.append(f"{word}: {source} is {value:.6g}, or the page has no {word}")
    assert not wrong, "\n".join(wrong)


def numbers_of_tables(text: str) -> list[str]:
    """Return the numbers in the tables of a text."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [word for row in rows for word in
            _NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv [\d.]+", " ", row))]


def test_each_number_in_a_table_has_a_source():
    for page in [page for page in PAGES if "docs" not in page.parts]:
        text = page.read_text(encoding="utf-8")
        for given, sourced, before in claims(text):
            known = given | {word for word, _ in sourced}
            assert not [word for word in numbers_of_tables(before) if word not in known], page
        assert not numbers_of_tables(_SOURCES.split(text)[-1]), page


def is_a_source(name: str, module: str) -> bool:
    """Return whether a section's `name`, or module of benchmarks, is a file that is there."""
    places = [name, f"benchmarks/results/{name}", f"tests/**/{name}"]
    return any(map(list, map(ROOT.glob, [f"{module.replace('.', '/')}.py"] if module else places)))


def missing_sources(text: str) -> list[str]:
    """Return the headings of sections that have a table of numbers and name no source."""
    return [section.splitlines()[0] for section in re.split(r"^(?=##+ )", text, flags=re.MULTILINE)
            if numbers_of_tables(section) and not (
                any(is_a_source(*found) for found in _FILE.findall(section))
                or re.search(r"`[0-9a-f]{8}:\S|No file of these runs was kept", section))]


def test_each_section_of_evidence_names_a_source():
    for page in (ROOT / "docs/evidence").glob("*.md"):
        assert not missing_sources(page.read_text(encoding="utf-8")), page


def test_a_wrong_number_and_a_wrong_key_are_found():
    key = "novels.json:runs/scratch_mlm/blimp/all 67,000 pairs/pll_word/accuracy"
    assert value_of_source(f"100 * {key}", 0) == pytest.approx(68.44, abs=0.01)
    assert printed("1.55M") == (1.55e6, 5e3) and printed("68.4")[1] == pytest.approx(0.05)
    row = "| v3-base on 8 x H100 | 68.4, 3,884 | `x 3` | 150k |"
    assert numbers_of_tables(row) == ["8", "68.4", "3,884", "150k"]
    assert missing_sources(f"## Speed\n{row}\n## Of\n{row}\n`no.json`\n") == ["## Speed", "## Of"]
    assert not missing_sources(f"## Speed (`demo.json`)\n{row}\n")
    with pytest.raises(KeyError):
        value_of_source("novels.json:runs/none", 0)


def test_the_address_of_the_repository_is_one():
    for name in ("mkdocs.yml", "CITATION.cff", "README.md"):
        found = set(re.findall(r"https://github\.com/deberta-ds/[\w.-]+|(?<=repo_url: )\S+|"
                               r"(?<=repository-code: )\S+",
                               (ROOT / name).read_text(encoding="utf-8")))
        assert {one.removesuffix(".git") for one in found} == {REPOSITORY}, name
