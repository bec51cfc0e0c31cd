"""RunLog: what lands in metrics.jsonl, what a resume leaves of it, what the console shows."""

import io
import json
import subprocess
import sys

import pytest

from deberta_ds.errors import UserError
from deberta_ds.log import RunLog, format_count, format_duration, read_metrics


def train_record(step, **more):
    return {
        "kind": "train", "step": step, "rows_seen": 8 * step, "tokens_seen": 1024 * step,
        "seconds": 0.5 * step, "loss": 2.5 + 7 / (1 + step), "generator_loss": 2.4 + 7 / (1 + step),
        "discriminator_loss": 0.07, "discriminator_gain": 0.03 - 0.05 / (1 + 0.05 * step),
        "learning_rate": 5e-4, "grad_norm": 1.25, "tokens_per_second": 12_345.6,
        "flops_per_second": 41.7e9, "mfu": None, "eta_seconds": 754.0, **more,
    }  # fmt: skip


def eval_record(step):
    return {
        "kind": "eval", "step": step, "seconds": 0.5 * step, "generator_loss": 4.1,
        "generator_accuracy": 0.3125, "generator_perplexity": 60.3, "unigram_accuracy": 0.054,
        "discriminator_loss": 0.31, "discriminator_accuracy": 0.917, "prior_accuracy": 0.897,
        "discriminator_gain": 0.02, "roc_auc": 0.742, "average_precision": 0.331,
    }  # fmt: skip


def event_record(step, event):
    return {"kind": "event", "step": step, "seconds": 1.0, "event": event, "detail": "why"}


def write_run(log, first, last):
    for step in range(first, last + 1):
        log.metrics(train_record(step))
        if step % 5 == 0:
            log.metrics(eval_record(step))


def test_resume_leaves_the_file_of_an_unbroken_run_and_keeps_events(tmp_path):
    whole = RunLog(tmp_path / "whole", True, stream=io.StringIO(), tensorboard=False)
    write_run(whole, 1, 20)
    broken = RunLog(tmp_path / "broken", True, stream=io.StringIO(), tensorboard=False)
    write_run(broken, 1, 13)
    broken.metrics(event_record(13, "stop"))
    with open(broken.path, "a") as file:
        file.write('{"kind": "train", "st')  # killed in the middle of a line
    resumed = RunLog(tmp_path / "broken", True, stream=io.StringIO(), tensorboard=False)
    resumed.truncate(10)
    resumed.metrics(event_record(10, "resume"))
    write_run(resumed, 11, 20)
    records = read_metrics(broken.path)
    assert [r for r in records if r["kind"] != "event"] == read_metrics(whole.path)
    assert [r["event"] for r in records if r["kind"] == "event"] == ["stop", "resume"]


def test_console_fits_in_100_columns_and_is_aligned(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, True, total_steps=1_250_000, stream=stream, tensorboard=False)
    for step in range(1_249_960, 1_250_001):
        log.metrics(train_record(step, mfu=0.412, eta_seconds=3.3e5))
    log.metrics(eval_record(1_250_000))
    log.info("checkpoint saved", step=1_250_000)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    headers = [line for line in lines if "disc.loss" in line]
    rows = [line for line in lines if "/1,250,000" in line]
    assert len(headers) == 3 and len({len(line) for line in headers + rows}) == 1
    assert "\033" not in stream.getvalue()
    assert "12.3k" in rows[0] and "41.2%" in rows[0] and "3d 19h" in rows[0]
    assert "ROC-AUC 0.742" in stream.getvalue() and "gain +0.0200 nats" in stream.getvalue()


def test_mlm_records_need_no_discriminator_and_flops_stand_in_for_an_unknown_mfu(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, True, total_steps=50, stream=stream, tensorboard=False)
    drop = ("discriminator", "roc_auc", "average", "prior")
    for record in (train_record(10), eval_record(10)):
        log.metrics({k: v for k, v in record.items() if not k.startswith(drop)})
    text = stream.getvalue()
    assert "GFLOP/s" in text and "41.7" in text and "disc" not in text


def test_nonfinite_numbers_become_null(tmp_path):
    log = RunLog(tmp_path, True, stream=io.StringIO(), tensorboard=False)
    log.metrics(train_record(1, grad_norm=float("inf")))
    assert json.loads(log.path.read_text())["grad_norm"] is None


def test_other_ranks_are_silent(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path / "run", False, stream=stream)
    log.info("hello")
    log.metrics(train_record(1))
    log.truncate(0)
    log.close()
    assert stream.getvalue() == "" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "line, rule",
    [
        ('{"kind": "train", "step": 3', "not a whole JSON object"),
        ('["train", 3]', '"kind"'),
        ('{"kind": "training", "step": 3}', '"kind"'),
        ('{"kind": "train", "step": 3.5}', '"step"'),
        ('{"kind": "train", "step": 3, "loss": "low"}', '"loss"'),
        ('{"kind": "train", "step": 3, "loss": [1]}', '"loss"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, rule):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train_record(1)) + "\n" + line + "\n")
    with pytest.raises(UserError, match="metrics.jsonl, line 2") as error:
        read_metrics(path)
    assert rule in str(error.value)


def test_tensorboard_gets_every_number_and_hides_what_the_resume_cut(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, True, stream=io.StringIO())
    write_run(log, 1, 4)
    log.close()
    resumed = RunLog(tmp_path, True, stream=io.StringIO())
    resumed.truncate(2)
    resumed.metrics(train_record(3, loss=1.0))
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(losses) == [1, 2, 3] and losses[3] == 1.0
    assert "train/generator_loss" in events.Tags()["scalars"]


def test_importing_log_does_not_import_torch():
    code = "import sys, deberta_ds.log; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_for_humans():
    counts = {940: "940", 999.6: "1.00k", 12_345: "12.3k", 3_284_000: "3.28M", 1.05e9: "1.05B"}
    assert {value: format_count(value) for value in counts} == counts
    spans = {42: "42s", 185: "3m 05s", 7_800: "2h 10m", 356_400: "4d 03h", 59.7: "1m 00s"}
    assert {value: format_duration(value) for value in spans} == spans
