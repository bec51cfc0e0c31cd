"""Links of the documentation lead somewhere, its generated pages are current, its tutorial runs."""

import re
import runpy

import pytest
from launching import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ds_configs/README.md",
         *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(path) -> str:
    """Return a page without its fenced blocks and code."""
    kept, is_fenced = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        is_fenced ^= line.startswith("```")
        kept.append("" if is_fenced or line.startswith("```") else line)
    return "\n".join(kept)


def anchors(path) -> set[str]:
    """Return the anchors that a page's headings have, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", one.lower()).strip())
            for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_and_anchor_resolves(page):
    found = _LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page)))
    for link in found:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_every_page_that_code_names_is_there():
    folders = ("deberta_ds", "launch", "data_prep", "benchmarks", "tests", "tools", "ds_configs",
               "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")
             if path.suffix in (".py", ".toml", ".md", ".sh", ".sbatch", ".html")]
    for path in files:
        for name in re.findall(r"docs/[\w/-]+\.(?:md|py|png|svg)", path.read_text("utf-8")):
            assert (ROOT / name).is_file(), f"{path} names {name}"


def test_the_page_of_commands_is_current():
    made = runpy.run_path(str(ROOT / "docs/make_commands.py"))
    assert (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8") == made["page"](), (
        "run python docs/make_commands.py")
