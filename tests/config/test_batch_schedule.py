"""The batch that grows: the formula as a loop, its rows seen once each, what is refused."""

from dataclasses import replace

import pytest
from launching import make_run

from deberta_ds.base.errors import ConfigError
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import (
    phases,
    problems_with_ranks,
    rows_before,
    rows_of_run,
)
from deberta_ds.config.run_config import TrainConfig
from deberta_ds.data.loader import RankRows

CASES = [(2, 8, 6, 10), (1, 7, 100, 100), (16, 128, 308, 617), (4, 4, 5, 9), (0, 8, 0, 5),
         (1, 64, 5, 20), (8, 96, 1, 3), (1, 1 << 20, 3, 6), (1, 1 << 20, 1, 2)]


def train_of(first: int, full: int, warmup: int, steps: int, micro: int = 2) -> TrainConfig:
    return TrainConfig(steps=steps, global_batch_size=full, micro_batch_size=micro,
                       initial_batch_size=first, batch_warmup_steps=warmup)


def batches(train: TrainConfig) -> list[int]:
    """Return the rows of each update, from the formula."""
    first, full, warmup = (train.initial_batch_size, train.global_batch_size,
                           train.batch_warmup_steps)
    jumps = full // first - 1 if first else 0
    return [first * (1 + step * jumps // warmup) if step < warmup else full
            for step in range(train.steps)]


@pytest.mark.parametrize("case", CASES)
def test_stretches_are_the_formula(case):
    train = train_of(*case)
    rows = batches(train)
    assert rows == sorted(rows) and rows_of_run(train) == sum(rows)
    for start in range(train.steps):
        assert rows_before(train, start) == sum(rows[:start])
        for end in {start, start + 1, train.steps}:
            found = [(one.first_row + number * one.rows, one.rows)
                     for one in phases(train, start, end) for number in range(one.steps)]
            assert found == [(sum(rows[:step]), rows[step]) for step in range(start, end)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_row_is_read_once_in_as_few_micro_batches_as_may_be(world_size):
    train = train_of(6, 66, 8, 12, micro=4)
    expected, found = batches(train), []
    updates = phases(train, 3, train.steps)
    per_rank = [iter(ranges := RankRows(updates, 4, rank, world_size)) for rank in
                range(world_size)]
    for rows in expected[3:]:
        count = -(-rows // world_size // 4)
        parts = [[next(numbers) for _ in range(count)] for numbers in per_rank]
        found += [row for part in parts for micro in part for row in micro]
        sizes = {len(micro) for part in parts for micro in part}
        assert max(sizes) <= 4 and max(sizes) - min(sizes) <= 1
    assert all(next(numbers, None) is None for numbers in per_rank)
    assert len(ranges) == sum(-(-rows // world_size // 4) for rows in expected[3:])
    assert found == list(range(sum(expected[:3]), sum(expected)))


@pytest.mark.parametrize("values, said", [
    ({"initial_batch_size": 2}, "go together"), ({"batch_warmup_steps": 2}, "go together"),
    ({"initial_batch_size": 3, "batch_warmup_steps": 2}, "must divide"),
    ({"initial_batch_size": 16, "batch_warmup_steps": 2}, "must divide")])
def test_refusals(tmp_path, values, said):
    with pytest.raises(ConfigError, match=said):
        run_config.load(make_run(tmp_path), [f"--train.{k}={v}" for k, v in values.items()])


def test_the_ranks_share_every_update_that_is_still_to_come():
    train = train_of(2, 8, 6, 10)  # 2, 2, 4, 4, 6, 6, and 8 from then on
    assert not problems_with_ranks(train, 2, 0)
    for start, rows in ((0, 2), (1, 2), (3, 6), (4, 6)):
        problem, = problems_with_ranks(train, 4, start)
        assert f"4 ranks cannot share an update of {rows} equally" in problem
    assert not problems_with_ranks(train, 4, 6)  # a run that has grown may use more ranks


def test_a_batch_that_would_never_be_full_is_refused(tmp_path):
    from deberta_ds.engine.ds_config import DeepSpeedConfig
    from deberta_ds.training.start import check_run

    run, _ = run_config.load(make_run(tmp_path), ["--train.initial_batch_size=2",
                                              "--train.batch_warmup_steps=21"])
    with pytest.raises(ConfigError, match="train.batch_warmup_steps = 21: more than train.steps"):
        check_run(run, DeepSpeedConfig(), 1, "run.toml")
    shorter = replace(run, train=replace(run.train, batch_warmup_steps=20))
    check_run(shorter, DeepSpeedConfig(), 1, "run.toml")
