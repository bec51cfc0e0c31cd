"""The watchdog: real ranks that are frozen, killed, stuck or slow, and thousands simulated ones."""

import ctypes
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import rank_helpers
import torch.distributed as torch_dist
from torch.distributed import TCPStore

from deberta_ds.cluster import watchdog
from deberta_ds.cluster.watchdog import BUSY, ENDED, EXIT_STUCK, FAILED, STEPPING, Peer, Watchdog

SECONDS = 6.0
BUSY_MACHINE = 3  # times the promised time, where the machine is shared
CLIENTS = [128, 1024, 4096] if os.environ.get("FULL_TABLE") else [128]
_context = rank_helpers._context  # not a fork of this process, which has threads


class Job:
    """Real ranks of one job, each a process with a gloo group and a watchdog."""

    def __init__(self, work: Path, body: Callable, world_size: int = 3, seconds: float = SECONDS):
        rank_helpers._start_server()
        self.log, port = work / "log", rank_helpers.free_port()
        self.log.touch()
        self.text = self.log.read_text
        self.ranks = [_context.Process(target=_rank_main, args=(
            self.log, port, rank, world_size, seconds, body)) for rank in range(world_size)]
        for rank in self.ranks:
            rank.start()

    def wait_for(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + 60
        while self.text().count(text) < count:
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def codes(self, *ranks: int) -> list[int]:
        """Wait for these ranks, all by default, and return their exit codes."""
        chosen = [self.ranks[rank] for rank in ranks or range(len(self.ranks))]
        for rank in chosen:
            rank.join(60)
        return [rank.exitcode for rank in chosen]

    def named(self) -> set[int]:
        return {int(rank) for rank in re.findall(r"^  rank (\d+) on", self.text(), re.MULTILINE)}


@pytest.fixture
def start(tmp_path):
    """A function that starts a Job; what is left of it ends with the test."""
    jobs = []

    def begin(body: Callable, **more) -> Job:
        (tmp_path / str(len(jobs))).mkdir()
        jobs.append(Job(tmp_path / str(len(jobs)), body, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        for rank in job.ranks:
            rank.kill()
            rank.join()


def _rank_main(log: Path, port: int, rank: int, world_size: int, seconds: float, body: Callable
               ) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch_dist.init_process_group("gloo", rank=rank, world_size=world_size)
    watchdog._ALIVE = 1.5 if body is hold_the_interpreter else watchdog._ALIVE
    code, dog = 0, Watchdog(log.parent, seconds)
    try:
        with dog.watch():
            dog.join()
            body(dog, rank)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)


def take_steps(dog: Watchdog, first: int, count: int) -> None:
    for step in range(first, first + count):
        torch_dist.barrier()
        dog.heartbeat(step)
        if step == 3:
            print("three steps", flush=True)
        time.sleep(0.02)


def train(dog: Watchdog, rank: int) -> None:
    take_steps(dog, 1, 100_000)


@pytest.mark.parametrize(("victim", "number"), [
    (1, signal.SIGSTOP), (0, signal.SIGSTOP), (2, signal.SIGKILL), (0, signal.SIGKILL)])
@pytest.mark.multi
def test_a_frozen_or_killed_rank_is_named_in_time_and_nobody_else(start, victim, number):
    """Rank 0 has the store, so that is dead, too."""
    job = start(train)
    job.wait_for("three steps", 3)
    os.kill(job.ranks[victim].pid, number)
    began = time.monotonic()
    others = [rank for rank in range(3) if rank != victim]
    assert job.codes(*others) == [EXIT_STUCK] * 2, job.text()
    seconds = time.monotonic() - began
    print(f"{number.name} of rank {victim}: ended after {seconds:.1f} of {SECONDS:g} s")
    assert seconds < BUSY_MACHINE * SECONDS
    assert job.named() == {victim}, job.text()
    assert f"(pid {job.ranks[victim].pid}): SILENT" in job.text()
    assert "take_steps" in job.text()  # the stacks of those who wait


def train_shortly(dog: Watchdog, rank: int) -> None:
    take_steps(dog, 1, 200)


@pytest.mark.multi
@pytest.mark.slow
def test_a_job_that_was_frozen_as_a_whole_goes_on(start):
    job = start(train_shortly, seconds=3.0)
    job.wait_for("three steps", 3)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in job.ranks:
            os.kill(rank.pid, number)
        time.sleep(6 if number == signal.SIGSTOP else 0)
    assert job.codes() == [0] * 3, job.text()
    assert "WATCHDOG" not in job.text()


def hold_the_interpreter(dog: Watchdog, rank: int) -> None:
    take_steps(dog, 1, 5)
    if rank == 1:
        ctypes.PyDLL(None).sleep(100)  # C code that keeps the lock
    take_steps(dog, 6, 100_000)


@pytest.mark.multi
@pytest.mark.slow
def test_a_rank_whose_interpreter_is_held_is_named_shows_its_stacks_and_is_ended(start):
    job = start(hold_the_interpreter)
    assert job.codes() == [EXIT_STUCK, -signal.SIGALRM, EXIT_STUCK], job.text()
    assert job.named() == {1} and "in hold_the_interpreter" in job.text(), job.text()


def save_and_evaluate(dog: Watchdog, rank: int) -> None:
    time.sleep(SECONDS / 2)  # compiles kernels
    take_steps(dog, 1, 5)
    for _ in range(2):
        with dog.patience():
            time.sleep(SECONDS / 2)
    take_steps(dog, 6, 5)
    with dog.patience():
        time.sleep(SECONDS / 2 * rank)  # the others have ended


@pytest.mark.multi
@pytest.mark.slow
def test_a_slow_start_a_long_save_and_an_early_end_are_no_deaths(start):
    job = start(save_and_evaluate, seconds=SECONDS / 3)
    assert job.codes() == [0] * 3 and "WATCHDOG" not in job.text(), job.text()


def fail(dog: Watchdog, rank: int) -> None:
    take_steps(dog, 1, 5)
    if rank == 1:
        raise ValueError("boom")
    take_steps(dog, 6, 100_000)


@pytest.mark.multi
def test_an_error_of_one_rank_keeps_its_code_and_is_nobodys_death(start):
    job = start(fail)
    assert job.codes() == [1] * 3 and not job.named(), job.text()
    assert "ValueError: boom" in job.text()


def fail_unnoticed(dog: Watchdog, rank: int) -> None:
    take_steps(dog, 1, 5)
    if rank == 1:
        raise ValueError("boom")
    time.sleep(100)  # as in a collective of NCCL


@pytest.mark.multi
def test_a_rank_that_ended_with_an_error_is_named_with_it(start):
    job = start(fail_unnoticed, seconds=4.0)
    assert job.codes() == [EXIT_STUCK, 1, EXIT_STUCK] and job.named() == {1}, job.text()
    assert "ENDED with an error: boom" in job.text()


@pytest.mark.multi
@pytest.mark.slow
def test_two_jobs_at_once_do_not_meet(start):
    first, second = start(train, world_size=2), start(train, world_size=2)
    for job in (first, second):
        job.wait_for("three steps", 2)
    first.ranks[0].kill()
    assert first.codes(1) == [EXIT_STUCK] and first.named() == {0}
    time.sleep(SECONDS / 2)
    assert all(rank.is_alive() for rank in second.ranks) and "WATCHDOG" not in second.text()


class SlowWay:
    """A way to a store on which each message takes `seconds`, in either direction."""

    def __init__(self, port: int, seconds: float):
        self._target, self._seconds = port, seconds
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            ends = [self._server.accept()[0], socket.create_connection(("127.0.0.1", self._target))]
            for source, sink in (ends, ends[::-1]):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._seconds)
                sink.sendall(data)


@pytest.mark.slow
def test_a_slow_store_ends_nobody_who_lives_and_hides_nobody_who_does_not(tmp_path, monkeypatch,
                                                                          capfd):
    """Three ranks in one process, no step, 0.5 s a message and about 2.5 s an exchange."""
    exits = []
    monkeypatch.setattr(Watchdog, "_exit", lambda self: exits.append(self._rank))
    root = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    way = SlowWay(root.port, 0.5)
    stores = [root, *(TCPStore("127.0.0.1", way.port) for _ in range(2))]
    dogs = [Watchdog(tmp_path, 10.0) for _ in stores]
    for rank, store in enumerate(stores):
        watchdog.introduce(store, rank)
    for rank, (dog, store) in enumerate(zip(dogs, stores, strict=True)):
        dog.begin(rank, 3, store)
        dog.heartbeat(1)
    try:
        time.sleep(20)
        assert not exits and "SILENT" not in capfd.readouterr().err
        dogs[2]._leaving.wait = lambda seconds: time.sleep(1000)  # as a frozen rank: it does
        dogs[2]._stopped.set()  # not talk, and judges nobody
        deadline = time.monotonic() + 60
        while {0, 1} - set(exits):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        text = capfd.readouterr().err
        assert set(re.findall(r"  rank (\d) on \S+ \(pid \d+\): SILENT", text)) == {"2"}, text
    finally:
        for dog in dogs:
            dog._stopped.set()
        for dog in dogs:
            dog._watcher.join(60)
        signal.setitimer(signal.ITIMER_REAL, 0)  # as the end of `watch`, or it would end the tests


def test_the_watchdog_knows_slow_from_stuck(tmp_path, monkeypatch, capfd):
    """One rank alone: nobody else can be dead."""
    ended = []
    monkeypatch.setattr(Watchdog, "_exit", lambda self: ended.append(True))
    dog = Watchdog(tmp_path, 1.0)
    with dog.watch():
        dog.join()
        time.sleep(1.5)  # the first step
        dog.heartbeat(1)
        with dog.patience():
            time.sleep(1.5)
        assert "WATCHDOG" not in capfd.readouterr().err
        text, deadline = "", time.monotonic() + 60
        while "test_the_watchdog_knows_slow" not in text and time.monotonic() < deadline:
            time.sleep(0.1)
            text += capfd.readouterr().err
        assert text.count("WATCHDOG") == 1 and "all ranks in sight are alive" in text and not ended
        while not ended and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ended


def peers(silences: list[float], state: str = STEPPING) -> Watchdog:
    """Rank 0 of a job of ranks that have been silent so long, two on each host."""
    dog = Watchdog("unused", 10.0)
    dog._world_size, dog._state = len(silences), STEPPING
    here = socket.gethostname()
    dog._peers = {rank: Peer(f"node{rank // 2}" if rank > 1 else here, str(100 + rank), step=7,
                             state=state, silent_seconds=silence)
                  for rank, silence in enumerate(silences) if rank}
    return dog


@pytest.mark.parametrize(("silences", "state", "no_step", "named", "hosts"), [
    ([0, 0, 0, 5.1, 0, 0], STEPPING, 6.0, [3], {"node1"}),
    ([0, 0, 0, 5.1, 0, 0], STEPPING, 1.0, [], set()),  # steps go on
    ([0, 0, 5.1, 4.9, 0, 0], STEPPING, 6.0, [], set()),  # a node is named whole
    ([0, 0, 6.1, 4.9, 0, 0], STEPPING, 7.0, [2], {"node1"}),  # not for ever
    ([0, 0, 5.4, 5.2, 0, 0], STEPPING, 6.0, [2, 3], {"node1"}),
    ([0, 0, 9, 9, 9, 9], STEPPING, 9.5, [0], {socket.gethostname()}),  # this node is cut off
    ([0, 0, 9, 9], STEPPING, 9.5, [2, 3], {"node1"}),
    ([0, 0, 7.0, 0], BUSY, 9.0, [], set()),
    ([0, 0, 7.6, 0], BUSY, 9.0, [2], {"node1"}),
    ([0, 9, 9, 9], ENDED, 9.5, [], set()),
    ([0, 9, 0, 0], FAILED, 9.5, [1], set())])
def test_who_is_named(silences, state, no_step, named, hosts):
    lines, avoided = peers(silences, state)._suspects(no_step)
    assert [int(line.split()[1]) for line in lines] == named and avoided == hosts, lines


def test_after_an_error_a_silent_rank_is_named_soon_and_a_slow_store_makes_patient():
    dog = peers([0, 0, 2.0])
    dog._state = FAILED
    assert dog._suspects(3.0)[0]
    dog._exchange_seconds = 1.0
    assert not dog._suspects(3.0)[0]


def _root_main(work: Path, port: int, clients: int, seconds: float) -> None:
    os.dup2(os.open(work / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    store = watchdog.introduce(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                               timeout=timedelta(seconds=300)), 0)
    dog = Watchdog(work, seconds)
    with dog.watch():
        dog.begin(0, clients + 1, store)
        dog.heartbeat(1)
        time.sleep(1000)


def _clients_main(port: int, ranks: range, dead: range, die, ready, interval: float, told) -> None:
    """Be the talking threads of many ranks, one after the other."""
    with ThreadPoolExecutor(64) as pool:  # each asks for the name of its host
        made = pool.map(lambda rank: watchdog.introduce(TCPStore("127.0.0.1", port), rank), ranks)
        stores = dict(zip(ranks, made, strict=True))
    ready.release()
    tick, ends = 0, []
    while len(ends) < len(ranks):
        tick += 1
        for rank, store in stores.items():
            if rank in ends or rank in dead and die.is_set():
                continue
            store.set(f"heartbeat/{rank}", f"{tick} 1 {STEPPING} 0.01 ")
            if store.multi_get(["heartbeat/0", "verdict"])[1]:
                store.set(f"heartbeat/{rank}", f"{tick + 1} 1 {ENDED} 0.01 ")
                ends.append(rank)
                told.put(time.monotonic())
        time.sleep(interval)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.multi
@pytest.mark.slow
def test_sixty_four_dead_of_thousands_are_named_in_time_and_nobody_else(tmp_path, clients):
    """One real store and rank 0; the talking of the others in four processes."""
    seconds = 10.0 if clients == 128 else 60.0
    port, ready = rank_helpers.free_port(), _context.Semaphore(0)
    die, told = _context.Event(), _context.SimpleQueue()
    root = _context.Process(target=_root_main, args=(tmp_path, port, clients, seconds))
    dead, share = range(50, 114), clients // 4
    rank_helpers._start_server()
    others = [_context.Process(target=_clients_main, args=(
        port, range(1 + n * share, 1 + (n + 1) * share), dead, die, ready, seconds / 20, told))
        for n in range(4)]
    for process in (root, *others):
        process.start()
    try:
        for _ in others:
            assert ready.acquire(timeout=400)
        time.sleep(seconds / 2)
        assert root.is_alive(), (tmp_path / "log").read_text()
        died = time.monotonic()
        die.set()
        ends = [told.get() - died for _ in range(clients - len(dead))]
        for process in others:
            process.kill()
        root.join(60)
        print(f"{clients:,} ranks: first told after {min(ends):.1f}, last after {max(ends):.1f} of "
              f"{seconds:g} s")
        text = (tmp_path / "log").read_text()
        assert root.exitcode == EXIT_STUCK, text[-3000:]
        assert set(map(int, re.findall(r"  rank (\d+) on .*SILENT", text))) == set(dead)
        assert max(ends) < BUSY_MACHINE * seconds
    finally:
        for process in (root, *others):
            process.kill()
            process.join()
