"""Files that no file should be: one line that names them, and no memory, time or code is spent."""

import io
import json
import os
import tarfile
import zipfile

import pytest
from launching import make_run
from rank_helpers import PRETRAIN
from superglue_helpers import SAMPLE, tiny_start, write_lines
from test_inputs import FINETUNE, elsewhere, end

from deberta_ds.base import errors, user_code
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json
from deberta_ds.config import run_config
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.engine import ds_config
from deberta_ds.release import foreign, model_files
from deberta_ds.tasks import readers, settings
from deberta_ds.tasks.tables import read_table
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tracking.log import read_metrics
from deberta_ds.training import held_out, pairs, rehearsal

READERS = {
    "run.toml": run_config.load, "task.toml": load_own_task, "ds.json": ds_config.load,
    "settings.toml": lambda path: settings.load(str(path), [], (), []), "facts.json": read_json,
    "t.csv": lambda path: list(read_table(path)), "pairs.jsonl": pairs.read_pairs,
    "spm.model": Tokenizer, "metrics.jsonl": read_metrics,
    "model.safetensors": model_files.read_tensors, "model.bin": model_files.read_tensors,
    "text.txt": lambda path: plan_units([f"file://{path}"], ReadOptions(), 0),
    "own.py": lambda path: user_code.load("key", str(path))}


@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("name", READERS)
def test_a_device_or_a_pipe_is_no_file(tmp_path, name, kind):
    """/dev/zero took 7 to 10 GB, or for ever; a pipe at file:// was a corpus of 0 documents."""
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")  # reads as an empty file, where it is read
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as found:
        READERS[name](path)
    assert "is a pipe or a device" in str(found.value) or "no such file" in str(found.value)


def test_an_index_that_names_itself(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": path.name}}))
    with pytest.raises(UserError, match="is not a plain file name"):
        model_files.read_tensors(path)


def test_archives_that_hold_more_than_they_may(tmp_path, monkeypatch):
    """27 MB of tar.gz held 6 GB of pairs, and took 9.6 GB of memory."""
    line = b'{"sentence_good": "a", "sentence_bad": "b"}\n' * 40
    with tarfile.open(tmp_path / "pairs.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(line)
        archive.addfile(member, io.BytesIO(line))
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/a.jsonl").write_bytes(line)
    monkeypatch.setattr(pairs, "_MOST_BYTES", len(line) - 1)
    for name in ("pairs.tar.gz", "pairs"):
        with pytest.raises(UserError, match=rf"{name}.*at most"):
            pairs.read_pairs(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "CB.zip", "w") as packed:
        packed.write(SAMPLE / "CB/train.jsonl", "CB/train.jsonl")
    monkeypatch.setattr(readers, "_MOST_BYTES", 100)
    with pytest.raises(UserError, match=r"CB\.zip!CB/train\.jsonl: .*at most"):
        readers.read_split(task_named("CB"), tmp_path / "CB.zip", "train", any_size=True)


def test_null_in_a_table_is_no_row_that_is_left_out(tmp_path):
    (tmp_path / "CB").mkdir()
    write_lines(tmp_path / "CB/train.jsonl", [None])
    with pytest.raises(UserError, match=r"train\.jsonl:1: "):
        readers.read_split(task_named("CB"), tmp_path, "train", any_size=True)


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "import sys; sys.exit(0)", "quit()"])
def test_own_code_that_ends_the_program(tmp_path, ending):
    """With exit code 0, and nothing done."""
    own = tmp_path / "own.py"
    own.write_text(f"def f(step):\n    {ending}\n")
    with pytest.raises(UserError, match=r"own\.py: f ends the program"):
        errors._run(lambda: user_code.load("key", f"{own}:f", ("step",))(1))
    own.with_name("at_once.py").write_text(ending)
    with pytest.raises(UserError, match=r"at_once\.py cannot be loaded \(SystemExit"):
        user_code.load("key", str(own.with_name("at_once.py")))


@pytest.mark.parametrize("body, said", [("raise SystemExit(0)", "SystemExit: 0"),
                                        ("return per_token['x']", "KeyError: 'x'")])
def test_a_score_of_ones_own_that_fails(tmp_path, body, said):
    own = tmp_path / "own.py"
    own.write_text(f"def f(total, per_token):\n    {body}\n")
    with pytest.raises(UserError, match=rf"own\.py:f failed \({said}\)"):
        held_out.own_score(f"{own}:f", {}, {})


def test_an_nvme_path_that_is_not_there(tmp_path):
    section = {"device": "nvme", "nvme_path": str(tmp_path / "gone")}
    ds = ds_config.DeepSpeedConfig(zero_optimization={"offload_param": section})
    (problem,) = ds_config.problems_on_this_node(ds)
    assert problem.startswith(f"zero_optimization.offload_param.nvme_path = '{tmp_path}/gone'")


def test_code_of_a_stranger_is_not_carried_on(tmp_path):
    start = tiny_start()
    values = foreign.to_hugging_face(start.config, kind=foreign.V2, rest={})
    values |= {"auto_map": {"AutoModel": "evil.Model"}}
    _, rest = foreign.from_theirs(values, "config.json", key_bias=True)
    assert "auto_map" not in rest
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {}, "do_lower_case": true}')
    (tmp_path / "spm.model").write_bytes(start.tokenizer.files["spm.model"].data)
    files = model_files.find_tokenizer_files(tmp_path)
    model_files.copy_tokenizer_files(files, tmp_path)
    assert "auto_map" not in read_json(tmp_path / "tokenizer_config.json")


def test_of_two_clocks_all_of_the_difference_is_said():
    (line,) = rehearsal.clock_lines([100.0, 160.0], ["a", "b"])
    assert "the clock of b is +60.0 s off" in line


@pytest.mark.multi
def test_a_relative_out_dir_in_two_working_directories(tmp_path):
    """Said at the first save only, or never."""
    for name in "ab":
        make_run(tmp_path / name)
        (tmp_path / name / "data").symlink_to(SAMPLE)
        (tmp_path / name / "ds.json").write_text("{}")
    for script, common in (
            (PRETRAIN, ["--config", "run.toml", "--deepspeed_config", "ds.json", "--out_dir=o"]),
            (FINETUNE, ["--task", "CB", "--data", "data", "--any_size", "--model", "random:tiny",
                        "--tokenizer", "spm.model", "--out", "o"])):
        arguments = [[str(tmp_path / name), *common] for name in "ab"]
        assert "absolute" in end(tmp_path, arguments, elsewhere(tmp_path, script))
