"""A run whose schedule, masks, objective, metric, optimizer and hooks are files of a user's own."""

import json
import shutil

import numpy as np
import pytest
import rank_helpers
import torch
from launching import ROOT, deepspeed_json, losses, make_run, options_of, python

from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint.find import CheckpointError, list_finished
from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.config import run_config
from deberta_ds.data.rows import RowDataset
from deberta_ds.release.reader import read_release
from deberta_ds.report.rundata import read_run
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tracking.log import read_metrics

NAMES = {"schedule": "inverse_sqrt.py:inverse_sqrt", "selection": "rare_words.py:rare_words",
         "kind": "small_states.py", "metric": "more_scores.py:saved_bits", "name": "lion.py:lion",
         "update": "moving_average.py:update"}


def options(directory) -> list[str]:
    parts = {key: f"{directory}/{name}" for key, name in NAMES.items()}
    return [f"--optim.schedule={parts['schedule']}", f"--optim.name={parts['name']}",
            f"--objective.kind={parts['kind']}",
            f"--objective.mask.selection={parts['selection']}",
            f'--evaluate.metrics=["{parts["metric"]}"]', "--train.best_metric=saved_bits",
            f'--train.after_update=["{parts["update"]}"]']


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
    assert sum(".py" in name for name in saved) == 6 and f"{tmp_path}/own/lion.py:lion" in saved

    schedule = tmp_path / "own/inverse_sqrt.py"
    schedule.write_text(schedule.read_text() + "\n# edited\n")
    refused = python(*command, f"--out_dir={tmp_path}/cut", check=False)
    assert refused.returncode and "is of another run" in refused.stderr
    assert f"- {schedule}:inverse_sqrt = sha256" in refused.stderr


STORED = """
import hashlib
import numpy as np
import torch
from deberta_ds.objectives import mlm
from deberta_ds.training.inputs import Input

def __getattr__(name):
    return getattr(mlm, name)

def inputs(run, known):
    global CORPORA, SUMS
    data = open(PLACE, "rb").read()
    CORPORA, SUMS = known["corpora"].value, np.frombuffer(data, np.int64)
    return [Input("sums of ids", None, {"sums of ids": hashlib.sha256(data).hexdigest()},
                  lines=[f"{len(SUMS)} sums"])]

class Model(mlm.MlmModel):
    def forward(self, batch, normalizers):
        if self.training:  # a sum of ids is stored for each sequence
            ids = torch.where(batch.labels >= 0, batch.labels, batch.input_ids).sum(1)
            assert ids.tolist() == [SUMS[CORPORA.locate(row)[1]] for row in batch.rows.tolist()]
        return super().forward(batch, normalizers)

def build(run, valid_vocab):
    return Model(run.model, valid_vocab)
"""


def test_an_objective_reads_stored_data_of_its_own_in_one_file(tmp_path):
    run_file = make_run(tmp_path, steps="8", save_every="4", eval_every="4")
    own, place = tmp_path / "stored.py", tmp_path / "sums"
    own.write_text(STORED.replace("PLACE", repr(str(place))))
    options = [f"--objective.kind={own}", "--train.freeze=[]"]
    command = [*options_of(run_file, deepspeed_json(tmp_path / "ds.json", 1)), *options]
    run, _ = run_config.load(run_file, options)
    rows = RowDataset(run.data.sources, Tokenizer(run.data.tokenizer), seq_len=run.data.seq_len,
                      seed=0, mask=run.objective.mask)
    (count,) = rows.num_rows.values()
    sums = np.zeros(count, np.int64)
    for number in range(count):  # one epoch
        row = rows[number]
        sums[rows.locate(number)[1]] = np.where(row.labels >= 0, row.labels, row.input_ids).sum()
    place.write_bytes(sums.tobytes())
    log = rank_helpers.run(2, [*command, "--train.stop_after=4"], tmp_path / "log")
    assert f"{count} sums" in log
    place.write_bytes((sums + 1).tobytes())
    with pytest.raises(AssertionError, match="sums of ids"):
        rank_helpers.run(2, command, tmp_path / "log")


def test_a_moving_average_is_kept_over_ranks_and_stages_and_checkpoints_are_told(tmp_path):
    """ZeRO-3 on two ranks, then ZeRO-1 on one; parts thaw on the way."""
    (tmp_path / "tell.py").write_text(
        "def tell(directory, step):\n"
        "    assert (directory / 'manifest.json').exists()\n"
        f"    print(directory, step, file=open({str(tmp_path / 'told')!r}, 'a'))\n")
    run = make_run(tmp_path, two_layers=True, steps="6", save_every="1")
    options = [f"--out_dir={tmp_path}/out", "--train.keep=9", "--train.freeze_steps=2",
               '--train.freeze=["generator", "discriminator.layers.0"]',
               f'--train.after_update=["{ROOT}/examples/moving_average.py:update"]',
               f'--train.after_save=["{tmp_path}/tell.py:tell"]']
    for ranks, stage, end in ((2, 3, 3), (1, 1, 6)):
        ds = deepspeed_json(tmp_path / f"ds{stage}.json", stage)
        rank_helpers.run(ranks, [*options_of(run, ds), *options, f"--train.stop_after={end}"],
                         tmp_path / "log")
    steps = [SavedState(path) for path in list_finished(tmp_path / "out")]
    assert (tmp_path / "told").read_text().split() == [
        word for step, state in enumerate(steps, 1) for word in (str(state.directory), str(step))]
    for name in steps[0].shapes:
        expected = steps[0].read_whole(name).double()
        for step, state in enumerate(steps, 1):
            expected += (state.read_whole(name) - expected) * (1 - min(0.999, step / (step + 10)))
        found = steps[-1].read_whole(name, "average").double()
        assert torch.allclose(found, expected, rtol=0, atol=1e-7), name
    python(ROOT / "examples/moving_average.py", tmp_path / "out", tmp_path / "hf")
    newest, exported = (read_release(tmp_path / name).main.tensors for name in ("out", "hf"))
    average = read_release(tmp_path / "out", key="average").main.tensors
    assert all(exported[name].equal(average[name]) for name in newest)
    assert any(not exported[name].equal(newest[name]) for name in newest)
    with pytest.raises(CheckpointError, match="has no 'mean'; there are .* average"):
        read_release(tmp_path / "out", key="mean")
    with pytest.raises(UserError, match="hf: is no checkpoint, and no other model has 'mean'"):
        read_release(tmp_path / "hf", key="mean")

    run = make_run(tmp_path, steps="1", save_every="1")
    ds.write_text(json.dumps({"zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}))
    refused = python(ROOT / "launch/pretrain.py", *options_of(run, ds), *options, check=False)
    assert "train.after_update: its functions get weights in memory" in refused.stderr
