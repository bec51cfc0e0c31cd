"""RunLog, its records and trackers: console, metrics.jsonl, TensorBoard, wandb and mlflow."""

import io
import json
import logging
import math
import subprocess
import sys
import time
import types

import pytest

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.base.numbers import format_count, format_duration, format_value
from deberta_ds.config.objective import KINDS
from deberta_ds.config.run_config import LogConfig
from deberta_ds.objectives.base import MINIMAL_PAIRS
from deberta_ds.objectives.build import objective_named
from deberta_ds.tracking import trackers
from deberta_ds.tracking.log import RunLog, append_record, read_metrics, truncate_records

METRICS = {kind: (*objective_named(kind).METRICS, MINIMAL_PAIRS) for kind in KINDS}


def train_record(step, **more):
    return {"kind": "train", "step": step, "sequences_seen": 8 * step, "tokens_seen": 1024 * step,
            "seconds": 0.5 * step, "loss": 2.5 + 7 / (1 + step),
            "generator_loss": 2.4 + 7 / (1 + step), "discriminator_loss": 0.07,
            "discriminator_gain": 0.03 - 0.05 / (1 + 0.05 * step), "learning_rate": 5e-4,
            "grad_norm": 1.25, "tokens_per_second": 12_345.6, "flops_per_second": 41.7e9,
            "mfu": None, "eta_seconds": 754.0, **more}


def eval_record(step, **more):
    return {"kind": "eval", "step": step, "seconds": 0.5 * step, "generator_loss": 4.1,
            "generator_accuracy": 0.3125, "generator_perplexity": 60.3, "unigram_accuracy": 0.054,
            "discriminator_loss": 0.31, "discriminator_accuracy": 0.917, "prior_accuracy": 0.897,
            "discriminator_gain": 0.02, "roc_auc": 0.742, "average_precision": 0.331, **more}


def event_record(step, event):
    return {"kind": "event", "step": step, "seconds": 1.0, "event": event, "detail": "why"}


def make_log(directory, kind="rtd", stream=None, **options):
    return RunLog(directory, True, metrics=METRICS[kind], stream=stream or io.StringIO(),
                  track=(), **options)


def write_run(log, first, last):
    for step in range(first, last + 1):
        log.metrics(train_record(step))
        if step % 5 == 0:
            log.metrics(eval_record(step))


def test_resume_leaves_the_file_of_an_unbroken_run_and_keeps_events(tmp_path):
    whole = make_log(tmp_path / "whole")
    write_run(whole, 1, 20)
    broken = make_log(tmp_path / "broken")
    write_run(broken, 1, 13)
    broken.metrics(event_record(13, "stop"))
    with open(broken.path, "a") as file:
        file.write('{"kind": "train", "st')  # killed in the middle of a line
    resumed = make_log(tmp_path / "broken")
    resumed.truncate(10)
    resumed.metrics(event_record(10, "resume"))
    write_run(resumed, 11, 20)
    records = read_metrics(broken.path)
    assert [r for r in records if r["kind"] != "event"] == read_metrics(whole.path)
    assert [r["event"] for r in records if r["kind"] == "event"] == ["stop", "resume"]


@pytest.mark.parametrize("kind", METRICS)
def test_console_fits_in_80_columns_and_is_aligned(tmp_path, kind):
    stream = io.StringIO()
    log = make_log(tmp_path, kind, stream, total_steps=1_250_000)
    masked = {"masked_loss": 4.1, "masked_accuracy": 0.3125, "masked_perplexity": 60.3}
    for step in range(1_249_960, 1_250_001):
        log.metrics(train_record(step, mfu=0.412, eta_seconds=3.3e5, masked_loss=4.2))
    log.metrics(eval_record(1_250_000, minimal_pairs=0.618, **masked))
    log.info("checkpoint saved at step 1,250,000")
    text = stream.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    headers = [line for line in lines if "tok/s" in line]
    rows = [line for line in lines if "12.3k" in line]
    assert len(headers) == 3 and len({len(line) for line in headers + rows}) == 1
    assert "\033" not in text and "step of 1.25M" in headers[0]
    assert all(part in rows[0] for part in ("1,249,960", "41.2%", "3d19h"))
    predicts_words = any(metric.key.endswith("_perplexity") for metric in METRICS[kind])
    table = [" ".join(line.split()) for line in lines]
    assert any(line.endswith("ccuracy 31.2% unigram 5.4%") for line in table) == predicts_words
    assert "grammar Minimal pairs 61.8% chance 50.0%" in table
    if kind == "rtd_cached":
        assert "disc.loss" in headers[0] and "gen.loss" not in headers[0]
    elif kind == "rtd":
        assert "ROC-AUC 0.742 chance 0.500" in table and "disc.loss" in headers[0]
    else:
        assert "disc" not in text.lower() and "4.2000" in rows[0]


def test_a_long_message_is_one_line_in_a_file_and_several_on_a_terminal(tmp_path):
    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: True)

    text, shown = "kernels: " + "attention tiled, " * 9 + "dropout hash", []
    for stream in (io.StringIO(), Terminal()):
        make_log(tmp_path, stream=stream).info(text)
        shown.append(stream.getvalue().splitlines())
    (line,), lines = shown
    assert line.endswith(f"  {text}")
    assert len(lines) > 1 and max(len(one.replace("\033[2m", "").replace("\033[0m", ""))
                                  for one in lines) <= 80
    assert all(len(one) - len(one.lstrip()) == 10 for one in lines[1:])


def test_flops_stand_in_for_an_unknown_share_of_the_peak(tmp_path):
    stream = io.StringIO()
    make_log(tmp_path, stream=stream, total_steps=50).metrics(train_record(10))
    assert "GFLOP/s" in stream.getvalue() and "41.7" in stream.getvalue()


def test_other_ranks_are_silent(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path / "run", False, stream=stream)
    log.info("hello")
    log.metrics(train_record(1))
    log.truncate(0)
    log.close()
    assert stream.getvalue() == "" and not (tmp_path / "run").exists()


def test_a_record_that_cannot_be_written_is_one_error_that_names_the_file(tmp_path):
    stream = io.StringIO()
    log = make_log(tmp_path, stream=stream)
    log.path.mkdir()
    log.metrics(train_record(1))
    log.metrics(event_record(1, "save"))
    shown = stream.getvalue()
    assert "5.9" in shown and "checkpoint written by step 1" in shown
    with pytest.raises(UserError, match="metrics.jsonl: .*irectory"):
        log.check()
    with pytest.raises(OSError, match="/proc/none"):
        RunLog("/proc/none", True)


def test_tensorboard_gets_every_number_and_hides_what_the_resume_cut(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, True, stream=io.StringIO())
    write_run(log, 1, 4)
    log.close()
    time.sleep(1)  # event files are read in the order of their names, which have whole seconds
    resumed = RunLog(tmp_path, True, stream=io.StringIO())
    resumed.truncate(2)
    resumed.metrics(train_record(3, loss=1.0))
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(losses) == [1, 2, 3] and losses[3] == 1.0
    assert "train/generator_loss" in events.Tags()["scalars"]


def test_importing_log_does_not_import_torch():
    code = "import sys, deberta_ds.tracking.log; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_for_humans():
    counts = {940: "940", 999.6: "1.00k", 12_345: "12.3k", 3_284_000: "3.28M", 1.05e9: "1.05B"}
    assert {value: format_count(value) for value in counts} == counts
    spans = {42: "42s", 185: "3m 05s", 7_800: "2h 10m", 356_400: "4d 03h", 59.7: "1m 00s"}
    assert {value: format_duration(value) for value in spans} == spans
    values = {(0.742, "share"): "74.2%", (-0.0213, "gain"): "−0.0213", (0.0, "gain"): "0",
              (1204.5, "tenths"): "1,204.5", (None, "share"): "–", (5e-4, "rate"): "5.0e−4",
              (3.4121, "number"): "3.412", (1.5 * 2**30, "bytes"): "1.50 GiB",
              (0.0231, "points"): "+2.31 pts", (7.5e12, "number"): "7.50T"}
    assert {key: format_value(*key) for key in values} == values


GOOD = '{"kind": "train", "step": 1, "loss": 2.5}'


@pytest.mark.parametrize(
    "line, rule",
    [('{"kind": "train", "step": 3', "not a whole JSON object"), ('["train", 3]', '"kind"'),
     ('{"kind": "training", "step": 3}', '"kind"'), ('{"kind": ["train"], "step": 3}', '"kind"'),
     ('{"kind": "train", "step": 3.5}', '"step"'), ('{"kind": "train", "step": -1}', '"step"'),
     ('{"kind": "train", "step": true}', '"step"'),
     ('{"kind": "train", "step": 3, "loss": "low"}', '"loss"'),
     ('{"kind": "train", "step": 3, "loss": [1]}', '"loss"'),
     ('{"kind": "train", "step": 3, "loss": Infinity}', '"loss"'),
     ('{"kind": "train", "step": 3, "loss": 1e308}', '"loss"'),
     ('{"kind": "event", "step": 3, "event": 5}', '"event"'),
     ('{"kind": "event", "step": 3}', '"event"'),
     ('{"kind": "train", "step": 3, "detail": null}', '"detail"'), ("", "not a whole JSON object"),
     ("[" * 200_000, "not a record"),
     ('{"kind": "train", "step": ' + "1" * 9_000 + "}", "not a record")])
def test_a_bad_line_is_named(tmp_path, line, rule):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(UserError, match="metrics.jsonl, line 2") as error:
        read_metrics(path)
    assert rule in str(error.value) and len(str(error.value)) < 400 + len(str(path))


def test_the_perplexity_of_a_diverged_run_does_not_end_it(tmp_path):
    """A loss of 700 has a perplexity of 1e304, which the file refused: the run stopped with it."""
    log = make_log(tmp_path)
    record = {"kind": "eval", "step": 3, "loss": 700.0, "perplexity": math.exp(700.0),
              "grad_norm": math.nan, "gain": -math.inf, "count": 10**12}
    log.metrics(record)
    assert read_metrics(log.path) == [record | dict.fromkeys(("perplexity", "grad_norm", "gain"))]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from deberta_ds.tracking.log import append_record
from deberta_ds.base.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(1000):
    try:
        append_record(path, {"kind": "train", "step": step, "loss": 1 / (step + 1)})
    except UserError as error:
        assert "metrics.jsonl: " in str(error) and "ulimit -f" in str(error), error
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
append_record(path, {"kind": "train", "step": step, "loss": 1.0})
print(step)
"""


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path):
    """A file size limit fails as a full disk does: in the middle of a line."""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    steps = [record["step"] for record in read_metrics(path)]
    assert steps == list(range(int(done.stdout) + 1)) and len(steps) > 5


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")  # nothing is lost but the end of the line
    assert len(read_metrics(path)) == 2
    truncate_records(path, json.loads(GOOD)["step"])
    assert len(read_metrics(path)) == 2
    path.write_text(f"{GOOD}\n" + "\0" * 100)  # what a file system may leave after a power cut
    assert len(read_metrics(path)) == 1
    path.write_text(f'{GOOD}\n{{"kind": "event", "step": 9, "event": "save"}}\n{GOOD[:-5]}')
    assert [record["kind"] for record in read_metrics(path)] == ["train", "event"]
    truncate_records(path, 0)
    assert [record["kind"] for record in read_metrics(path)] == ["event"]
    append_record(path, json.loads(GOOD))
    assert len(read_metrics(path)) == 2


RECORD = {"kind": "train", "step": 3, "loss": 2.5, "grad_norm": None}


def test_a_service_without_its_library_is_named(monkeypatch):
    assert trackers.trackers_of(LogConfig()) == [trackers.tensorboard]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="log.wandb = 'mine': needs the package wandb, which is"):
        trackers.trackers_of(LogConfig(wandb="mine"))


def test_a_tracker_of_ones_own_gets_every_record(tmp_path):
    own = tmp_path / "tracker.py"
    own.write_text("SEEN = []\ndef log(record):\n    SEEN.append(record['step'])\n")
    _, opened = trackers.trackers_of(LogConfig(callbacks=(f"{own}:log",)))
    opened(tmp_path, None).write(RECORD)
    assert user_code.load("log.callbacks", f"{own}:log").__globals__["SEEN"] == [3]
    with pytest.raises(UserError, match=r"log\.callbacks: .*tracker\.py has no gone"):
        trackers.trackers_of(LogConfig(callbacks=(f"{own}:gone",)))


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_service_that_fails_is_said_once(monkeypatch, tmp_path, caplog, where):
    def fail(*_, **__):
        raise RuntimeError("no network\nand a long story")

    log = types.SimpleNamespace(log=fail, finish=fail)
    library = types.SimpleNamespace(init=fail if where == "init" else lambda **_: log)
    monkeypatch.setitem(sys.modules, "wandb", library)
    with caplog.at_level(logging.WARNING, "deberta_ds"):
        tracker = trackers.wandb("project")(tmp_path, None)
        for _ in range(3):
            tracker.write(RECORD)
        tracker.close()
    assert caplog.messages == [
        "WARNING: Weights & Biases gets nothing more of this run: no network"]


def test_the_id_of_a_wandb_run_is_kept_with_it(monkeypatch, tmp_path):
    ids = []
    log = types.SimpleNamespace(log=print, finish=print)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda id, **_: ids.append(id) or log))
    for name, purge_step in (("a", 1), ("a", 3), ("b", 3), ("b", 1)):  # 1: from step 0
        (tmp_path / name).mkdir(exist_ok=True)
        trackers.wandb("project")(tmp_path / name, purge_step)
        if purge_step == 3 and name == "a":
            (tmp_path / "a").rename(tmp_path / "b")
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_wandb_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "x"}}))
    for purge_step in (None, 3):
        tracker = trackers.wandb("project")(tmp_path, purge_step)
        tracker.write(RECORD)
        tracker.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    deadline = time.monotonic() + 30  # its service process writes behind our back
    while not all(b"train/loss" in file.read_bytes() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len({file.name for file in files}) == 1  # both parts are one run there


def test_mlflow_in_a_directory(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    for purge_step in (None, 3):
        tracker = trackers.mlflow("experiment")(tmp_path, purge_step)
        tracker.write(RECORD | {"step": 2 + (purge_step or 0)})
        tracker.close()
    run_id = (tmp_path / "mlflow-run.txt").read_text().strip()
    history = mlflow.MlflowClient().get_metric_history(run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(2, 2.5), (5, 2.5)]
