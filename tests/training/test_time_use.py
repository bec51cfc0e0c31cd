"""Goodput, the interval between saves and the slowest host: sums and shares worked out here."""

import math
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import thread_ranks
import torch
from data_helpers import RUN_RECORD

from deberta_ds.checkpoint.find import RunRecord
from deberta_ds.config.run_config import TrainConfig
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.training import best, journal, loop, meters
from deberta_ds.training.loop import Saver
from deberta_ds.training.meters import (
    Meters,
    SpeedMeter,
    TimeUse,
    WorkMeter,
    find_slowest,
    lost_before,
    repeated_seconds,
    seconds_since_start,
)


def test_the_line_counts_saves_evaluations_starts_and_what_a_crash_has_lost():
    lines = [{"kind": "event", "event": "start", "lost_seconds": 20.0, "seconds": 0.0},
             {"kind": "train", "seconds": 100.0},
             {"kind": "event", "event": "save", "seconds": 110.0},
             {"kind": "train", "seconds": 500.0},  # killed: the next start has counted it
             {"kind": "event", "event": "resume", "lost_seconds": 30.0, "seconds": 110.0},
             {"kind": "train", "seconds": 260.0}, {"kind": "eval", "seconds": None}]
    assert lost_before(lines) == 50.0
    assert repeated_seconds(lines, 200.0) == 60.0  # killed at 260 s, the checkpoint is of 200 s
    assert repeated_seconds([], 0.0) == 0.0
    old = {"kind": "event", "event": "fail", "seconds": 400.0}  # of a start before the last one
    assert repeated_seconds([old, *lines], 200.0) == 60.0
    use = TimeUse({"saves": 10.0}, lost=100.0)
    with use.during("evaluations"):
        time.sleep(0.01)
    use.seconds["evaluations"] = 40.0
    assert use.line(300.0) == ("time: steps 62.5%, saves 2.5%, evaluations 10.0%, starts and "
                               "repeated steps 25.0% of 6m 40s")
    assert use.record(300.0) == {"saves_seconds": 10.0, "evaluations_seconds": 40.0,
                                 "restarts_seconds": 100.0, "goodput": 0.625}
    assert 0 < seconds_since_start() < 1e6


def test_flops_are_shared_by_all_gpus():
    speed = SpeedMeter(peak=100.0, world_size=4, sequences_seen=10)
    speed.count(50)
    speed.pause()
    speed._seconds = 2.0
    assert speed.read(20, 40, flops_per_token=6.0) == {
        "tokens_per_second": 25.0, "flops_per_second": 150.0, "mfu": 0.375, "eta_seconds": 4.0}


def test_all_clocks_know_what_is_no_step():
    waits = []

    @contextmanager
    def patience():
        waits.append("begin")
        yield
        waits.append("end")

    speed = SpeedMeter(peak=None, world_size=1, sequences_seen=0)
    clocks = Meters(speed, TimeUse({}, lost=0.0), None, SimpleNamespace(patience=patience))
    with clocks.during("saves"):
        time.sleep(0.2)
    speed.count(1.0)
    assert clocks.time_use.seconds["saves"] >= 0.2 and clocks.time_use.seconds["evaluations"] == 0
    assert speed.read(1, 2, 1.0)["tokens_per_second"] > 1 / 0.2 and waits == ["begin", "end"]


def test_the_interval_between_saves_loses_least():
    """Held against every other interval by the sum it comes from."""
    for ranks, pause in ((64, 17.4), (512, 17.4), (1024, 17.4), (1024, 60.0)):
        best = meters.save_interval(ranks, pause)
        least = meters.lost_share(ranks, pause, best)
        for other in (0.3, 0.7, 1.4, 3.0):
            assert meters.lost_share(ranks, pause, other * best) > least
    # Worked out by hand for a 1.5B model that stands still for 17.4 s a save.
    assert [round(meters.save_interval(n, 17.4) / 60) for n in (64, 512, 1024)] == [165, 58, 41]
    assert meters.save_interval(1024, 0.001) == 600
    assert meters.save_interval(1024, 0.001, write_seconds=90) == 900


def test_saves_come_by_the_measured_pause():
    weights = torch.nn.Linear(10, 10)
    engine = SimpleNamespace(module=weights, device=torch.device("cpu"))
    train = SimpleNamespace(save_every=1000, save_minutes="auto", log_every=5, upload="",
                            keep_every=0)
    saver = Saver(engine, "unused", train, "unused", print)
    assert saver.interval_seconds() == 600 and not saver.is_due(5) and saver.is_due(1000)
    saver.pause_seconds = 2.0
    hours = saver.interval_seconds() / 3600
    assert hours == pytest.approx(math.sqrt(2 * 2.0 * 3600 * 50_000) / 3600)
    saver.begun_at -= 3600 * hours
    assert saver.is_due(5) and not saver.is_due(6)
    train.save_minutes = 0
    assert not saver.is_due(5)


def test_the_slowest_host_is_named_with_its_share():
    hosts = [f"node{rank // 2}" for rank in range(8)]
    seconds = [1.0, 1.0, 1.0, 1.2, 1.4, 1.6, 1.0, 1.0]
    slowest = find_slowest(seconds, hosts)
    assert slowest.name == "node2" and slowest.share == pytest.approx(1.5 / 1.05 - 1)
    assert find_slowest([1.0, 2.0, 1.0], ["a"] * 3).name == "a, rank 1"
    assert find_slowest([1.0], ["a"]) is None
    assert find_slowest([0.0, 0.0], ["a", "b"]).share == 0.0


def test_a_meter_measures_loading_and_computing_until_it_is_read():
    meter = WorkMeter(torch.device("cpu"))
    with meter.loading():
        time.sleep(0.02)
    with meter.computing():
        time.sleep(0.02)
    assert 0.04 <= meter.read() < 5 and meter.read() == 0.0


CPU = torch.device("cpu")


def test_a_journal_goes_on_where_its_checkpoint_was(monkeypatch):
    run = SimpleNamespace(train=TrainConfig(
        steps=20, global_batch_size=8, micro_batch_size=8, initial_batch_size=0,
        batch_warmup_steps=0))
    monkeypatch.setattr(journal.run_config, "to_dict", lambda run: {})
    lines, record = [], RunRecord(**RUN_RECORD | {
        "step": 10, "tokens_seen": 70, "config": {}, "since_line": {"tokens": 5.0}})
    monkeypatch.setattr(journal, "objective_of", lambda run: SimpleNamespace(
        flops_per_token=lambda run: 1.0, means=lambda run, sums: sums))
    inputs = SimpleNamespace(ds=DeepSpeedConfig(), tokenizer=SimpleNamespace(sha256=""),
                             dataset=SimpleNamespace(num_rows={"a": 40}), identity={})
    started = SimpleNamespace(
        record=record, inputs=inputs, lost_before=5.0, lost_now=2.0,
        found=SimpleNamespace(begun_from=""), log=SimpleNamespace(metrics=lines.append),
        engine=SimpleNamespace(device=CPU, get_global_grad_norm=lambda: 1.5))
    mine = journal.Journal(run, started, None)
    mine.meters.speed.pause()
    mine.meters.speed._seconds = 8.0
    mine.step += 2  # 16 of its 160 sequences
    mine.count(SimpleNamespace(sums={"tokens": 9.0}))
    saved = mine.run_record(SimpleNamespace(spikes=SimpleNamespace(losses=[])), best.Best(
        "", scored=""))
    assert saved.since_line == {"tokens": 14.0} and saved.tokens_seen == 79
    mine.train_line(0.1)
    (line,) = lines
    assert (line["restarts_seconds"], line["epochs"], line["tokens"]) == (7.0, 2.4, 14.0)
    assert line["eta_seconds"] == pytest.approx(8 / 16 * 64)


def test_a_checkpoint_is_finished_when_every_rank_has_written(monkeypatch):
    monkeypatch.setattr(loop, "finish_save", lambda one: Path("whole"))

    def finish(rank: int):
        mine = Saver.__new__(Saver)
        mine.engine, mine.uploads, mine.begun_at = SimpleNamespace(device=CPU), None, 0.0
        mine.in_background = SimpleNamespace(is_written=lambda: rank == 0)
        return mine.finish(wait=False)

    monkeypatch.setattr(loop.dist, "sum_over_ranks",
                        lambda value: sum(loop.dist.gather_objects(value)))
    monkeypatch.setattr(loop.dist, "is_main", lambda: loop.dist.rank() == 0)
    assert thread_ranks.run(2, finish) == [None, None]


def test_the_end_of_the_metrics_is_uploaded_too():
    begun, mine = [], Saver.__new__(Saver)
    mine.train = SimpleNamespace(upload="s3://a/b")
    mine.uploads = SimpleNamespace(begin_round=lambda: begun.append(1), is_running=lambda: False)
    mine.finish_uploads(None)
    assert begun == [1]


def test_a_run_that_is_slower_than_planned_says_so_and_a_busy_machine(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (64.5, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    assert journal.slower_than_planned(1900.0, 1000.0) == ""
    assert journal.slower_than_planned(0.0, 1000.0) == ""
    said = journal.slower_than_planned(4700.0, 1000.0)
    assert "4.7 times slower than planned" in said and "64.5 on 8 cores: it is busy" in said
    monkeypatch.setattr("os.getloadavg", lambda: (8.0, 0.0, 0.0))
    assert "busy" not in journal.slower_than_planned(4700.0, 1000.0)
