"""Ranks of a host add and gather through memory: gloo's bits, and no rank waits for a dead one."""

import gc
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


def connected(size: int, changes=None, seconds: float = 20.0) -> list:
    """Return what `connect` gives each of `size` ranks; `changes` to what a rank tells the rest."""
    meeting, found = Meeting(size), [None] * size

    def join(rank: int) -> None:
        gather_objects = meeting.of(rank, **(changes or {}).get(rank, {}))
        found[rank] = host_memory.connect(rank, size, gather_objects, seconds)

    ranks = [threading.Thread(target=join, args=(rank,), name=f"rank {rank}")
             for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return found


def descriptors() -> int:
    gc.collect()  # what earlier tests left is not closed in between
    return len(os.listdir("/proc/self/fd"))


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
            return host_memory._Door("\0no such door", value.secret)
        return value

    assert connected(3, {1: {"change": elsewhere}}) == [None] * 3


def refuse(*_arguments):
    raise OSError("not permitted")


@pytest.mark.parametrize(("part", "kind"), [
    ("memfd_create", os), ("ftruncate", os), ("send_fds", socket), ("recv_fds", socket),
])
def test_what_one_rank_may_not_do_leaves_all_to_gloo(part, kind, monkeypatch):
    monkeypatch.setattr(kind, part, refuse)
    before, started = descriptors(), time.monotonic()
    assert connected(3) == [None] * 3
    assert time.monotonic() - started < 10  # nobody waits for a rank that has given up
    assert descriptors() == before


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("part", ["bind", "connect", "accept"])
def test_a_socket_that_fails_on_one_rank_leaves_all_to_gloo(part, rank, monkeypatch):
    real = socket.socket

    class Failing(real):
        pass

    def fail(self, *arguments):
        if threading.current_thread().name == f"rank {rank}":
            raise OSError(24, "Too many open files")
        return getattr(real, part)(self, *arguments)

    setattr(Failing, part, fail)
    monkeypatch.setattr(socket, "socket", Failing)
    before, started = descriptors(), time.monotonic()
    expected_none = not (part == "connect" and rank == 0 or part == "accept" and rank == 2)
    found = connected(3)  # the first knocks at no door, and nobody knocks at the last one's
    assert all((memory is None) == expected_none for memory in found)
    assert time.monotonic() - started < 10
    for memory in found:
        if memory is not None:
            memory.close()
    del found
    gc.collect()
    assert descriptors() == before


def test_no_descriptor_to_receive_leaves_all_to_gloo(monkeypatch):
    """Where a process may open no more files, what is sent to it arrives without them."""
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"\0", [], 0, None))
    assert connected(3) == [None] * 3


def test_closing_lets_go_of_all():
    before = descriptors()
    for _ in range(3):
        ranks = connected(3)
        assert descriptors() > before
        for memory in ranks:
            memory.close()
        del ranks, memory
        gc.collect()
        assert descriptors() == before


def test_a_stranger_at_the_door_is_turned_away(monkeypatch):
    open_door = host_memory._open_door

    def open_with_stranger(*arguments):
        listener, door, file = open_door(*arguments)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(door.name)
        stranger.sendall(bytes(host_memory._SECRET + host_memory._NUMBER))
        return listener, door, file

    monkeypatch.setattr(host_memory, "_open_door", open_with_stranger)
    values = torch.ones(3)
    spans = [(0, 1), (1, 2), (2, 3)]
    assert together(connected(3), *[lambda memory: memory.gather(values, spans)] * 3) == [None] * 3


def together(ranks: list, *calls) -> list[Exception | None]:
    """Call one of `calls` on each rank at once; return what each raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        started = [pool.submit(call, memory) for call, memory in zip(calls, ranks, strict=True)]
        return [one.exception(timeout=30) for one in started]


def gather(values: torch.Tensor):
    half = len(values) // 2
    return lambda memory: memory.gather(values, [(0, half), (half, len(values))])


def test_who_waits_for_a_rank_that_left_is_told():
    ranks = connected(2)
    found = together(ranks, gather(torch.ones(4)), lambda memory: (time.sleep(0.2), memory.close()))
    assert str(found[0]) == "rank 1 closed its connection" and found[1] is None


def test_who_waits_too_long_for_a_rank_is_told():
    found = together(connected(2, seconds=0.2), gather(torch.ones(4)), lambda _: time.sleep(1))
    assert str(found[0]) == "rank 1 did not come within 0.2 s"


@pytest.mark.parametrize("other", [
    gather(torch.ones(6)), gather(torch.ones(4, dtype=torch.bfloat16)),
    lambda memory: memory.add(torch.ones(4), [(0, 2), (2, 4)], torch.empty(2), 4),
    lambda memory: memory.gather(torch.ones(4), [(0, 2), (2, 4)], 0),
], ids=["size", "type", "sum", "owner"])
def test_ranks_in_different_collectives_are_told(other):
    """gloo would abort, or wait: here they would exchange each other's rubbish."""
    found = together(connected(2), gather(torch.ones(4)), other)
    assert [str(one) for one in found] == [
        f"rank {rank} is in another collective than this rank" for rank in (1, 0)]


def test_a_rank_that_left_its_collective_is_found_in_the_next():
    """A signal's handler may raise while a rank waits."""
    ranks = connected(2)
    ranks[0]._turn += 1  # as after a slot that it gave up
    found = together(ranks, gather(torch.ones(4)), gather(torch.ones(4)))
    assert all("another collective" in str(one) for one in found)


def test_a_rank_that_left_after_its_part_is_not_missed():
    """The last collective of a run: one rank is through it, and gone, before the other looks."""
    values = torch.arange(10.0)
    leave = lambda memory: (gather(values.clone())(memory), memory.close())  # noqa: E731
    assert together(connected(2), gather(values), leave) == [None, None]
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
