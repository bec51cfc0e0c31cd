"""A corpus built from a recipe: the same bytes after kills, what a changed recipe does, its run."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
from data_helpers import random_documents, run_main, stored_texts, tokenizer_path, tree

from deberta_ds.base.errors import UserError
from deberta_ds.config import run_config
from deberta_ds.corpus import units
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.shards import read_manifest
from deberta_ds.planner import new_run, plan
from deberta_ds.planner.activations import Activations

BUILD = "data_prep/build.py"
FOUND = ("A text of an evaluation file that has well over thirteen words in it, so that a search "
         "for runs of so many finds it")
RECIPE = f"""
out = "shards"
seq_len = [32, 64]
heldout_share = 0.2
unit_bytes = 16000
against = ["eval.txt"]
[tokenizer]
path = "{tokenizer_path()}"
[[corpora]]
name = "web"
inputs = ["*.jsonl"]
text_key = "body"
[[corpora]]
name = "lines"
inputs = ["text"]
documents = "line"
"""

RUN = """
name = "x"
out_dir = "runs/x"
model = {preset = "tiny"}
objective = {kind = "mlm"}
optim = {learning_rate = 1e-3}
train = {steps = 10, global_batch_size = 8, micro_batch_size = 2}
[data]
corpus = "moved/web"
seq_len = 64
"""


@pytest.fixture(autouse=True)
def inputs(tmp_path, monkeypatch):
    """A recipe of two corpora that are read differently; both have a copy of one document."""
    monkeypatch.chdir(tmp_path)
    web = [*random_documents(60, 1), FOUND, "Said in both corpora."]
    for number, part in enumerate((web[:30], web[30:])):
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(json.dumps({"body": text}) + "\n" for text in part))
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("\n".join([*random_documents(60, 2),
                                                    "Said in both corpora."]))
    (tmp_path / "eval.txt").write_text(f"{FOUND}\n")
    (tmp_path / "corpus.toml").write_text(RECIPE)


def build(*options: str) -> str:
    return run_main(BUILD, "--recipe", "corpus.toml", "--workers", "1", *options)


def killed(unit: int, *options: str) -> bool:
    """Build in a child process that kills itself before its work unit of this number."""
    child = os.fork()
    if not child:
        left = iter(range(unit))

        def run_one(*arguments):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            run(*arguments)

        run, units.run_one = units.run_one, run_one
        try:
            build(*(options or ("--out=killed",)))
            os._exit(0)
        finally:  # a second pytest would go on
            os._exit(1)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path):
    assert "shards: built" in build()
    kills = 0
    while killed(4):
        kills += 1
    assert kills > 4 and tree("killed") == tree("shards")
    texts = {name: [text for part in ("train", "heldout") for text in stored_texts(
        tmp_path / "shards" / part / name)] for name in ("web", "lines")}
    assert "Said in both corpora." in texts["web"] and FOUND not in texts["web"]
    assert "Said in both corpora." not in texts["lines"] and len(texts["lines"]) > 40
    assert read_manifest("shards/train/web")[0].counts["contaminated"] == 1


def test_jobs_of_an_array_share_a_build_and_do_the_work_of_one_that_is_killed():
    build()
    parts = []
    for number in (1, 2, 3):  # the first is killed, the fourth never comes
        parts.append(os.fork())
        if not parts[-1]:
            try:
                killed(2 if number == 1 else 99, "--out=array", "--part", f"{number}/4")
            finally:
                os._exit(0)
    assert not any(os.waitpid(part, 0)[1] for part in parts)
    assert tree("array") == tree("shards")


def test_runs_name_the_corpus_by_one_key_or_are_written_for_it(tmp_path, monkeypatch):
    build()
    (tmp_path / "moved").mkdir()
    os.rename("shards", "moved/web")
    text = dataclasses.replace(new_run.open_corpus("moved/web", None, None), tokens=1_250_000)
    assert text.packed == [32, 64] and len(text.directories) == 4
    monkeypatch.setattr(plan, "trace", lambda *_, **__: Activations({0: 0}))
    run_file = tmp_path / "run.toml"
    run_file.write_text(new_run.choose(text, new_run.open_devices("1 cpu"), 0.3, "", "new")[0])
    chosen = run_config.load(run_file)[0].data
    run_file.write_text(RUN)
    run, origins = run_config.load(run_file)
    assert [source.path for source in run.data.sources] == ["moved/web/train/web",
                                                            "moved/web/train/lines"]
    assert origins["data.sources"] == origins["data.heldout.web"] == "data.corpus moved/web"
    assert (chosen.sources, chosen.heldout, chosen.tokenizer) == (
        run.data.sources, run.data.heldout, run.data.tokenizer)
    assert run.data.heldout == {name: f"moved/web/heldout/{name}" for name in ("web", "lines")}
    for source in run.data.sources:
        assert Corpus(source.path, seq_len=64).num_rows
    printed = run_main("data_prep/mixture.py", "moved/web", "--seq_len", "32", "--stretch", "0",
                       "0.5")
    run_file.write_text(RUN + printed)
    assert run_config.load(run_file)[0].data.sources[1].part == (0.0, 0.5)
    for key, value in (("tokenizer", "x"), ("sources", '[{path = "x"}]'), ("heldout", '""')):
        with pytest.raises(UserError, match=f"so data.{key}.* must be left out"):
            run_config.load(run_file, [f"--data.{key}={value}"])
    run_file.write_text(RUN.replace("corpus =", "tokenizer ="))
    run = run_config.load(run_file, ["--data.corpus=moved/web"])[0]  # later wins
    assert run.data.tokenizer == "moved/web/tokenizer"
    with pytest.raises(UserError, match="so data.heldout must be left out"):  # was not used
        run_config.load(run_file, ["--data.corpus=moved/web", "--data.heldout.more=x"])
    with pytest.raises(UserError, match="elsewhere/corpus.json: no such file"):
        run_config.load(run_file, ["--data.corpus=elsewhere"])


def test_what_another_recipe_has_made_is_named_and_other_inputs_are_taken(tmp_path):
    build()
    with pytest.raises(UserError, match="shards/.*web: holds the output of other inputs or opti"):
        build("--heldout_share=0.3")
    (tmp_path / "0.jsonl").write_text('{"body": "\\ud800"}\n{"body": "said"}\n' * 30)
    for part in ("train", "heldout"):  # which leave out other documents now
        shutil.rmtree(f"shards/{part}")
    with pytest.raises(UserError, match="allows 0"):
        build()
    build("--skip_bad_files=1")
    assert read_manifest("shards/train/web")[0].counts["bad_files"] == 1


def test_a_dry_run_shows_stages_and_writes_nothing(tmp_path):
    printed = build("--dry_run", "--tokenizer.path=" + tokenizer_path())
    assert "web: 2 files" in printed and "to do  shards/train/lines/rows-64" in printed
    assert "set by command line" in printed and max(map(len, printed.split("\n"))) < 80
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(("override", "message"), [
    ("--hedout_share=0.1", "hedout_share: unknown key; did you mean heldout_share"),
    ("--heldout_share=1", "heldout_share = 1: must be below 1"),
    ('--corpora=[{name = "a/b", inputs = ["*.jsonl"]}]', "corpora.0.name = 'a/b'"),
    ('--corpora=[{name = "a", inputs = ["none"]}]', "none: no such file"),
    ('--corpora=[{name = "a", inputs = ["text"], filters = "f.toml"}]', "f.toml: no such filters"),
    ('--corpora=[{name = "a", inputs = ["text"], documents = "word"}]',
     "corpora[].documents word: must be file"),
    ('--corpora=[{name = "a", inputs = ["0.jsonl"]}]', "0.jsonl"),
    ('--tokenizer={vocab_size = 9000}', "ask for fewer with --tokenizer.vocab_size="),
    ('--corpora=[{name = "a", inputs = ["text"]}, {name = "b", inputs = ["text/a.txt"]}]',
     "named twice among the inputs"),
    ("--heldout_share=0.0001", "no document of web is left for it (contaminated 1, duplicate 2; "),
    ('--against=["none"]', "none: no such file")])
def test_what_is_wrong_with_a_recipe(override, message):
    with pytest.raises(UserError) as refused:
        build(override)
    assert message in str(refused.value)
