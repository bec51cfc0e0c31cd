"""Signals, frozen and killed ranks, and bad steps: what the job does, and what it says."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_helpers
import signal_trials
from launching import ROOT, deepspeed_json, make_run, options_of

from deberta_ds.base.errors import EXIT_REQUEUE, UserError
from deberta_ds.checkpoint.find import read_run_record
from deberta_ds.cluster import dist, lock
from deberta_ds.cluster.watchdog import EXIT_STUCK
from deberta_ds.config.run_config import DataConfig, TrainConfig
from deberta_ds.engine.engine import BadStepError, update
from deberta_ds.tracking.log import read_metrics
from deberta_ds.training import step as steps
from deberta_ds.training.step import WINDOW, SpikeRule


@pytest.fixture
def job(tmp_path):
    """Return the arguments of a run that would take minutes, and its directory."""
    run_file = make_run(tmp_path, steps="2000", save_every="2000", eval_every="2000",
                        workers=str(DataConfig.workers), two_layers=True)
    ds_file = deepspeed_json(tmp_path / "ds.json", 3)
    return options_of(run_file, ds_file), tmp_path


def start_and_reach(step: int, arguments: list[str], root: Path) -> list:
    """Start two ranks and wait until `step` is logged."""
    processes = rank_helpers.start(2, arguments, root / "log")
    wait_for_step(step, processes, root)
    return processes


def wait_for_step(step: int, processes: list, root: Path) -> None:
    metrics, deadline = root / "out/metrics.jsonl", time.monotonic() + 400
    while f'"step": {step},' not in (metrics.read_text() if metrics.exists() else ""):
        assert time.monotonic() < deadline and all(p.is_alive() for p in processes), \
            (root / "log").read_text()[-4000:]
        time.sleep(0.1)


@pytest.mark.multi
@pytest.mark.slow
def test_a_signal_to_one_rank_saves_on_all_and_asks_for_a_requeue(job):
    arguments, root = job
    processes = start_and_reach(3, arguments, root)
    os.kill(processes[1].pid, signal.SIGUSR1)
    assert rank_helpers.wait(processes) == [EXIT_REQUEUE] * 2, (root / "log").read_text()[-4000:]
    events = [r for r in read_metrics(root / "out/metrics.jsonl") if r["kind"] == "event"]
    assert [e["event"] for e in events] == ["start", "save", "stop"]
    step = events[-1]["step"]
    assert (root / f"out/checkpoints/step-{step:08d}/manifest.json").exists()
    more = [*arguments, f"--train.stop_after={step + 1}"]
    assert rank_helpers.wait(rank_helpers.start(2, more, root / "log")) == [0, 0]
    steps = [r["step"] for r in read_metrics(root / "out/metrics.jsonl") if r["kind"] == "train"]
    assert steps == list(range(1, step + 2))


@pytest.mark.multi
@pytest.mark.slow
def test_the_watchdog_names_a_frozen_rank(job):
    """Of a run; the others, and killed ones: cluster/test_watchdog.py."""
    arguments, root = job
    processes = start_and_reach(3, [*arguments, "--train.watchdog_seconds=10"], root)
    other, victim = processes
    started = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        other.join(90)
        assert other.exitcode == EXIT_STUCK
        assert time.monotonic() - started < 45  # 10 s where the machine is not shared
    finally:
        rank_helpers.kill(processes)
    text = (root / "log").read_text()
    assert f"rank 1 on {os.uname().nodename} (pid {victim.pid}): SILENT" in text
    assert "last step" in text
    assert "in run_to_end" in text, text  # whichever collective it waits in


def test_spike_rule():
    rule = SpikeRule(3.0)
    for number in range(WINDOW):
        assert rule.ceiling() > 1e300  # not before the window is full
        rule.accept(1.0 + number % 2)  # mean 1.5, deviation 0.5
    assert rule.ceiling() == pytest.approx(3.0)
    assert SpikeRule(3.0, json.loads(json.dumps(list(rule.losses)))).ceiling() == rule.ceiling()
    assert SpikeRule(0.0, rule.losses).ceiling() > 1e300


def test_a_run_that_never_reaches_its_next_checkpoint_stops_rolling_back(monkeypatch):
    """With one good step between bad ones it threw away every step that it had trained."""
    path, loaded = Path("out/checkpoints/step-00000100"), []
    monkeypatch.setattr(steps.find, "find", lambda *_: steps.find.Found(path))
    monkeypatch.setattr(steps.saved_state, "load_state", lambda engine, path: loaded.append(path))
    monkeypatch.setattr(steps, "read_run_record",
                        lambda path: SimpleNamespace(recent_losses=[2.0, 3.0]))
    train = TrainConfig(on_spike="rollback", spike_sigmas=3.0, global_batch_size=8,
                        micro_batch_size=8, steps=1000)
    found = steps.BadSteps(SimpleNamespace(train=train, out_dir="out"), None, [2.0, 3.0, 9.0])
    for _ in range(3):
        for _ in range(3):  # in a row: nothing is thrown away but the bad rows
            event, text, place = found.skip(100, "the loss is nan")
            assert list(found.spikes.losses) == [2.0, 3.0]  # those of the checkpoint
        found.accept(1.0)
    assert loaded == [path] * 9 and event == "rollback" and str(path) in text
    assert place == {"first_sequence": 792, "last_sequence": 799}
    with pytest.raises(BadStepError, match="3 rollbacks to .*step-00000100.*older one"):
        found.skip(100, "the loss is nan")
    path = Path("out/checkpoints/step-00000200")
    found.accept(1.0)
    found.skip(100, "the loss is nan")
    assert loaded[-1] == path


@pytest.fixture(scope="module")
def bad_step_runs(tmp_path_factory):
    """({run: {step: digests of the weights before it}}, where the runs are); step 4 was bad."""
    root = tmp_path_factory.mktemp("pass_over")
    run_file = make_run(root, steps="8", eval_every="100", save_every="3", two_layers=True)
    files = [deepspeed_json(root / f"zero{stage}.json", stage) for stage in (1, 3)]
    files.append(ROOT / "ds_configs/zero2_fp16.json")
    rank_helpers.run(2, [str(run_file), str(root / "out.json"), "4", f"skip={files[1]}",
                         *(f"rollback={file}" for file in files)],
                     root / "log", ROOT / "tests/workers/pass_over.py")
    return json.loads((root / "out.json").read_text()), root


@pytest.mark.parametrize("name", ["skip-zero3", "rollback-zero1", "rollback-zero3"])
@pytest.mark.multi
@pytest.mark.slow
def test_a_bad_step_is_skipped_and_its_rows_are_recorded(bad_step_runs, name):
    digests, root = bad_step_runs
    weights = [digests[name][str(step)] for step in range(8)]
    before = 4 if name.startswith("skip") else 3  # no update, or the checkpoint of step 3
    assert weights[5] == weights[before] != weights[2] and weights[6] != weights[5]
    records = read_metrics(root / name / "metrics.jsonl")
    event = next(r for r in records if r.get("event") == name.split("-")[0])
    assert (event["step"], event["first_sequence"], event["last_sequence"]) == (5, 32, 39)
    assert [r["step"] for r in records if r["kind"] == "train"] == [*range(1, 5), *range(6, 9)]


@pytest.mark.parametrize("kind", ["zero1", "zero3", "zero2_fp16"])
@pytest.mark.multi
@pytest.mark.slow
def test_after_a_rollback_a_run_is_a_fresh_resume_without_those_rows(bad_step_runs, kind):
    digests, root = bad_step_runs
    rolled_back, fresh = (digests[f"{name}-{kind}"] for name in ("rollback", "fresh"))
    assert [rolled_back[str(step)] for step in range(5, 8)] == [fresh[str(step)]
                                                                for step in range(5, 8)]
    losses = [[(r["step"], r["loss"], r["grad_norm"]) for r in
               read_metrics(root / f"{name}-{kind}/metrics.jsonl")
               if r["kind"] == "train" and r["step"] > 5] for name in ("rollback", "fresh")]
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.multi
@pytest.mark.slow
def test_the_shipped_fp16_scale_settles_after_two_overflows(bad_step_runs):
    """2^12, lowered at the second overflow (hysteresis 2); no weight moves before that."""
    digests, root = bad_step_runs
    records = read_metrics(root / "rollback-zero2_fp16/metrics.jsonl")
    overflows = [(r["step"], r["loss_scale"]) for r in records if r.get("event") == "overflow"]
    assert overflows == [(1, 4096.0), (2, 2048.0)]
    weights = [digests["rollback-zero2_fp16"][str(step)] for step in range(4)]
    assert weights[0] == weights[1] == weights[2] != weights[3]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert losses[-1] < losses[2]


@pytest.mark.parametrize(("launcher", "what", "code"), [
    ("python", "SIGTERM to the group", EXIT_REQUEUE),
    ("python", "Ctrl-C", EXIT_REQUEUE),
    ("deepspeed", "SIGTERM to the launcher", 128 + signal.SIGTERM)])
@pytest.mark.multi
@pytest.mark.slow
def test_a_signal_saves_with_the_shipped_workers(tmp_path, launcher, what, code):
    """The loader's worker gets the signal, too; DeepSpeed's launcher ends and leaves its ranks."""
    result = signal_trials.trial(launcher, what, DataConfig.workers, tmp_path)
    text = (tmp_path / "log").read_text()
    assert (result.exit_code, result.saved_step) == (code, result.last_step), text[-4000:]
    assert result.last_step >= 3 and result.left_running == 0
    assert "Traceback" not in text
    assert "exit code 75 (a launcher's own may be 1): the same command goes on from here" in text


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_says_where_the_run_goes_on(tmp_path):
    result = signal_trials.trial("python", "Ctrl-C twice", DataConfig.workers, tmp_path)
    text = (tmp_path / "log").read_text()
    assert (result.exit_code, result.saved_step, result.left_running) == (130, 0, 0), text[-4000:]
    assert "The same command goes on from step 0" in text and "Traceback" not in text


def test_a_job_that_lost_its_directory_writes_no_more(tmp_path):
    """It stood still, another took over; a lock that is gone or damaged says nothing."""
    mine = lock.this_process()
    lock.check(tmp_path)
    lock.take(tmp_path / lock.NAME, mine)
    lock.check(tmp_path)
    other = dataclasses.replace(mine, host="elsewhere", pid=7)
    (tmp_path / lock.NAME).write_text(json.dumps(dataclasses.asdict(other)))
    with pytest.raises(UserError, match="process 7 on elsewhere has taken it over"):
        lock.check(tmp_path)


def test_a_run_file_that_one_rank_cannot_read_is_said(tmp_path, monkeypatch):
    """That rank's error was taken for one of every rank, which rank 0 prints: nobody did."""
    said = []
    monkeypatch.setattr(dist, "gather_objects", lambda problem: said.append(problem) or said)
    with pytest.raises(UserError, match="run.json: missing") as caught:
        dist.together(lambda: read_run_record(tmp_path))
    assert said[0][0] == str(caught.value) and caught.value.on_every_rank


def test_a_loss_scale_that_cannot_fall_is_one_clear_error():
    """DeepSpeed raises a plain Exception."""
    def take_step():
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore.")

    engine = SimpleNamespace(optimizer=SimpleNamespace(overflow=True), step=take_step)
    with pytest.raises(BadStepError, match="lowest loss scale; train in bf16"):
        update(engine)
