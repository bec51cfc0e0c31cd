"""The watchdog without a training run: slow from stuck, gone, frozen, thawed, and at scale."""

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT

from deberta_ds.cluster import beats, process, reach, stacks
from deberta_ds.cluster.neighbours import Neighbours
from deberta_ds.cluster.ring import Host, Ring, at_once
from deberta_ds.cluster.watchdog import Watchdog, hosts_of

sys.path.insert(0, str(ROOT / "benchmarks"))
import watchdog_scale  # noqa: E402


@pytest.fixture
def ended(monkeypatch):
    """A list that grows when a watchdog would end this process."""
    found = []
    monkeypatch.setattr(Watchdog, "_exit", lambda self: found.append(True))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.get(name, "0"))
    return found


def test_the_watchdog_knows_slow_from_stuck(tmp_path, ended, capfd):
    dog = Watchdog(tmp_path, 1.0)  # limit 0.7 s, a heartbeat every 0.05 s
    with dog.watch():
        dog.join("job")
        time.sleep(1.0)  # the first step
        dog.beat(1)
        with dog.patience():
            time.sleep(1.0)
        assert "WATCHDOG" not in capfd.readouterr().err
        text = ""
        deadline = time.monotonic() + 60  # too long for a step, but the only rank is alive
        while "test_the_watchdog_knows_slow" not in text and time.monotonic() < deadline:  # stack
            time.sleep(0.1)
            text += capfd.readouterr().err
        assert text.count("WATCHDOG") == 1 and "all ranks in sight are alive" in text and not ended
        while not ended and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ended
    assert "rank-00000.stack" in os.listdir(tmp_path / beats.DIRECTORY)
    assert not dog._neighbours.files.directory.exists()


def test_a_heartbeat_costs_microseconds(tmp_path):
    """It notes numbers, in well under one; the limit is for a machine that is busy."""
    dog = Watchdog(tmp_path, 60)
    started = time.process_time()
    for step in range(10_000):
        dog.beat(step)
    assert (time.process_time() - started) / 10_000 < 100e-6


def neighbours(rank: int, key: str) -> Neighbours:
    found = Neighbours(key, rank, 1.0, 0.05)
    found.show(1, 5)
    return found


def test_who_lives_is_silent_is_gone_has_ended_and_leads(tmp_path):
    mine = neighbours(1, str(tmp_path))
    child = subprocess.Popen(["sleep", "100"])
    mine.files.write(beats.RankBeat(0, 1, 7, process.look(child.pid)))  # lives, and says no more
    neighbours(2, str(tmp_path)).leave()
    mine.expect({0, 1, 2})
    mine.look()
    assert mine.suspects(0.2) == {} and not mine.leads() and mine.steps() == {0: 7, 1: 5}
    for tick in range(2, 12):
        time.sleep(0.05)
        mine.show(tick, 5)
        mine.look()
    assert mine.suspects(0.2) == {0: "SILENT: frozen"} and mine.leads() and not mine.gone(0.1)
    child.kill()
    child.wait()
    for tick in range(12, 16):
        time.sleep(0.05)
        mine.show(tick, 5)
        mine.look()
    assert mine.suspects(0.2) == {0: "GONE: its process has ended"} and mine.gone(0.1)
    assert mine.steps() == {1: 5}
    mine.files.remove(0)
    mine.look()
    assert mine.suspects(0.2) == {0: "ENDED"} and not mine.gone(0.1)
    mine.leave()


def test_a_thawed_rank_blames_nobody_for_the_time_in_which_it_was_frozen(tmp_path):
    mine, other = neighbours(0, str(tmp_path)), neighbours(1, str(tmp_path))
    mine.look()
    time.sleep(1.5)  # this process did not look
    mine.look()
    assert mine.suspects(0.3) == {}
    other.leave()
    mine.leave()


HOSTS = hosts_of([(f"id{rank // 2}", f"node{rank // 2}", 100 + rank, f"10.0.0.{rank}:1")
                  for rank in range(8)])


def test_hosts_are_told_apart_by_identity():
    assert [list(host.ranks) for host in HOSTS] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert HOSTS[1] == Host("node1", {2: 102, 3: 103}, {2: "10.0.0.2:1", 3: "10.0.0.3:1"})


def ring(tmp_path, mine: int = 0) -> Ring:
    (tmp_path / beats.DIRECTORY).mkdir(exist_ok=True)
    return Ring(tmp_path, "job", HOSTS, mine, 1.0, 0.01)


def beat(tmp_path, host: int, tick: int, job: str = "job") -> None:
    first = HOSTS[host].first_rank
    beats.write_host(beats.host_path(tmp_path, first),
                     beats.HostBeat(job, tick, "-", {first: tick, first + 1: tick}))


def test_one_host_is_read_while_it_lives_and_more_when_it_is_silent(tmp_path, monkeypatch):
    found, reads = ring(tmp_path), []
    real = beats.read_host
    monkeypatch.setattr(beats, "read_host", lambda path: reads.append(path.name) or real(path))
    for tick in range(20):
        for host in (1, 3):
            beat(tmp_path, host, tick)
        found.look()
    assert set(reads) == {"host-00002"}
    for tick in range(20, 60):
        beat(tmp_path, 3, tick)
        time.sleep(0.01)
        found.look()
    assert set(reads[20:]) == {"host-00002", "host-00004", "host-00006"}
    silent = [watched.host.name for watched in found.silent(0.05)]
    assert silent == ["node1"]  # node2 has never been seen, so it is not missed
    assert found.steps(0.0)[2] == (HOSTS[1], 19)
    assert 2 not in found.steps(time.monotonic() - 0.2)  # old news
    beat(tmp_path, 2, 1)  # its last word, read late
    for tick in range(60, 100):
        beat(tmp_path, 3, tick)
        time.sleep(0.01)
        found.look()
    assert [watched.host.name for watched in found.silent(0.05)] == ["node1", "node2"]


@pytest.mark.parametrize("trouble", ["stale", "empty", "torn", "no descriptor", "another job"])
def test_trouble_with_reading_ends_nothing_and_is_no_heartbeat(tmp_path, monkeypatch, trouble):
    found = ring(tmp_path)
    beat(tmp_path, 1, 1)
    found.look()
    path = beats.host_path(tmp_path, 2)
    if trouble in ("stale", "no descriptor"):
        number = errno.ESTALE if trouble == "stale" else errno.EMFILE

        def fail(path):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(beats, "read_host", fail)
    elif trouble == "another job":
        beat(tmp_path, 1, 2, "other")
    else:
        path.write_text("" if trouble == "empty" else path.read_text()[:10])
    for _ in range(10):
        time.sleep(0.01)
        found.look()
    silent = found.silent(0.02)
    assert bool(silent) == (trouble in ("empty", "torn", "another job"))
    monkeypatch.undo()
    path.unlink()
    beat(tmp_path, 1, 3)
    found.look()
    assert not found.silent(0.0001)


def test_a_verdict_reaches_every_host_and_the_first_one_stays(tmp_path):
    first, second, third = ring(tmp_path, 1), ring(tmp_path, 2), ring(tmp_path, 3)
    first.publish("rank 0 on node0: SILENT\n  rank 1 on node0: SILENT")
    second.publish("another one")
    third.look()
    assert first.verdict == second.verdict == third.verdict and "rank 1 on node0" in third.verdict


def test_own_slowness_makes_patient(tmp_path):
    found = ring(tmp_path)
    assert found.patience_seconds() == pytest.approx(0.3)
    with found._reads.round():
        time.sleep(0.5)
    assert found.patience_seconds() > 3 * 0.45


def test_doors_to_knock_at_are_near_and_far():
    many = hosts_of([(f"id{rank}", f"node{rank}", rank, f"10.0.0.{rank}:1") for rank in range(64)])
    found = Ring("unused", "job", many, 10, 1.0, 0.01)
    names = [host.name for host in found.addresses().values()]
    assert names[:4] == ["node11", "node12", "node13", "node14"] and len(names) == 8
    assert len(ring_of_two().addresses()) == 1


def ring_of_two() -> Ring:
    return Ring("unused", "job", HOSTS[:2], 1, 1.0, 0.01)


def test_a_name_that_means_loopback_gives_an_address_that_others_reach(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")  # Debian's /etc/hosts for the host's own name
    card = type("Card", (), {"family": socket.AF_INET, "address": "10.1.2.3"})
    loopback = type("Card", (), {"family": socket.AF_INET, "address": "127.0.0.1"})
    monkeypatch.setattr(reach.psutil, "net_if_addrs", lambda: {"lo": [loopback], "eth0": [card]})
    assert reach._own_ip() == "10.1.2.3"
    monkeypatch.setattr(reach.psutil, "net_if_addrs", lambda: {"lo": [loopback]})
    assert reach._own_ip().startswith("127.")


def test_a_watchdog_without_room_or_descriptors_watches_on_and_blames_nobody(tmp_path, ended,
                                                                             monkeypatch):
    """Its thread died of the first OSError: nobody watched, and the others saw a silent rank."""
    def fail(*_arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    child = subprocess.Popen(["sleep", "100"])
    dog = Watchdog(tmp_path, 1.0)
    with dog.watch():
        files = dog._neighbours.files
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", fail)  # of files and of /proc
            patch.setattr(Path, "read_text", fail)
            time.sleep(0.3)
            assert dog._thread.is_alive()
        files.write(beats.RankBeat(1, 1, 5, process.look(child.pid)))
        deadline = time.monotonic() + 30
        while 1 not in dog._neighbours.ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        ticks = files.read()[0].tick
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", fail)
            time.sleep(0.3)
            assert not dog._neighbours.ranks[1].ended and not dog._neighbours.gone(0.0001)
        assert files.read()[0].tick > ticks and not ended
        files.remove(1)
        child.kill()
        child.wait()


def test_containers_that_share_memory_but_no_process_ids_do_not_judge_each_other(tmp_path,
                                                                                 monkeypatch):
    """Each took the other's live ranks for gone: their process ids mean nothing to it."""
    mine = neighbours(0, str(tmp_path))
    monkeypatch.setattr(process, "machine", lambda: "the same boot, other process ids")
    other = neighbours(1, str(tmp_path))
    mine.look()
    other.look()
    assert (set(mine.ranks), set(other.ranks)) == ({0}, {1})
    assert mine.files.directory != other.files.directory
    mine.expect({0})
    dead = process.Process(1 << 22, 1, 0, "")
    mine.files.write(beats.RankBeat(7, 1, 5, dead))  # of another job, whoever it is
    mine.look()
    assert set(mine.ranks) == {0}
    mine.files.remove(7)
    other.leave()
    mine.leave()


def test_stacks_of_all_threads_are_written(tmp_path):
    stacks.write(tmp_path / "new", 3)
    assert "test_stacks_of_all_threads" in (tmp_path / "new/rank-00003.stack").read_text()


def test_a_silent_rack_is_watched_and_knocked_at_within_a_few_looks(tmp_path, monkeypatch):
    """One more host a look, and a rack was named host by host."""
    many = hosts_of([(f"id{rank}", f"node{rank}", rank, f"10.0.0.{rank}:1") for rank in range(64)])
    (tmp_path / beats.DIRECTORY).mkdir()
    clock = watchdog_scale.Clock()
    monkeypatch.setattr("deberta_ds.cluster.ring.time", clock)
    found = Ring(tmp_path, "job", many, 0, 60.0, 3.0)
    for rank in range(1, 64):
        beats.write_host(beats.host_path(tmp_path, rank),
                         beats.HostBeat("job", 1, "-", {rank: 1}))
    for look in range(20):
        found.look()
        clock.now += 3.0
        if look == 7:
            assert len(found.silent(0.0)) == 63  # 1 until it is suspicious, 4, 16, 63
    assert len(found.silent(18.0)) == 63
    assert {host.name for host in found.addresses().values()} == {f"node{n}" for n in range(1, 64)}


def test_reading_many_hosts_takes_as_long_as_reading_one():
    began = time.monotonic()
    at_once([lambda: time.sleep(0.3)] * 40)
    assert 0.6 <= time.monotonic() - began < 6  # two lots; one after the other 12 s


@pytest.mark.parametrize("latency_ms, seconds", [(5, 60), (50, 10), (500, 60)])
@pytest.mark.parametrize("dead", watchdog_scale.DEAD)
def test_the_dead_are_named_in_time_and_nobody_else(dead, latency_ms, seconds):
    """128 ranks in simulated time; a rack is named whole on slow files and with a short limit."""
    # 500 ms: at the end of the ring, so that a rack holds its last host, and rank 0's.
    first = 13 if latency_ms == 500 else 0 if latency_ms == 50 else 3
    case = watchdog_scale.Case(128, dead, latency_ms, seconds, first_dead=first)
    result = watchdog_scale.simulate(case)
    assert result.live_ranks_named == 0, result
    assert result.dead_ranks_named == result.dead_ranks, result
    if result.dead_ranks:
        assert result.hosts_ended == {"rank": 16, "host": 15, "rack": 8}[dead], result
        assert result.first_report_seconds <= seconds, result
        assert result.last_end_seconds <= 1.2 * seconds, result
    else:
        assert result.first_report_seconds is None, result
        assert not result.hosts_ended or seconds < 60, result  # no step for ten times the limit
    assert result.operations_per_host_second * seconds < 14 * 20  # whatever the number of hosts


def test_what_a_killed_job_left_in_memory_goes_after_a_day(tmp_path):
    old, young, foreign = (tmp_path / name for name in ("deberta_ds-1", "deberta_ds-2", "other"))
    for directory in (old, young, foreign):
        directory.mkdir()
        (directory / "0").write_text("1 1 1 1")
        long_ago = time.time() - 2 * 86400
        os.utime(directory / "0", (long_ago, long_ago))
        os.utime(directory, (long_ago, long_ago))
    (young / "1").write_text("1 1 1 1")  # a rank of it lives
    beats.remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deberta_ds-2", "other"]


def test_ranks_that_leave_at_once_do_not_meet_a_directory_that_is_gone(tmp_path, monkeypatch):
    """One takes it along after the other has seen it, and before that one has read it."""
    files = beats.LocalBeats(str(tmp_path))
    files.directory.rmdir()
    monkeypatch.setattr(Path, "is_dir", lambda path, **_: True)
    assert files.read() == {}
    files.remove(0)
