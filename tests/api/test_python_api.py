"""The Python API and the notebooks: examples of docstrings run; values agree with references."""

import doctest
import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from data_helpers import run_main, tiny_tokenizer
from launching import ROOT, make_run
from superglue_helpers import save_random, write_lines
from transformers import AutoModel, AutoTokenizer

import deberta_ds
from deberta_ds.__main__ import commands
from deberta_ds.api import jobs, model
from deberta_ds.base.errors import UserError
from deberta_ds.tasks.task_file import load_own_task

TEXTS = ["The quick brown fox.", "A row holds whole pieces of documents; never mind."]


@pytest.fixture(scope="module")
def names(tmp_path_factory, process_group):
    """Names of the examples: a run that was trained from Python, its export, an own task."""
    root = tmp_path_factory.mktemp("api")
    run = make_run(root / "first", two_layers=True, steps="2", eval_every="2", warmup_steps="1",
                   save_every="2")
    seen: list = []
    result = deberta_ds.train(run, callbacks=[seen.append])
    assert result.finished and [record["kind"] for record in seen] == ["train", "train", "eval"]
    assert result.metrics.query("kind == 'train'").loss.tolist() == [
        record["loss"] for record in seen[:2]]
    assert result.model().tokenizer.size == tiny_tokenizer().size
    (root / "mood.toml").write_text(
        'name = "mood"\nkind = "classification"\ntexts = ["text"]\ntrain = "mood.jsonl"\n')
    (root / "mood.jsonl").write_text("".join(
        json.dumps({"text": f"A {label} day {n}.", "label": label}) + "\n"
        for n in range(8) for label in ("good", "bad")))
    jobs.export(result.checkpoint, root / "hf", language="de", dataset="me/web")
    tuned = jobs.finetune(root / "mood.toml", root / "hf", root / "tuned",
                          settings={"epochs": 1, "max_length": 32})
    again = make_run(root / "second", two_layers=True, warmup_steps="1")
    return {"MODEL": str(root / "hf"), "RUN": str(again), "TASK": str(root / "mood.toml"),
            "OUT": str(root / "out"), "FINETUNED": str(tuned.models[0])}


class LastLines(doctest.OutputChecker):
    """What is printed may begin with the log of a run."""

    def check_output(self, want, got, _flags):
        return got.endswith(want)


def test_one_text_stands_for_a_list_of_one(names):
    card = (Path(names["MODEL"]) / "README.md").read_text()
    assert 'language: ["de"]' in card and 'datasets: ["me/web"]' in card


@pytest.mark.parametrize("module", [model, jobs], ids=["model", "jobs"])
def test_examples_of_the_docstrings(module, names):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(LastLines())
    public = {name: getattr(module, name) for name in ("load", *deberta_ds.__all__)
              if hasattr(module, name)}
    for test in finder.find(module, globs=public | names):
        assert runner.run(test, out=print).failed == 0, test.name
    assert runner.summarize(verbose=False).attempted >= 4


def test_sentence_vectors_are_those_of_transformers(names):
    ours = deberta_ds.load(names["MODEL"])
    tokens = AutoTokenizer.from_pretrained(names["MODEL"])(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(names["MODEL"]).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    means = (states * mask).sum(1) / mask.sum(1)
    np.testing.assert_allclose(ours.encode(TEXTS), means, atol=2e-5)
    np.testing.assert_allclose(ours.encode(TEXTS, batch_size=1, pooling="cls"), states[:, 0],
                               atol=2e-5)
    np.testing.assert_array_equal(ours.encode(TEXTS[0]), ours.encode(TEXTS[:1])[0])
    long = "word " * ours.module.config.max_position
    with pytest.raises(UserError, match="truncate=True"):
        ours.encode([long])
    assert ours.encode([long], truncate=True).shape == (1, ours.module.config.hidden_size)
    assert {scores.shape for scores in ours.score([]).values()} == {(0, 2)}


def test_steps_are_recorded_by_the_profiler(names, tmp_path):
    deberta_ds.train(names["RUN"], {"train.steps": 8, "train.profile_steps": 2, "out_dir": str(
        tmp_path / "out"), "train.global_batch_size": 4})
    [file] = (tmp_path / "out/traces").glob("*-rank-0.json.gz")
    found = [event["name"] for event in json.loads(gzip.open(file).read())["traceEvents"]
             if event.get("cat") == "user_annotation"]
    assert {name: found.count(name) for name in ("forward", "backward", "update")} == {
        "forward": 4, "backward": 4, "update": 2}  # two micro-batches a step


def test_the_example_of_a_callback_stops_a_run_at_a_checkpoint(names, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.stop_at_target import StopAtTarget

    result = deberta_ds.train(
        names["RUN"], {"train.steps": 9, "train.eval_every": 1, "out_dir": str(tmp_path)},
        callbacks=[StopAtTarget("discriminator_loss", 1e9)])
    steps = result.metrics.query("kind == 'eval'").step.tolist()
    assert not result.finished and steps[0] == 1 and steps[-1] < 9
    # Where the request came before an evaluation, the next start makes it.
    assert int(result.checkpoint.name.removeprefix("step-")) - steps[-1] in (0, 1)


def test_labeled_rows_are_scored_and_a_frame_is_rows(names):
    import pandas

    rows = [{"text": "A good day.", "label": "good"}, {"text": "Bad.", "label": "bad"}]
    found = deberta_ds.predict(names["FINETUNED"], pandas.DataFrame(rows))
    assert [row["idx"] for row in found.rows] == [0, 1]
    right = [row["prediction"] for row in found.rows] == ["good", "bad"]
    assert (found.scores["metrics"]["accuracy"]["value"] == 100.0) == right
    gaps = [rows[0] | {"n": 1.0}, {"text": "Bad."}]  # pandas has NaN there
    assert deberta_ds.predict(names["FINETUNED"], pandas.DataFrame(gaps)).scores["unlabelled"] == 1
    assert deberta_ds.predict(names["FINETUNED"], [{"text": "x"}]).scores is None
    texts = [row["text"] for row in rows]
    assert deberta_ds.predict(names["FINETUNED"], [texts[0], (texts[1],)]).rows == found.rows[:2]
    with pytest.raises(UserError, match="row 1 has 2 texts, and a row of mood is text"):
        deberta_ds.predict(names["FINETUNED"], ["x", ("x", "y")])
    with pytest.raises(UserError, match="rows is one text; write a list"):
        deberta_ds.predict(names["FINETUNED"], "x")
    odd = deberta_ds.predict(names["FINETUNED"], [{"text": 1.5}, {"text": "x"}], max_bad=1)
    assert odd.rows[0]["error"].startswith("rows:1: ") and "prediction" in odd.rows[1]
    with pytest.raises(UserError, match=r"(?s)^(?!.*\(all in).*rows:2: "):
        deberta_ds.predict(names["FINETUNED"], [{"text": 1.5}, {"text": 2.5}])


def test_an_answer_may_hold_what_python_takes_for_the_end_of_a_line(process_group, tmp_path):
    text = "\u2028\x85".join("the quick brown fox of a row holds whole pieces".split())
    rows = [{"q": f"Who {n}?", "c": text, "a": text} for n in (1, 2)]
    write_lines(tmp_path / "t.jsonl", rows)
    (tmp_path / "t.toml").write_text('name = "t"\nkind = "spans"\ntexts = ["q", "c"]\n'
                                     'label = "a"\ntrain = "t.jsonl"\n')
    save_random(tmp_path / "model", load_own_task(tmp_path / "t.toml")[0], std=0.2)
    found = deberta_ds.predict(tmp_path / "model", rows).rows
    assert all(row["prediction"] == rows[0]["c"][row["start"]:row["end"]] for row in found)
    assert "\u2028" in found[0]["prediction"]


def test_mistakes_are_one_error(names):
    with pytest.raises(UserError, match=r"no option seedz"):
        deberta_ds.finetune(names["TASK"], names["MODEL"], names["OUT"], seedz=2)
    with pytest.raises(UserError, match=r"seeds = 0: must be at least 1"):
        deberta_ds.finetune(names["TASK"], names["MODEL"], names["OUT"], seeds=0)
    with pytest.raises(UserError, match=r"CB.epochs: CB is none of the tasks of this run, mood"):
        deberta_ds.finetune(names["TASK"], names["MODEL"], names["OUT"], settings={"CB.epochs": 2})
    with pytest.raises(UserError, match=r"batch_size = 0: must be at least 1"):
        deberta_ds.predict(names["FINETUNED"], [{"text": "x"}], batch_size=0)
    ours = deberta_ds.load(names["MODEL"])
    with pytest.raises(UserError, match="pooling"):
        ours.encode("x", pooling="max")
    for top in (-1, 0, 1 << 30):
        with pytest.raises(UserError, match=f"top = {top}: must be from 1 to"):
            ours.fill_mask("A [MASK] day.", top=top)
    with pytest.raises(UserError, match=r"train\.step.*did you mean"):
        deberta_ds.train(names["RUN"], {"train.step": 2})
    with pytest.raises(AttributeError, match="pretrain"):
        deberta_ds.pretrain  # noqa: B018


def test_evaluate_takes_the_tokenizer_of_the_checkpoint(names):
    root = Path(names["MODEL"]).parent / "first"
    command = ("launch/evaluate.py", "--run", root / "out", "--rows", 2)
    with pytest.raises(UserError, match="leave --tokenizer out"):
        run_main(*command, "--tokenizer", ROOT / "tests/fixtures/tiny_run/spm.model")
    (root / "spm.model").rename(root / "moved.model")
    try:
        assert json.loads(run_main(*command, "--tokenizer", root / "moved.model")) == json.loads(
            run_main(*command))
    finally:
        (root / "moved.model").rename(root / "spm.model")


def test_the_package_is_imported_without_torch():
    code = "import sys, deberta_ds; sys.exit(bool({'torch', 'deepspeed'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_the_stored_outputs_of_a_notebook_are_what_it_prints(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    for cell in json.loads(Path("examples/look_at_a_model.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            capsys.readouterr()
            exec(compile("".join(cell["source"]), "look_at_a_model", "exec"), names)
            assert capsys.readouterr().out == "".join(cell["outputs"][0]["text"])


def command(start, name, *arguments) -> None:
    start(name, *arguments) if name == "pack" else run_main(commands()[name], *arguments)


def test_notebooks(process_group, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name in ("train_and_look_inside", "adapt_and_finetune"):
        notebook = json.loads((ROOT / f"examples/{name}.ipynb").read_text())
        names: dict = {}
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], f"{name}: clear the outputs before a commit"
                code = "".join(cell["source"]).replace("STEPS = 300", "STEPS = 4").replace(
                    "STEPS = 50", "STEPS = 4")
                exec(compile(code, name, "exec"), names)
                if "def command" in code:  # all but the last in this process
                    names["command"] = partial(command, names["command"])
    printed = capsys.readouterr().out
    assert "question_or_order" in printed and Path("runs/notebook/hf/model.safetensors").is_file()
