"""kill -9 at a moment nobody chose, resume on two ranks under ZeRO-3: bit-identical to the end."""

import os
import random
import shutil
import time

import pytest
import rank_helpers
import torch
from launching import ROOT, deepspeed_json, make_run, torchrun

from deberta_ds.formats.checkpoint import list_steps, load_whole_state, step_of
from deberta_ds.records import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def train_lines(out) -> list[tuple]:
    keys = ("step", "loss", "generator_loss", "discriminator_loss", "grad_norm", "rows_seen",
            "tokens_seen")
    return [tuple(r[key] for key in keys) for r in read_metrics(out / "metrics.jsonl")
            if r["kind"] == "train"]


def eval_scores(out) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "seconds"}
            for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "eval"]


def start_and_kill(command, out) -> None:
    """Start the run on two ranks and kill both at a random moment.

    Not under torchrun: its ranks have sessions of their own and outlive its process group.
    """
    ranks = rank_helpers.start(2, command, out.parent / "killed.log")
    chance = random.Random(f"{out.parent.name} resume")
    last = chance.randint(5, 9)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists():
            text = (out / "metrics.jsonl").read_text()
            if f'"step": {last},' in text:
                break
        assert all(rank.is_alive() for rank in ranks), "it ended before it could be killed"
        time.sleep(0.01)
    time.sleep(chance.random() * 0.3)
    rank_helpers.kill(ranks)


@pytest.mark.parametrize("log_every", [1, 7, 10] if "FULL_TABLE" in os.environ else [7])
def test_a_checkpoint_between_two_lines_loses_no_tokens(tmp_path, log_every):
    """tokens_seen and a line's means count every step since the last line, saves between or not."""
    ds = deepspeed_json(tmp_path / "zero1.json", 1)
    run_file = make_run(tmp_path, dropout=0.1, log_every=str(log_every), steps="20",
                        save_every="3", workers="1")
    command = ["--config", str(run_file), "--deepspeed_config", str(ds)]
    rank_helpers.run(1, command, tmp_path / "whole.log")
    whole = train_lines(tmp_path / "out")
    for path in list_steps(tmp_path / "out"):
        if step_of(path) > 15:  # as if the run had been killed after that save
            shutil.rmtree(path)
    with open(tmp_path / "out/metrics.jsonl", "a") as file:  # in the middle of a line: such a run
        file.write('{"kind": "event", "step": 2')  # could not be resumed
    rank_helpers.run(1, command, tmp_path / "resumed.log")
    assert train_lines(tmp_path / "out") == whole
    assert [line[0] for line in whole] == sorted({*range(log_every, 20, log_every), 20})


def test_a_run_goes_back_to_an_older_checkpoint_and_its_command_goes_on_from_there(tmp_path):
    """Later checkpoints are of a course that was left: neither kept for new ones nor loaded."""
    ds = deepspeed_json(tmp_path / "zero1.json", 1)
    run_file = make_run(tmp_path, dropout=0.1, steps="12", save_every="2", workers="1")
    command = ["--config", str(run_file), "--deepspeed_config", str(ds), "--train.keep=2"]
    rank_helpers.run(1, [*command, "--train.keep=9"], tmp_path / "whole.log")
    out, whole = tmp_path / "out", train_lines(tmp_path / "out")
    back = [*command, "--resume", str(list_steps(out)[1])]
    text = rank_helpers.run(1, [*back, "--train.stop_after=7"], tmp_path / "back.log")
    assert "later than step 4" in text and "left-00000012" in text
    assert [step_of(path) for path in list_steps(out)] == [6, 7]
    assert len(list((out / "checkpoints").glob("left-*"))) == 4  # 6, 8, 10, 12
    text = rank_helpers.run(1, back, tmp_path / "again.log")  # step 4 is gone, and not needed
    assert "resume at step 7" in text and "later than" not in text
    assert train_lines(out) == whole


def test_killed_run_resumes_bit_identically(tmp_path):
    ds = deepspeed_json(tmp_path / "zero3.json", 3)
    whole = make_run(tmp_path / "a", dropout=0.1, steps="12", eval_every="12", save_every="4")
    killed = make_run(tmp_path / "b", dropout=0.1)
    # Both read the same corpus path, so that the two runs have one identity.
    killed.write_text(whole.read_text().replace(str(tmp_path / "a/out"), str(tmp_path / "b/out")))
    torchrun(2, ROOT / "launch/pretrain.py", "--config", whole, "--deepspeed_config", ds)
    command = ["--config", str(killed), "--deepspeed_config", str(ds)]
    start_and_kill(command, tmp_path / "b/out")
    assert list_steps(tmp_path / "b/out"), "a checkpoint was due before the kill"
    text = rank_helpers.run(2, command, tmp_path / "resumed.log")
    assert "resume at step" in text
    assert train_lines(tmp_path / "b/out") == train_lines(tmp_path / "a/out")
    assert eval_scores(tmp_path / "b/out") == eval_scores(tmp_path / "a/out")
    first, _ = load_whole_state(tmp_path / "a/out/checkpoints/step-00000012")
    second, _ = load_whole_state(tmp_path / "b/out/checkpoints/step-00000012")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
