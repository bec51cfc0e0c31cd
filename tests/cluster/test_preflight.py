"""The check of all hosts before a run: who is slow, what is free."""

from pathlib import Path

import pytest
import rank_helpers

from deberta_ds.training import rehearsal

WORKER = Path(__file__).parents[1] / "workers/preflight.py"


@pytest.mark.multi
def test_the_slow_host_is_named(tmp_path):
    text = rank_helpers.run(4, [], tmp_path / "log", WORKER)
    two, four = (next(line for line in text.splitlines() if line.startswith(name))
                 for name in ("two hosts of two", "four hosts"))
    assert "2 nodes, 4 ranks" in two and "all-reduce inside a node: " in two
    assert "between nodes, each way: " in two and "all-reduce of 4 MiB over all ranks" in two
    assert "inside a node" not in four
    assert "WARNING: between nodes, each way: " in four and "slowest node2" in four


@pytest.mark.parametrize("count", range(2, 10))
def test_each_host_meets_both_its_neighbours_and_one_at_a_time(count):
    """Of three hosts the first and the last met the one between them only, and looked as slow."""
    rounds = rehearsal._rounds(count)
    met = {host: set() for host in range(count)}
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
        for one, other in pairs:
            met[one].add(other)
            met[other].add(one)
    assert met == {host: {(host - 1) % count, (host + 1) % count} for host in range(count)}


def test_a_clock_that_is_off_is_named():
    assert rehearsal._clock_lines([100.0, 100.5, 99.9], ["a", "b", "c"]) == []
    line, = rehearsal._clock_lines([100.0, 100.1, 160.0], ["a", "b", "c"])
    assert "the clock of c is +59.9 s off" in line


def test_room_for_checkpoints_is_counted_where_they_go(tmp_path):
    assert rehearsal.room(tmp_path / "not/yet", 10**9, 3, False).endswith(
        "GB free, train.keep + 1 checkpoints need 48.0 GB")
    assert "train.keep + 2 checkpoints need 60.0" in rehearsal.room(tmp_path, 10**9, 3, True)
    assert rehearsal.room(tmp_path, 10**15, 3, False).startswith("WARNING: not enough disk space: ")
