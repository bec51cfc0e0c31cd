"""What changed a run's numbers or waits without a test noticing (docs/evidence/reliability.md)."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import thread_ranks
import torch
from data_helpers import RUN_RECORD

from deberta_ds.checkpoint.run_record import RunRecord
from deberta_ds.config.run_config import TrainConfig
from deberta_ds.model.dropout import pass_keys
from deberta_ds.training import bad_steps, best, journal, loop, rehearsal
from deberta_ds.training.step import seed_of, seed_step

CPU = torch.device("cpu")


def test_a_rollback_goes_on_with_the_losses_of_its_checkpoint(monkeypatch):
    monkeypatch.setattr(bad_steps.find, "find", lambda *_: bad_steps.find.Found(Path("step-1")))
    monkeypatch.setattr(bad_steps.find, "load", lambda *_: None)
    monkeypatch.setattr(bad_steps, "read_run_record", lambda path: SimpleNamespace(
        recent_losses=[2.0, 3.0]))
    train = TrainConfig(on_spike="rollback", spike_sigmas=3.0, global_batch_size=8,
                        micro_batch_size=8, steps=9)
    found = bad_steps.BadSteps(SimpleNamespace(train=train, out_dir="out"), None, [2.0, 3.0, 9.0])
    found.skip(5, "the loss is nan")
    assert list(found.spikes.losses) == [2.0, 3.0]


def test_the_best_is_of_the_same_masks_as_well():
    def rows(label: int):
        return {"a": [SimpleNamespace(input_ids=torch.tensor([1, 2]).numpy(),
                                      labels=torch.tensor([-100, label]).numpy())]}

    run = SimpleNamespace(train=SimpleNamespace(best_metric="generator_loss"))
    first, same, other = (best.what_is_scored(run, rows(label), []) for label in (5, 5, 6))
    assert first == same != other


def test_a_journal_goes_on_where_its_checkpoint_was(monkeypatch):
    run = SimpleNamespace(train=TrainConfig(
        steps=20, global_batch_size=8, micro_batch_size=8, initial_batch_size=0,
        batch_warmup_steps=0))
    monkeypatch.setattr(journal.run_config, "to_dict", lambda run: {})
    lines, record = [], RunRecord(**RUN_RECORD | {
        "step": 10, "tokens_seen": 70, "config": {}, "since_line": {"tokens": 5.0}})
    monkeypatch.setattr(journal, "objective_of", lambda run: SimpleNamespace(
        flops_per_token=lambda run: 1.0, means=lambda run, sums: sums))
    inputs = SimpleNamespace(ds={}, tokenizer=SimpleNamespace(sha256=""), dataset=SimpleNamespace(
        num_rows={"a": 40}), identity=lambda: {})
    started = SimpleNamespace(
        record=record, inputs=inputs, lost_before=5.0, lost_now=2.0,
        found=SimpleNamespace(begun_from=""), log=SimpleNamespace(metrics=lines.append),
        engine=SimpleNamespace(device=CPU, get_global_grad_norm=lambda: 1.5))
    mine = journal.Journal(run, started, None)
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


def test_schedules_of_the_objective_end_at_the_last_step(monkeypatch):
    @dataclass
    class Micro:
        run_fraction: float = -1.0

    seen, thawed = [], []
    monkeypatch.setattr(loop, "learning_rate", lambda *_: 0.1)
    monkeypatch.setattr(loop.engine, "set_learning_rate",
                        lambda engine, rate, is_thawed: thawed.append(is_thawed))
    monkeypatch.setattr(loop, "batches_of", lambda *_, start, end: iter([[Micro()]] * 5))
    monkeypatch.setattr(loop, "train_step", lambda engine, micro, **_: (
        seen.append(micro[0].run_fraction), SimpleNamespace(request=False))[1])
    trainer = loop.Trainer.__new__(loop.Trainer)
    idle = SimpleNamespace(start=lambda: None, beat=lambda step: None)
    train = SimpleNamespace(steps=5, stop_after=0, freeze_steps=2, seed=0, on_spike="stop",
                            log_every=9, eval_every=9, patience=0)
    trainer.run, trainer.engine = SimpleNamespace(train=train, optim=None), 0
    trainer.inputs, trainer.is_cut_short = SimpleNamespace(held_out={}), False
    trainer.saved_at = 0
    trainer.journal = SimpleNamespace(step=0, train_line=lambda rate: None,
                                      say_where_time_goes=lambda: None)
    trainer.bad_steps = SimpleNamespace(spikes=bad_steps.SpikeRule(0.0))
    trainer.best = best.Best("", scored="")
    trainer.stop_request, trainer.log = False, SimpleNamespace(problem="", check=lambda: None)
    trainer.saver = SimpleNamespace(is_due=lambda step: False)
    trainer.after_step = lambda: None
    work = journal.WorkMeter(CPU)
    trainer.meters = SimpleNamespace(speed=idle, work=work, watchdog=idle,
                                     during=lambda what: work.loading())
    for name in ("_account", "_evaluate", "_save", "_say_the_end", "finish_save"):
        setattr(trainer, name, lambda *_, **__: False)
    assert trainer.run_to_end() is False
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert thawed == [False, False, True, True, True]


def test_a_checkpoint_is_finished_when_every_rank_has_written(monkeypatch):
    monkeypatch.setattr(loop, "finish_save", lambda one: Path("whole"))

    def finish(rank: int):
        mine = loop.Saver.__new__(loop.Saver)
        mine.engine, mine.uploads, mine.begun_at = SimpleNamespace(device=CPU), None, 0.0
        mine.in_background = SimpleNamespace(is_written=lambda: rank == 0)
        return mine.finish(wait=False)

    monkeypatch.setattr(loop.dist, "sum_over_ranks",
                        lambda value: sum(loop.dist.gather_objects(value)))
    monkeypatch.setattr(loop.dist, "is_main", lambda: loop.dist.rank() == 0)
    assert thread_ranks.run(2, finish) == [None, None]


def test_the_end_of_the_metrics_is_uploaded_too():
    begun, mine = [], loop.Saver.__new__(loop.Saver)
    mine.train = SimpleNamespace(upload="s3://a/b")
    mine.uploads = SimpleNamespace(begin=lambda: begun.append(1), is_running=lambda: False)
    mine.finish_uploads(None)
    assert begun == [1]


def test_no_two_passes_have_the_same_dropout():
    seeds = set()
    for place in ((1, 2, 3, 4), (9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9)):
        seeds.add(seed_of(*place))
        with seed_step(torch.device("cpu"), *place):
            seeds.add(tuple(torch.stack(pass_keys(1, torch.device("cpu"))).flatten().tolist()))
            assert torch.initial_seed() in seeds  # for heads and code of one's own
    assert len(seeds) == 10


def test_an_all_reduce_sends_each_byte_nearly_twice(monkeypatch):
    """As nccl-tests count a bus: 2 (n - 1) / n of the message on each of n ranks."""
    rates = {}
    monkeypatch.setattr(rehearsal.dist, "group_of", lambda groups: None)
    monkeypatch.setattr(rehearsal.dist, "gather_number", lambda value, device: [value] * 5)
    monkeypatch.setattr(rehearsal, "fastest", lambda action, device: 2.0)
    monkeypatch.setattr(rehearsal, "_compared", lambda what, found: rates.update(found))
    rehearsal._inside({"a": [0, 1, 2, 3], "b": [4]}, "a", torch.ones(250), CPU)
    assert rates == {"a": 1.5 * 1000 / 2}
