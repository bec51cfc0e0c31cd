"""Links of the documentation lead somewhere, its generated pages are current, its tutorial runs."""

import json
import os
import re
import runpy
import subprocess

import pytest
import rank_helpers
from launching import ENVIRONMENT, ROOT

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


def test_every_page_begins_with_what_the_reader_can_do_after_it():
    for page in (ROOT / "docs").rglob("*.md"):
        first = page.read_text(encoding="utf-8").split("\n\n")[1]
        assert first.startswith("After this page you "), page


def test_every_page_that_code_names_is_there():
    folders = ("deberta_ds", "launch", "data_prep", "benchmarks", "tests", "tools", "ds_configs",
               "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")
             if path.suffix in (".py", ".toml", ".md", ".sh", ".sbatch", ".html")]
    for path in files:
        for name in re.findall(r"docs/[\w/-]+\.(?:md|py|png|svg)", path.read_text("utf-8")):
            assert (ROOT / name).is_file(), f"{path} names {name}"


@pytest.mark.parametrize("script, name", [("make_commands", "commands"),
                                          ("make_api", "python-api")])
def test_the_generated_pages_are_current(script, name):
    made = runpy.run_path(str(ROOT / f"docs/{script}.py"))
    assert (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8") == made["page"](), (
        f"run python docs/{script}.py")


# What makes the tutorial tiny: less text, a smaller model, fewer steps, one process.
TINY = {"--out tutorial/text": "--out tutorial/text --max_bytes 300000", "[:500]": "[:20]",
        "vocab_size = 8000": "vocab_size = 600", "heldout_share = 0.02": "heldout_share = 0.1",
        "hidden_size = 128": "hidden_size = 32", "num_layers = 4": "num_layers = 2",
        "intermediate_size = 512": "intermediate_size = 64",
        "steps = 1000": "steps = 4", "warmup_steps = 50": "warmup_steps = 1",
        "epochs = 3": "epochs = 1", "deepspeed --quiet --num_gpus 2": "python",
        "eval_sequences = 256": "eval_sequences = 4", "every = 250": "every = 4",
        "log_every = 25": "log_every = 2", "global_batch_size = 32": "global_batch_size = 4",
        "micro_batch_size = 16": "micro_batch_size = 2", "max_length = 128": "max_length = 32"}


@pytest.mark.slow
@pytest.mark.multi
def test_the_tutorial_runs_as_it_is_written(tmp_path):
    """Each block with a title is written to that file, each block of bash is run, in order."""
    for name in ("data_prep", "ds_configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tutorial").mkdir()
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    for words, tiny in TINY.items():
        assert words in text, words
        text = text.replace(words, tiny)
    environ = ENVIRONMENT | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    blocks = re.findall(r'```(\w+)(?: title="([^"\n]+)")?\n(.*?)```', text, re.DOTALL)
    with rank_helpers.quick_python(tmp_path):
        for kind, title, block in blocks:
            if title:
                (tmp_path / title).write_text(block, encoding="utf-8")
            elif kind == "bash":
                done = subprocess.run(["bash", "-ec", block], cwd=tmp_path, text=True, env=environ,
                                      capture_output=True)
                assert done.returncode == 0, block + done.stdout[-3000:] + done.stderr[-3000:]
    predictions = (tmp_path / "tutorial/predictions.jsonl").read_text().splitlines()
    assert len(predictions) == 80 and "prediction" in json.loads(predictions[0])
