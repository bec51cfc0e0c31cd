"""What is looked at before a run: hosts, driver, variables; who is slow, awaited, what is free."""

import runpy
import signal
import subprocess
import sys

import pytest
import rank_helpers
import torch
from launching import ENVIRONMENT, ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.cluster import dist, launcher
from deberta_ds.cluster.launcher import RANK_VARIABLES, check_environment
from deberta_ds.training import rehearsal


@pytest.mark.multi
def test_the_slow_host_is_named(tmp_path):
    text = rank_helpers.run(4, [], tmp_path / "log", ROOT / "tests/workers/preflight.py")
    two, four = (next(line for line in text.splitlines() if line.startswith(name))
                 for name in ("two hosts of two", "four hosts"))
    assert "2 nodes, 4 ranks" in two and "all-reduce inside a node: " in two
    assert "between nodes, each way: " in two and "all-reduce of 4 MiB over all ranks" in two
    assert "inside a node" not in four
    assert "WARNING: between nodes, each way: " in four and "slowest node2" in four


@pytest.mark.parametrize("count", range(2, 10))
def test_each_host_meets_both_its_neighbors_and_one_at_a_time(count):
    rounds = rehearsal._rounds(count)
    met = {host: set() for host in range(count)}
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
        for one, other in pairs:
            met[one].add(other)
            met[other].add(one)
    assert met == {host: {(host - 1) % count, (host + 1) % count} for host in range(count)}


def test_a_clock_that_is_off_is_named():
    assert rehearsal.clock_lines([100.0, 100.5, 99.9], ["a", "b", "c"]) == []
    line, = rehearsal.clock_lines([100.0, 100.1, 160.0], ["a", "b", "c"])
    assert "the clock of c is +59.9 s off" in line


def test_room_for_checkpoints_is_counted_where_they_go(tmp_path):
    assert rehearsal.disk_space(tmp_path / "not/yet", 10**9, 3, False).endswith(
        "GB free, train.keep + 1 checkpoints need 48.0 GB")
    assert "train.keep + 2 checkpoints need 60.0" in rehearsal.disk_space(tmp_path, 10**9, 3, True)
    assert rehearsal.disk_space(tmp_path, 10**15, 3, False).startswith("WARNING: not enough disk")


CPU = torch.device("cpu")


def test_an_all_reduce_sends_each_byte_nearly_twice(monkeypatch):
    """As nccl-tests count a bus: 2 (n - 1) / n of the message on each of n ranks."""
    rates = {}
    monkeypatch.setattr(rehearsal.dist, "group_of", lambda groups: None)
    monkeypatch.setattr(rehearsal.dist, "gather_number", lambda value, device: [value] * 5)
    monkeypatch.setattr(rehearsal, "fastest", lambda action, device: 2.0)
    monkeypatch.setattr(rehearsal, "compared", lambda what, found: rates.update(found))
    rehearsal._inside({"a": [0, 1, 2, 3], "b": [4]}, "a", torch.ones(250), CPU)
    assert rates == {"a": 1.5 * 1000 / 2}


WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "4",
         "CUDA_VISIBLE_DEVICES": "0,1", "DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize("environ", [
    {}, WHOLE, WHOLE | {"OMP_NUM_THREADS": "4,2"}, WHOLE | {"CUDA_VISIBLE_DEVICES": ""},
    WHOLE | {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
     "MASTER_PORT": "0"}])
def test_what_launchers_set_is_accepted(environ):
    check_environment(environ)


@pytest.mark.parametrize(("name", "value"), [
    ("RANK", "foo"), ("RANK", "-1"), ("RANK", ""), ("RANK", "2"), ("RANK", "1.0"),
    ("RANK", "9" * 30), ("RANK", "\u0661"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "two"),
    ("LOCAL_RANK", "x"), ("LOCAL_RANK", "7"), ("LOCAL_WORLD_SIZE", "3"),
    ("MASTER_PORT", "abc"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "-1"),
    ("MASTER_ADDR", ""), ("MASTER_ADDR", "no such host"), ("OMP_NUM_THREADS", "0"),
    ("OMP_NUM_THREADS", "many"), ("OMP_NUM_THREADS", "-2"), ("CUDA_VISIBLE_DEVICES", "first"),
    ("CUDA_VISIBLE_DEVICES", "0,,1"), ("CUDA_VISIBLE_DEVICES", "0,0"), ("DS_ACCELERATOR", "gpu")])
def test_nonsense_is_named_with_its_value(name, value):
    with pytest.raises(UserError, match=rf"{name} = ('{value}'|{value} does not|\d does not)"):
        check_environment(WHOLE | {name: value})


def test_a_rank_without_the_rest_is_named():
    with pytest.raises(UserError, match="RANK is set but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, "
                                        "MASTER_PORT are not; set all five"):
        check_environment({"RANK": "0"})
    for name in RANK_VARIABLES[1:]:  # without LOCAL_RANK, DeepSpeed would ask MPI
        with pytest.raises(UserError, match=f"RANK is set but {name} is not"):
            check_environment({key: value for key, value in WHOLE.items() if key != name})
    with pytest.raises(UserError) as caught:
        check_environment({"RANK": "a", "WORLD_SIZE": "b", "MASTER_PORT": "c"})
    assert all(f"{name} = " in str(caught.value) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs)\nGCC 13.2"


@pytest.mark.parametrize(("version", "cuda", "words"), [
    ("535.104.05", "13.0", "NVIDIA driver 535.104.05, but torch 2.13.0+x, built for CUDA 13.0, can "
     "use no GPU. CUDA 13.0 needs driver 580 or newer: update the driver, or install a wheel for "
     "this one (pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
     "), or set DS_ACCELERATOR=cpu"),
    ("470.82.01", "12.6", "CUDA 12.6 needs driver 525 or newer: update the driver, or set DS_"),
    ("580.65.06", "13.0", "Look at CUDA_VISIBLE_DEVICES (0,1)"),
    ("580.65.06", None, "built without CUDA, can use no GPU. Install a wheel with CUDA (pip "
     "install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130)"),
    ("", "13.0", "has an NVIDIA driver, but")])
def test_gpus_that_torch_cannot_use_are_an_error(monkeypatch, tmp_path, version, cuda, words):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(launcher, "_VERSION", tmp_path / "version")
    if version:
        (tmp_path / "version").write_text(OPEN.format(version))
    monkeypatch.setattr(torch, "__version__", "2.13.0+x")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # by the driver
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        launcher.count_gpus()
    assert words in str(caught.value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert launcher.count_gpus() == 0
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launcher.count_gpus() == 8


@pytest.mark.parametrize(("script", "function", "arguments"), [
    ("evaluate.py", "main", ()), ("minimal_pairs.py", "load", ("no_model",))])
def test_scores_on_a_gpu_that_torch_cannot_use_are_an_error(monkeypatch, script, function,
                                                            arguments):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [script, "--run", "no_run"])
    command = runpy.run_path(str(ROOT / "launch" / script))[function]
    with pytest.raises(UserError, match="can use no GPU"):
        command(*arguments)


# A shell has its background jobs ignore Ctrl-C, some a TERM too, and so would this one.
CODE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from deberta_ds.cluster import dist
dist.WAIT_SECONDS = 0.2
from deberta_ds.engine import engine
engine.init_distributed()
"""


@pytest.mark.multi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_rank(number):
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "9"}
    rank = subprocess.Popen([sys.executable, "-c", CODE], cwd=ROOT, env=ENVIRONMENT | places,
                            stderr=subprocess.PIPE, text=True)
    for line in rank.stderr:
        if line.startswith("rank 1 of 2 waits for rank 0 at 127.0.0.1:9 (from MASTER_ADDR"):
            break
    rank.send_signal(number)
    rank.stderr.read()
    assert rank.wait(timeout=30) == -number


def test_ctrl_c_is_the_run_s_again_once_all_ranks_are_there():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with dist.saying_who_waits():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
