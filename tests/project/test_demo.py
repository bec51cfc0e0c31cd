"""What `make demo` chooses by the machine, and all of it, cut short."""

import json
import os
import re
import subprocess

import pytest
import rank_helpers
import torch
from launching import ROOT

from deberta_ds.config import run_config
from deberta_ds.engine import ds_config
from launch import demo


@pytest.mark.parametrize("gpus, able, name", [
    (2, {"amx_bf16": True}, "zero1_bf16"), (0, {"amx_bf16": True}, "zero1_autocast_cpu"),
    (0, {"amx_bf16": False, "avx512_bf16": True}, "zero1_autocast_cpu"), (0, {}, "zero1_fp32")])
def test_the_deepspeed_json_suits_the_machine(gpus, able, name, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    path = demo.deepspeed_config(gpus)
    assert path == f"ds_configs/{name}.json" and (ROOT / path).is_file()


@pytest.mark.parametrize("found", [0, 1, 2, 3, 4, 8])
def test_the_rows_of_the_demo_divide_by_its_ranks(found):
    """With three GPUs or more it ended in an error: a step has two micro-batches."""
    ranks = demo.gpus_taken(found) or demo.MOST_RANKS
    assert ranks <= max(found, 2)
    run, _ = run_config.load(ROOT / demo.CONFIG, [])
    assert ds_config.accumulation_steps(run, ranks) * ranks == 2


def test_intervals_of_few_answers_are_wilsons():
    """12 of 12 right is no proof of 100 %; the bootstrap's interval is 100 to 100."""
    assert demo.wilson(1.0, 12) == pytest.approx((0.7575, 1.0), abs=1e-4)
    assert demo.wilson(0.5, 16) == pytest.approx((0.2800, 0.7200), abs=1e-4)


def test_a_torch_that_cannot_tell_gives_fp32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert demo.deepspeed_config(0) == "ds_configs/zero1_fp32.json"


@pytest.mark.slow
@pytest.mark.multi
def test_every_command_of_the_demo_runs(tmp_path):
    """In a directory of its own: it moves what the demo before left in runs/."""
    for name in ("constraints.txt", "data_prep", "ds_configs", "examples", "launch", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {key: value for key, value in os.environ.items() if key != "SUPERGLUE_DIR"}
    with rank_helpers.quick_python(tmp_path) as python:
        done = subprocess.run([python, "launch/demo.py", "--short"], cwd=tmp_path, text=True,
                              capture_output=True, env=environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    results = {row["stage"]: row["result"] for row in summary}
    assert results["pretraining"] == "step 5" and results["resume"] == "step 5 to 10"
    scores = {"generator": "most frequent token: ", "discriminator": "chance: 0.500",
              "minimal pairs": "chance: 50.0%", "SuperGLUE RTE": "majority class: 50.0%",
              "SuperGLUE CB": "majority class: 33.3%"}
    for stage, baseline in scores.items():  # each with an interval
        assert re.fullmatch(r"\S+ \(\S+ to [^;]+; " + baseline + r".*\)", results[stage]), stage
    assert (tmp_path / "runs/demo/report.html").is_file()
