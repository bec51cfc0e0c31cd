"""A run whose schedule, masks, objective, metric and optimizer are files of a user's own."""

import json
import shutil

import pytest
from launching import ROOT, deepspeed_json, losses, make_run, python

from deberta_ds.checkpoint.find import list_finished
from deberta_ds.report.rundata import read_run
from deberta_ds.tracking.log import read_metrics

NAMES = {"schedule": "inverse_sqrt.py:inverse_sqrt", "selection": "rare_words.py:rare_words",
         "kind": "small_states.py", "metric": "more_scores.py:saved_bits", "name": "lion.py:lion"}


def options(directory) -> list[str]:
    parts = {key: f"{directory}/{name}" for key, name in NAMES.items()}
    return [f"--optim.schedule={parts['schedule']}", f"--optim.name={parts['name']}",
            f"--objective.kind={parts['kind']}",
            f"--objective.mask.selection={parts['selection']}",
            f'--evaluate.metrics=["{parts["metric"]}"]', "--train.best_metric=saved_bits"]


def test_all_examples_at_once_and_resumed_bit_identically(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "own")
    run = make_run(tmp_path, steps="6", eval_every="3", save_every="3", learning_rate="1e-4")
    command = [ROOT / "launch/pretrain.py", "--config", run, "--deepspeed_config",
               deepspeed_json(tmp_path / "ds.json", 2), *options(tmp_path / "own")]
    whole = python(*command, f"--out_dir={tmp_path}/whole")
    assert "size" in whole.stdout and "Saved bits" in whole.stdout
    python(*command, f"--out_dir={tmp_path}/cut", "--train.stop_after=3")
    python(*command, f"--out_dir={tmp_path}/cut")
    ends = [list_finished(tmp_path / name)[-1] / "rank-00000.safetensors"
            for name in ("whole", "cut")]  # weights and momenta
    assert ends[0].read_bytes() == ends[1].read_bytes()
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")

    records = read_metrics(tmp_path / "whole/metrics.jsonl")
    rates = [r["learning_rate"] for r in records if r["kind"] == "train"]
    assert rates[:5] == pytest.approx([1e-4 * step / 5 for step in range(1, 6)])
    assert rates[5] == pytest.approx(1e-4 * (5 / 6) ** 0.5)
    scores = [r for r in records if r["kind"] == "eval"]
    assert len(scores) == 2 and all(r["saved_bits"] < 0 < r["state_size"] for r in scores)
    assert {"saved_bits", "state_size"} <= {m.key for m in read_run(tmp_path / "whole").metrics}
    saved = json.loads((tmp_path / "whole/config.json").read_text())["content_hashes"]
    assert sum(".py" in name for name in saved) == 5 and f"{tmp_path}/own/lion.py:lion" in saved

    schedule = tmp_path / "own/inverse_sqrt.py"
    schedule.write_text(schedule.read_text() + "\n# edited\n")
    refused = python(*command, f"--out_dir={tmp_path}/cut", check=False)
    assert refused.returncode and "is of another run" in refused.stderr
    assert f"- {schedule}:inverse_sqrt = sha256" in refused.stderr
