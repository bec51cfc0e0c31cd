"""An input is opened once: what is replaced while a command runs is the old bytes whole, or one
error that names it; ranks that read different things, or are asked for different things, end.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import rank_helpers
from data_helpers import (
    CleanOptions,
    random_documents,
    read_manifest,
    tiny_tokenizer,
    tokenize,
    write_json_lines,
)
from launching import ENVIRONMENT, ROOT, deepspeed_json, make_run, options_of
from superglue_helpers import SAMPLE, predict, save_random, tiny_start, write_lines

from deberta_ds.base.errors import UserError
from deberta_ds.base.user_code import digest
from deberta_ds.config import run_config
from deberta_ds.corpus import outputs
from deberta_ds.corpus import tokenize as stage
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.finetuning import predict_file
from deberta_ds.finetuning.models import load_finetuned
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.inputs import open_inputs

TINY = ROOT / "tests/fixtures/tiny_run"
PREDICT, PAIRS, FINETUNE = (ROOT / f"launch/{name}.py" for name in (
    "predict", "minimal_pairs", "finetune"))


def overwrite(path: Path, text: str) -> None:
    """Replace what is in a file, its size and time of modification kept."""
    status = path.stat()
    assert len(text.encode()) == status.st_size
    with open(path, "r+") as file:
        file.write(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def at_the_second_unit(monkeypatch, action) -> None:
    """Call `action` once, when the first unit of a tokenization is done."""
    whole, called = stage.tokenize_unit, []

    def unit(*arguments, **options):
        found = whole(*arguments, **options)
        if not called:
            called.append(action())
        return found

    unit.__module__, unit.__qualname__ = whole.__module__, whole.__qualname__
    monkeypatch.setattr(stage, "tokenize_unit", unit)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
@pytest.mark.parametrize("how", ["renamed over it", "in place, with its time"])
def test_a_corpus_of_two_versions_is_not_made(tmp_path, monkeypatch, form, how):
    """A1, A7: 9,000 documents of the old and 21,000 of the new file, with exit code 0."""
    path, documents = tmp_path / "a.jsonl", random_documents(60)
    write_json_lines(path, documents)
    new = path.read_text().replace("quick", "brisk")

    def swap():
        if how.startswith("in"):
            overwrite(path, new)
        else:
            (tmp_path / "b").write_text(new)
            (tmp_path / "b").rename(path)

    at_the_second_unit(monkeypatch, swap)
    units = plan_units([form.format(path)], ReadOptions(), 4000)
    assert len(units) > 3
    with pytest.raises(UserError, match=r"a\.jsonl: changed while this command read it"):
        tokenize(units, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_corpus_has_the_ids_of_the_tokenizer_that_it_names(tmp_path, monkeypatch, workers):
    """A2: workers opened it again by its path."""
    path = tmp_path / "spm.model"
    path.write_bytes((TINY / "spm.model").read_bytes())
    tokenizer = Tokenizer(path)
    write_json_lines(tmp_path / "a.jsonl", random_documents(30))
    path.write_bytes(Path(tiny_tokenizer().path).read_bytes())
    made = [tokenize(tmp_path / "a.jsonl", tmp_path / name, tokenizer=one, unit_bytes=4000,
                     workers=workers) and [np.load(file).tolist() for file in sorted(
                         (tmp_path / name / "tokens").glob("*.npy"))]
            for name, one in (("one", tokenizer), ("other", Tokenizer(TINY / "spm.model")))]
    assert made[0] == made[1] != []
    assert read_manifest(tmp_path / "one")[0].tokenizer_sha256 == tokenizer.sha256


def test_a_tokenizer_at_a_url_is_not_taken_from_a_stale_cache(tmp_path):
    """A3: where the size was equal."""
    path = tmp_path / "there/tokenizer.json"
    path.parent.mkdir()
    path.write_text('{"a": 1}')
    found = [Path(outputs.fetch(f"file://{path.parent}", cache=str(tmp_path / "cache")))]
    assert (found[0] / path.name).read_text() == '{"a": 1}'
    path.write_text('{"b": 1}')
    outputs.fetch(f"file://{path.parent}", cache=str(tmp_path / "cache"))
    assert (found[0] / path.name).read_text() == '{"b": 1}'


def test_findings_that_are_made_again_meanwhile_are_refused(tmp_path, monkeypatch):
    """A9: 19,998 of 20,000 documents were left, where the named findings leave 10,000."""
    from deberta_ds.corpus.dedup import find_duplicates

    write_json_lines(tmp_path / "a.jsonl", random_documents(20) * 2)
    units = plan_units([str(tmp_path / "a.jsonl")], ReadOptions(), 4000)
    find_duplicates(units, tmp_path / "found", read=ReadOptions())

    def swap():
        manifest = json.loads((tmp_path / "found/manifest.json").read_text())
        (tmp_path / "found/manifest.json").write_text(json.dumps(manifest))

    stage._findings.cache_clear()
    at_the_second_unit(monkeypatch, swap)
    with pytest.raises(UserError, match="found: changed while this command read it"):
        stage.tokenize_corpus(units, tmp_path / "out", tiny_tokenizer(), read=ReadOptions(),
                              clean=CleanOptions(), leave_out=[str(tmp_path / "found")])


def test_a_table_that_is_overwritten_while_it_is_predicted_is_refused(tmp_path, monkeypatch):
    """A8: 4,114 predictions of the old table, 1,886 of the new."""
    save_random(tmp_path / "model", task_named("CB"))
    monkeypatch.setattr(predict_file, "BLOCK_ROWS", 4)
    table, rows = tmp_path / "t.jsonl", [
        {"premise": f"a {n}", "hypothesis": "b", "idx": n} for n in range(12)]
    write_lines(table, rows)
    done, whole = [], predict_file.score_split

    def score(*arguments, **options):
        if not done:
            done.append(overwrite(table, table.read_text().replace('"b"', '"c"')))
        return whole(*arguments, **options)

    monkeypatch.setattr(predict_file, "score_split", score)
    with pytest.raises(UserError, match=r"t\.jsonl: changed while it was read"):
        predict(load_finetuned(tmp_path / "model"), table, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_table_that_is_overwritten_after_its_labels_were_read_is_refused(tmp_path):
    """The labels were those of the old table, the examples those of the new one."""
    table = tmp_path / "train.csv"
    table.write_text("text,label\na good one,1\na bad one,0\n")
    (tmp_path / "mood.toml").write_text('name = "mood"\nkind = "classification"\ntexts = ["text"]\n'
                                        'label = "label"\ntrain = "train.csv"\n')
    task, _ = load_own_task(tmp_path / "mood.toml")
    overwrite(table, table.read_text().replace("one,1", "one,2"))
    with pytest.raises(UserError, match=r"train\.csv: changed since its labels were read"):
        read_split(task, tmp_path, "train")


def test_what_own_code_imports_is_part_of_its_digest(tmp_path, monkeypatch):
    """B7: rank 1's part of the weights got another learning rate, by a module of the schedule."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for name in ("one", "two"):
        (tmp_path / f"helper_{name}.py").write_text(f"RATE = {len(found) + 1}\n")
        (tmp_path / "own.py").write_text("import math\ndef f(x):\n    return x\n")
        own = tmp_path / f"{name}.py"
        own.write_text("import helper as h\ndef f(x):\n    return h.RATE\n")
        shutil.copy(tmp_path / f"helper_{name}.py", tmp_path / "helper.py")
        found.append(digest("functions", f"{own}:f"))
    assert found[0] != found[1]
    plain = tmp_path / "own.py"
    import hashlib
    assert digest("functions", f"{plain}:f") == hashlib.sha256(plain.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------ on two ranks
def end(tmp_path: Path, arguments: list[list[str]], script: Path, seconds: float = 30) -> str:
    """Return what two ranks say that both end with code 2, soon."""
    processes = rank_helpers.start_each(arguments, tmp_path / "log", script)
    codes = rank_helpers.wait(processes, 120)
    text = (tmp_path / "log").read_text()
    assert codes == [2, 2], f"{codes}: {text}"
    assert "Traceback" not in text and "gloo" not in text, text
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    make_run(root)
    deepspeed_json(root / "ds.json", 1)
    for name, std in (("one", 0.0), ("two", 0.2)):
        save_random(root / name, task_named("CB"), std=std)
    for n, name in enumerate(("a", "b")):
        write_lines(root / f"{name}.jsonl", [
            {"premise": f"x {n}", "hypothesis": "y", "idx": 0}] * 3)
        write_lines(root / f"pairs_{name}.jsonl", [
            {"sentence_good": f"It runs {n}.", "sentence_bad": "It run."}] * 3)
    return root


@pytest.mark.multi
@pytest.mark.parametrize("first, second, said", [
    (["--model", "one", "--data", "a.jsonl"], ["--model", "two", "--data", "a.jsonl"], "--model"),
    (["--model", "same", "--data", "a.jsonl"], ["--model", "same", "--data", "b.jsonl"], "--data"),
    (["--model", "one", "--data", "a.jsonl", "--max_length", "9"],
     ["--model", "one", "--data", "a.jsonl"], "--max_length"),
    (["--model", "one", "--data", "a.jsonl"], ["--model", "gone", "--data", "a.jsonl"], "--model"),
])
def test_unlike_ranks_of_predict(place, tmp_path, first, second, said):
    """B1, B5: half of the lines were of each model."""
    common = ["--out", str(tmp_path / "out.jsonl")]
    shutil.copytree(place / "one", place / "same", dirs_exist_ok=True)
    arguments = [[str(place / part) if (place / part).exists() else part for part in given]
                 + common for given in (first, second)]
    assert said in end(tmp_path, arguments, PREDICT)


@pytest.mark.multi
@pytest.mark.parametrize("what, said", [
    ("weights", "hash of the model's weights"), ("tokenizer", "hash of the model's"),
    ("config.json", "hash of the model's shape"), ("table", "from row 0 on")])
def test_ranks_of_predict_that_read_unlike_files_at_one_path(place, tmp_path, what, said):
    for name in "ab":
        shutil.copytree(place / "two", tmp_path / name / "model")
        shutil.copy(place / "a.jsonl", tmp_path / name / "t.jsonl")
    if what == "weights":
        shutil.copy(place / "one/model.safetensors", tmp_path / "b/model/model.safetensors")
    elif what == "tokenizer":
        shutil.copy(TINY / "spm.model", tmp_path / "b/model/spm.model")
    elif what == "config.json":
        path = tmp_path / "b/model/config.json"
        path.write_text(path.read_text().replace('"layer_norm_eps": 1e-07',
                                                 '"layer_norm_eps": 0.001'))
    else:
        shutil.copy(place / "b.jsonl", tmp_path / "b/t.jsonl")
    script = elsewhere(tmp_path, PREDICT)
    arguments = [[str(tmp_path / name), "--model", "model", "--data", "t.jsonl", "--out",
                  str(tmp_path / "out.jsonl")] for name in "ab"]
    assert said in end(tmp_path, arguments, script)


def elsewhere(tmp_path: Path, script: Path) -> Path:
    """Return a script that runs another one in the directory that its first argument names."""
    path = tmp_path / "elsewhere.py"
    path.write_text("import os, runpy, sys\nos.chdir(sys.argv.pop(1))\n"
                    f"runpy.run_path({str(script)!r}, run_name='__main__')\n")
    return path


@pytest.mark.multi
@pytest.mark.parametrize("second, said", [
    (["--data", "pairs_b.jsonl"], "--data"), (["--data", "pairs_a.jsonl", "--sample", "1"],
                                              "--sample"),
    (["--data", "pairs_a.jsonl", "--scoring", "word_ids"], "--scoring")])
def test_unlike_ranks_of_minimal_pairs(place, tmp_path, second, said):
    """B2, B5: one table was called by one model's name."""
    model = ["--model", str(TINY / "rtd/export")]
    arguments = [model + [str(place / part) if part.endswith("jsonl") else part for part in given]
                 for given in (["--data", "pairs_a.jsonl"], second)]
    assert said in end(tmp_path, arguments, PAIRS)


@pytest.mark.multi
@pytest.mark.parametrize("first, second, said", [
    (["--resume", "auto"], ["--resume", "never"], "--resume"),
    (["--resume", "auto"], ["--resume", "elsewhere"], "--resume"),
    ([], ["--check"], "--check"), ([], ["--config", "gone.toml"], "gone.toml"),
    ([], ["--data.tokenizer=gone.model"], "data.tokenizer")])
def test_unlike_ranks_of_a_run(place, tmp_path, first, second, said):
    """B4 to B6: they waited for more than 100 seconds, or a traceback of gloo was shown."""
    common = [*options_of(place / "run.toml", place / "ds.json"), f"--out_dir={tmp_path / 'out'}"]
    assert said in end(tmp_path, [common + first, common + second], rank_helpers.PRETRAIN)


@pytest.mark.multi
@pytest.mark.parametrize("what, said", [
    (["--skip_test"], "--skip_test"), (["--max_bad", "2"], "--max_bad"),
    ("test table", "there are val and test"), ("broken", "train.jsonl"),
    ("other test", "tests"), ("config.json", "shape")])
def test_unlike_ranks_of_a_fine_tuning(place, tmp_path, what, said):
    """B3 to B5."""
    for name in "ab":
        shutil.copytree(SAMPLE / "CB", tmp_path / name / "data/CB")
        shutil.copytree(TINY / "rtd/export", tmp_path / name / "model")
    table = tmp_path / "b/data/CB/test.jsonl"
    if what == "test table":
        table.unlink()
    elif what == "broken":
        with open(table.with_name("train.jsonl"), "a") as file:
            file.write("{")
    elif what == "other test":
        table.write_text(table.read_text().replace(": \"", ": \"Well, ", 1))
    elif what == "config.json":
        path = tmp_path / "b/model/config.json"
        values = json.loads(path.read_text()) | {"layer_norm_eps": 0.001}
        path.write_text(json.dumps(values))
    common = ["--task", "CB", "--model", "model", "--data", "data", "--any_size", "--out",
              str(tmp_path / "out"), "--all.max_length=32", "--CB.truncation=longest_first"]
    arguments = [[str(tmp_path / name), *common] for name in "ab"]
    arguments[1] += what if isinstance(what, list) else []
    assert said in end(tmp_path, arguments, elsewhere(tmp_path, FINETUNE))


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [
    ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29617"]])
def test_a_launcher_ends_with_the_message_of_the_unlike_rank(tmp_path, launcher):
    """B4, B5: a hang, or a traceback of gloo."""
    for name in "ab":
        shutil.copytree(SAMPLE / "CB", tmp_path / name / "data/CB")
    with open(tmp_path / "b/data/CB/train.jsonl", "a") as file:
        file.write("{")
    script = tmp_path / "by_rank.py"
    script.write_text("import os, runpy, sys\n"
                      "sys.argv = [one for one in sys.argv if '--local_rank' not in one]\n"
                      f"os.chdir({str(tmp_path)!r} + '/' + 'ab'[int(os.environ['RANK'])])\n"
                      f"runpy.run_path({str(FINETUNE)!r}, run_name='__main__')\n")
    with rank_helpers.quick_python(tmp_path) as python:
        done = subprocess.run([python, *launcher, str(script), "--task", "CB", "--model",
                               str(TINY / "rtd/export"), "--data", "data", "--any_size", "--out",
                               str(tmp_path / "out"), "--CB.truncation=longest_first"], cwd=ROOT,
                              env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode and "rank 1 on " in text and "train.jsonl:" in text, text
    assert "gloo" not in text


# -------------------------------------------------------------------------------- a run, in process
def test_a_checkpoint_carries_the_tokenizer_that_was_read(tmp_path, process_group):
    """A4: it was copied by its path into every checkpoint."""
    run, _ = run_config.load(make_run(tmp_path))
    inputs = open_inputs(run, {}, "run.toml")
    before = (tmp_path / "spm.model").read_bytes()
    (tmp_path / "spm.model").write_bytes((TINY / "spm.model").read_bytes())
    (file,) = inputs.tokenizer.files.values()
    assert file.data == before
    assert inputs.identity["tokenizer"] == inputs.tokenizer.sha256


def test_a_fine_tuned_model_carries_the_tokenizer_that_was_read(tmp_path):
    """A5."""
    start = tiny_start()
    before = Path(start.tokenizer.path).read_bytes()
    save_random(tmp_path / "model", task_named("CB"), start)
    assert (tmp_path / "model/spm.model").read_bytes() == before


def test_code_that_was_edited_since_is_refused(tmp_path, monkeypatch):
    """A10: evaluation, export and report used it without a word."""
    from deberta_ds.base import user_code

    own = tmp_path / "mine.py"
    own.write_text((ROOT / "examples/more_scores.py").read_text())
    run, _ = run_config.load(make_run(tmp_path), [f'--evaluate.metrics=["{own}:recall"]'])
    known = user_code.digests(run)
    user_code.check_same(run, known, "step-1")
    with pytest.raises(UserError, match=r"mine\.py: has changed since step-1"):
        user_code.check_same(run, {name: "0" * 64 for name in known}, "step-1")
