"""Ranks of a host add and gather through memory: gloo's bits, and no rank waits for a dead one."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rank_helpers
import torch

from deberta_ds import host_memory


class Meeting:
    """`gather_objects` among threads."""

    def __init__(self, size: int):
        self.values, self.barrier = [None] * size, threading.Barrier(size, timeout=60)

    def of(self, rank: int, change=lambda value: value):
        def gather(value) -> list:
            self.values[rank] = change(value)
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
            return values
        return gather


def connected(size: int, changes=None) -> list:
    """Return what `connect` gives each of `size` ranks; `changes` to what a rank tells the rest."""
    meeting, changes = Meeting(size), changes or {}
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: host_memory.connect(
            rank, size, meeting.of(rank, **changes.get(rank, {})), 20.0), range(size)))


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_and_gathers_have_gloos_bits(ranks, tmp_path):
    worker = Path(__file__).parent / "workers/host_sums.py"
    assert "equal" in rank_helpers.run(ranks, [], tmp_path / "log", worker)


def test_one_rank_or_too_many_share_nothing():
    assert connected(1) == [None]
    assert host_memory.connect(0, 65, None, 20.0) is None


def test_a_rank_that_cannot_be_reached_leaves_all_to_gloo():
    def elsewhere(value):
        if isinstance(value, host_memory._Door):
            return host_memory._Door("\0no such door", value.word)
        return value

    assert connected(3, {1: {"change": elsewhere}}) == [None] * 3


def test_a_rank_without_sockets_leaves_all_to_gloo(monkeypatch):
    monkeypatch.setattr(host_memory, "_listen", lambda size: (None, None))
    assert connected(2) == [None] * 2


def test_no_memory_leaves_all_to_gloo(monkeypatch):
    def refuse(*_arguments):
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert connected(3) == [None] * 3


def test_a_stranger_at_the_door_is_turned_away(monkeypatch):
    listen = host_memory._listen

    def listen_with_stranger(size):
        listener, door = listen(size)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(door.name)
        stranger.sendall(bytes(host_memory._WORD + host_memory._RANK))
        return listener, door

    monkeypatch.setattr(host_memory, "_listen", listen_with_stranger)
    ranks = connected(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda memory: memory.wait(), ranks))
    for memory in ranks:
        memory.close()


def test_who_waits_for_a_rank_that_left_is_told():
    first, second = connected(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait)
        time.sleep(0.2)
        assert not waiting.done()
        second.close()
        with pytest.raises(RuntimeError, match="rank 1 closed its connection"):
            waiting.result(timeout=10)


def test_a_rank_that_left_after_its_part_is_not_missed():
    """The last collective of a run: one rank is through it, and gone, before the other looks."""
    first, second = connected(2)
    values = torch.arange(10.0)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.gather, values, [(0, 5), (5, 10)])
        other = pool.submit(lambda: (second.gather(values.clone(), [(0, 5), (5, 10)]),
                                     second.close()))
        one.result(timeout=10), other.result(timeout=10)
    assert values.tolist() == list(range(10))


@pytest.mark.multi
def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """Also while a worker of the dead rank, a fork of it, lives on."""
    worker = Path(__file__).parent / "workers/host_wait.py"
    ranks = rank_helpers.start(3, [str(tmp_path)], tmp_path / "log", worker)
    child = tmp_path / "child"
    deadline = time.monotonic() + 120
    while not child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    ranks[1].kill()
    try:
        codes = rank_helpers.wait(ranks, 60)
        os.kill(int(child.read_text()), signal.SIGKILL)  # it is still there
    finally:
        rank_helpers.kill(ranks)
    assert codes == [1, -signal.SIGKILL, 1], (tmp_path / "log").read_text()
    assert time.monotonic() - started < 15
    assert "rank 1 closed its connection" in (tmp_path / "log").read_text()
