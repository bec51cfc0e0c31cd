"""Lines of Python and shell stay within the table of CONTRIBUTING.md."""

import re

import pytest
from launching import ROOT

TABLE = re.findall(r"^\| `([^|]+)` \| ([\d,]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)


@pytest.mark.parametrize(("folders", "most"), TABLE, ids=[folders for folders, _ in TABLE])
def test_lines_are_within_their_budget(folders, most):
    files = [path for folder in folders.split("`, `") for path in (ROOT / folder).rglob("*")
             if path.suffix in (".py", ".sh") and "results" not in path.parts]
    found = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert found <= int(most.replace(",", "")), f"{folders}: {found:,} lines"


def test_the_table_is_there():
    assert [folders for folders, _ in TABLE] == ["deberta_ds", "tests", "benchmarks`, `tools"]
