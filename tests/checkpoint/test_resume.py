"""Resume is bit-identical: after kill -9 at any moment; other ranks and stages: the same losses."""

import os
import random
import shutil
import signal
import time

import psutil
import pytest
import rank_helpers
import torch
from launching import ROOT, deepspeed_json, losses, make_run, options_of, torchrun

from deberta_ds.checkpoint.find import list_finished, list_steps, step_of
from deberta_ds.checkpoint.saved_state import load_whole_state
from deberta_ds.tracking.log import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def records(out, kind: str = "train") -> list[dict]:
    return [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == kind]


def train_lines(out) -> list[tuple]:
    keys = ("step", "loss", "generator_loss", "discriminator_loss", "grad_norm", "sequences_seen",
            "tokens_seen")
    return [tuple(r[key] for key in keys) for r in records(out)]


def eval_scores(out) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records(out, "eval")]


def start_and_kill(command, out, is_time) -> int:
    """Start the run on two ranks, kill both as soon as is_time(out, ranks); return the step of the
    newest whole checkpoint.

    Not under torchrun: its ranks have sessions of their own and outlive its process group.
    """
    log = out.parent / "killed.log"
    ranks = rank_helpers.start(2, command, log)
    deadline = time.monotonic() + 200
    try:
        while not is_time(out, ranks):
            assert all(rank.is_alive() for rank in ranks), "it ended before it could be killed"
            assert time.monotonic() < deadline, f"not killed in time\n{log.read_text()[-4000:]}"
            time.sleep(0.002)
    finally:
        rank_helpers.kill(ranks)
    return step_of(list_finished(out)[-1])


def at_random(out, _ranks) -> bool:
    """Return True somewhere in the 0.3 s behind a step and a finished save."""
    if not list_finished(out) or max(losses(out), default=0) < 4:
        return False
    time.sleep(random.random() * 0.3)
    return True


def while_saving(out, ranks) -> bool:
    """Return whether a save goes on behind a finished one; rank 0, which would end it, sleeps."""
    def is_unfinished() -> bool:
        return bool(done := list_finished(out)) and list_steps(out)[-1] != done[-1]

    if not is_unfinished():
        return False
    os.kill(ranks[0].pid, signal.SIGSTOP)
    while psutil.Process(ranks[0].pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    if is_unfinished():
        return True
    os.kill(ranks[0].pid, signal.SIGCONT)  # the manifest came first
    return False


@pytest.mark.parametrize("log_every", [1, 7, 10] if "FULL_TABLE" in os.environ else [7])
def test_a_checkpoint_between_two_lines_loses_no_tokens(tmp_path, log_every):
    """tokens_seen and a line's means count every step since the last line, saves between or not."""
    ds = deepspeed_json(tmp_path / "zero1.json", 1)
    run_file = make_run(tmp_path, dropout=0.1, log_every=str(log_every), steps="14",
                        save_every="3", workers="1", global_batch_size="4", two_layers=True)
    command = options_of(run_file, ds)
    rank_helpers.run(1, command, tmp_path / "whole.log")
    whole = train_lines(tmp_path / "out")
    for path in list_steps(tmp_path / "out"):
        if step_of(path) > 10:  # as if the run had been killed after that save
            shutil.rmtree(path)
    with open(tmp_path / "out/metrics.jsonl", "a") as file:  # in the middle of a line: such a run
        file.write('{"kind": "event", "step": 2')  # could not be resumed
    rank_helpers.run(1, command, tmp_path / "resumed.log")
    assert train_lines(tmp_path / "out") == whole
    assert [line[0] for line in whole] == sorted({*range(log_every, 14, log_every), 14})


def test_a_run_goes_back_to_an_older_checkpoint_and_its_command_goes_on_from_there(tmp_path):
    """Later checkpoints are of a course that was left: neither kept for new ones nor loaded."""
    ds = deepspeed_json(tmp_path / "zero1.json", 1)
    run_file = make_run(tmp_path, dropout=0.1, steps="12", save_every="2", workers="1",
                        global_batch_size="4", two_layers=True)
    command = [*options_of(run_file, ds), "--train.keep=2"]
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


def test_layers_that_keep_their_linear_outputs_go_on_under_zero3(tmp_path):
    """With the weights of every real size: large ones are gathered, small ones stay everywhere, so
    that after a resume the two forward passes of a layer gather other weights.
    """
    ds = deepspeed_json(tmp_path / "zero3.json", 3, zero_optimization={
        "stage": 3, "stage3_param_persistence_threshold": 1000})
    run_file = make_run(tmp_path, dropout=0.1, steps="6", save_every="3", eval_every="6",
                        global_batch_size="4", two_layers=True)
    command = [*options_of(run_file, ds), "--train.activation_checkpointing=selective"]
    rank_helpers.run(1, command, tmp_path / "whole.log")
    halves = [*command, f"--out_dir={tmp_path / 'halves'}"]
    rank_helpers.run(1, [*halves, "--train.stop_after=3"], tmp_path / "first.log")
    assert "resume at step 3" in rank_helpers.run(1, halves, tmp_path / "second.log")
    assert train_lines(tmp_path / "halves") == train_lines(tmp_path / "out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(run file, DeepSpeed file) of a run that nothing has broken off."""
    root = tmp_path_factory.mktemp("whole")
    run_file = make_run(
        root, dropout=0.1, steps="9", eval_every="9", save_every="2", initial_batch_size="2",
        batch_warmup_steps="8", two_layers=True)  # kills fall into its growth
    ds = deepspeed_json(root / "zero3.json", 3)
    torchrun(2, ROOT / "launch/pretrain.py", *options_of(run_file, ds))
    return run_file, ds


@pytest.mark.parametrize("moment", [at_random, while_saving])
def test_killed_run_resumes_bit_identically(whole, tmp_path, moment):
    (run_file, ds), out = whole, tmp_path / "out"
    command = [*options_of(run_file, ds), f"--out_dir={out}"]
    step = start_and_kill(command, out, moment)
    assert step < 9 and (moment is at_random or step_of(list_steps(out)[-1]) > step)
    text = rank_helpers.run(2, command, tmp_path / "resumed.log")
    assert f"resume at step {step}" in text
    unbroken = run_file.parent / "out"
    assert train_lines(out) == train_lines(unbroken)
    assert eval_scores(out) == eval_scores(unbroken)
    first, _ = load_whole_state(unbroken / "checkpoints/step-00000009")
    second, _ = load_whole_state(out / "checkpoints/step-00000009")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# Functions of a step's place in the run.
FALLING = ("--objective.mask.rate=0.3", "--objective.mask.final_rate=0.15",
           "--objective.temperature=2.0", "--objective.final_temperature=0.5",
           "--train.initial_batch_size=2", "--train.batch_warmup_steps=9")


def test_other_ranks_and_stages_go_on_with_the_same_rows(tmp_path):
    """One rank, then two under ZeRO-3, then one under ZeRO-2; dropout depends on ranks: none."""
    run_file = make_run(tmp_path, steps="9", save_every="3", log_every="1", workers="1",
                        two_layers=True)
    configs = {stage: deepspeed_json(tmp_path / f"zero{stage}.json", stage) for stage in (1, 2, 3)}

    def run(name: str, ranks: int, stage: int, *options: str) -> str:
        command = [*options_of(run_file, configs[stage]), f"--out_dir={tmp_path / name}",
                   *FALLING, *options]
        return rank_helpers.run(ranks, command, tmp_path / f"{name}-{stage}.log")

    run("whole", 1, 1)
    run("moved", 1, 1, "--train.stop_after=3")
    assert "1 rank" in run("moved", 2, 3, "--train.stop_after=6")
    assert "2 ranks" in run("moved", 1, 2)
    whole, moved = records(tmp_path / "whole"), records(tmp_path / "moved")
    assert [line["step"] for line in moved] == list(range(1, 10))
    for line, other in zip(whole, moved, strict=True):
        for key in ("step", "sequences_seen", "tokens_seen"):
            assert line[key] == other[key], key
        for key in line:
            if key.endswith("loss"):
                assert other[key] == pytest.approx(line[key], rel=1e-5), (line["step"], key)
