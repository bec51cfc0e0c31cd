"""Requests to stop, the launcher that is gone, the lock of an out_dir; without a training run."""

import json
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import psutil
import pytest
from launching import ENVIRONMENT, ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.cluster import lock, signals
from deberta_ds.cluster.signals import is_launcher

LISTENER = """
import hashlib, sys, time
from deberta_ds.cluster import signals
request = signals.listen()
print("ready", flush=True)
if "busy" in sys.argv:  # in C, where no Python handler runs
    hashlib.pbkdf2_hmac("sha1", b"", b"", 10**9)
while not request:
    time.sleep(0.01)
print(request.reason, flush=True)
"""


def listener(*words: str, ignored: int = 0) -> subprocess.Popen:
    def handlers() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)

    child = subprocess.Popen([sys.executable, "-c", LISTENER, *words], env=ENVIRONMENT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=handlers)
    assert select.select([child.stdout], [], [], 60)[0] and child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT,
                                    signal.SIGHUP])
def test_a_signal_is_a_request(number):
    child = listener()
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert out == f"{number.name}\n" and f"asked to stop by {number.name}" in err


COMPILER = """
import ctypes
import signal
import fused_compile
from deberta_ds.cluster import signals

def gone_after_one(number):
    action = ctypes.create_string_buffer(160)  # handler, mask of 128 bytes, flags
    ctypes.CDLL(None).sigaction(number, None, action)
    return bool(int.from_bytes(action[136:140], "little") & 0x80000000)  # SA_RESETHAND

numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
request = signals.listen()
fused_compile.compile_kernel("bias", 90, 64, 512, False, True)
print(*map(gone_after_one, numbers))
signals.listen_again()
print(*map(gone_after_one, numbers))
signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
while not request:
    pass
"""


def test_two_signals_at_once_are_a_request_after_triton_compiled(tmp_path):
    """On a GPU `timeout` ended runs unsaved: it sends to the process and to its group."""
    environ = ENVIRONMENT | {"TRITON_CACHE_DIR": str(tmp_path),
                             "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/workers'}"}
    done = subprocess.run([sys.executable, "-c", COMPILER], env=environ, text=True,
                          capture_output=True, timeout=120)
    assert done.stdout.splitlines() == ["True True True", "False False False"], done.stderr[-2000:]
    assert done.returncode == 0


def test_a_second_ctrl_c_ends_a_rank_that_hangs_in_c():
    child = listener("busy")
    child.send_signal(signal.SIGINT)
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)  # the launcher's echo of the first one
    time.sleep(1.2)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "The same command goes on from step 0" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_background_job_goes_on_ignoring_ctrl_c_and_the_end_of_the_terminal(number):
    child = listener(ignored=number)
    child.send_signal(number)
    time.sleep(0.3)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=60)[0] == "SIGTERM\n"


@pytest.mark.parametrize(("words", "expected"), [
    ("/venv/bin/python3.11 /venv/bin/deepspeed --num_gpus=2 launch/pretrain.py", True),
    ("/venv/bin/python -u -m deepspeed.launcher.launch --world_info=x launch/pretrain.py", True),
    ("python -m torch.distributed.run --standalone launch/pretrain.py", True),
    ("/usr/bin/mpirun -np 2 python launch/pretrain.py", True), ("orted -mca ess env", True),
    ("slurmstepd: [12.0]", True), ("python launch/pretrain.py --config deepspeed", False),
    ("python -m pytest tests/deepspeed", False), ("bash deepspeed.sh", False), ("-bash", False)])
def test_which_command_lines_are_launchers(words, expected):
    assert is_launcher(words.split(" ") if "[" not in words else [words]) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_an_orphan_notices_that_its_launcher_is_gone(tmp_path, level):
    """Level 1 is the parent; level 2 its parent, as DeepSpeed's runner is."""
    inner = tmp_path / "torchrun"
    inner.write_text("import subprocess, sys, os\nprint(os.getpid(), flush=True)\n"
                     f"subprocess.run([sys.executable, '-c', {LISTENER!r}])\n")
    outer = tmp_path / "deepspeed"
    outer.write_text("import subprocess, sys, os\nprint(os.getpid(), flush=True)\n"
                     f"subprocess.run([sys.executable, {str(inner)!r}])\n")
    started = subprocess.Popen([sys.executable, str(outer)], env=ENVIRONMENT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [int(started.stdout.readline()) for _ in range(2)]
    assert started.stdout.readline() == "ready\n"
    os.kill(pids[2 - level], signal.SIGKILL)
    reason = started.stdout.readline()
    started.wait(timeout=60)
    name = ("torchrun", "deepspeed")[level - 1]
    assert reason == f"the end of its launcher ({name}, pid {pids[2 - level]})\n"


def test_a_run_under_timeout_notices_when_that_is_killed():
    started = subprocess.Popen(["timeout", "100", sys.executable, "-c", LISTENER], env=ENVIRONMENT,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert started.stdout.readline() == "ready\n"
    started.kill()
    assert started.stdout.readline() == f"the end of its launcher (timeout, pid {started.pid})\n"
    started.wait(timeout=60)


def test_a_process_is_its_id_and_its_start():
    me = lock.this_process()
    assert me.pid == os.getpid() and lock._lives_here(me)
    assert not lock._lives_here(replace(me, started=me.started - 1))
    child = subprocess.Popen(["true"])
    seen = psutil.Process(child.pid)
    while seen.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert lock.started_at(child.pid) is None
    child.wait()
    assert lock.started_at(child.pid) is None


def test_a_loader_process_ends_with_its_rank():
    text = ("import os, time\nfrom deberta_ds.cluster import signals\n"
            "if os.fork() == 0:\n    signals.ignore()\n    signals.end_with_parent()\n"
            "    print(os.getpid(), flush=True)\ntime.sleep(100)\n")
    rank = subprocess.Popen([sys.executable, "-c", text], env=ENVIRONMENT, text=True,
                            stdout=subprocess.PIPE)
    worker = int(rank.stdout.readline())
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 30
    while signals.started_at(worker) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def dead_holder() -> lock.Holder:
    """A holder of this machine whose process has ended."""
    child = subprocess.Popen(["sleep", "100"])
    started = lock.started_at(child.pid)
    child.kill()
    child.wait()
    return replace(lock.this_process(), pid=child.pid, started=started)


def write(path, holder: lock.Holder) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))


def test_a_live_job_keeps_its_out_dir(tmp_path):
    path = tmp_path / "out" / lock.NAME
    with lock.held(path.parent):
        with pytest.raises(UserError, match="another job writes there") as caught:
            lock.take(path, lock.this_process())
        assert f"process {os.getpid()} on" in str(caught.value) and "\n" not in str(caught.value)
    assert not path.exists()


def test_the_lock_of_a_killed_job_is_taken_over(tmp_path):
    write(tmp_path / lock.NAME, dead_holder())
    with lock.held(tmp_path):
        holder = lock.Holder(**json.loads((tmp_path / lock.NAME).read_text()))
        assert holder.job == lock.this_process().job
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alive", [True, False])
def test_the_lock_of_another_machine_is_judged_by_what_its_job_counts(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(lock, "_SLACK_SECONDS", 0.5)
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.1)
    path = tmp_path / lock.NAME
    other = replace(lock.this_process(), host="elsewhere", machine="another boot")
    write(path, other)
    ended = threading.Event()
    job = other.job if alive else "elsewhere:1:1"
    counter = threading.Thread(target=lock._count, args=(tmp_path / lock.BEAT, job, ended))
    counter.start()
    try:
        if alive:
            with pytest.raises(UserError, match="on elsewhere"):
                lock.take(path, lock.this_process())
        else:  # another job counts there
            lock.take(path, lock.this_process())
    finally:
        ended.set()
        counter.join()


def test_a_damaged_lock_and_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / lock.NAME).write_text("{")
    with pytest.raises(UserError, match="run.lock: damaged"):
        lock.take(tmp_path / lock.NAME, lock.this_process())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        lock.take(tmp_path / "file" / lock.NAME, lock.this_process())


def test_a_full_disk_leaves_no_lock_and_an_empty_one_keeps_nobody_out(tmp_path):
    path, mine = tmp_path / lock.NAME, lock.this_process()
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # fails as a full disk does
    try:
        with pytest.raises(UserError, match="run.lock: cannot be written"):
            lock.take(path, mine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        lock.take(path, mine)
        assert lock.is_held(tmp_path) and list(tmp_path.iterdir()) == [path]
        path.write_text("")  # the second one is taken over
    assert not lock.is_held(tmp_path)


def test_a_host_that_does_not_see_the_out_dir_is_named_at_once(tmp_path, monkeypatch):
    first = replace(lock.this_process(), host="node0", machine="another")
    monkeypatch.setattr(lock, "_SEEN_SECONDS", 0.3)
    monkeypatch.setattr(lock.dist, "is_main", lambda: False)
    monkeypatch.setattr(lock.dist, "broadcast_object", lambda mine: first)
    with pytest.raises(UserError, match="must be shared by all nodes: .* that node0 has written"):
        with lock.held(tmp_path):
            pass
    monkeypatch.setattr(lock, "_SEEN_SECONDS", 60)
    late = threading.Timer(0.5, lambda: write(tmp_path / lock.NAME, first))
    late.start()
    with lock.held(tmp_path):
        late.join()


def _contend(path, gate, winners) -> None:
    gate.wait()
    try:
        lock.take(path, lock.this_process())
        winners.put(os.getpid())
        time.sleep(3)
    except UserError:
        winners.put(None)


@pytest.mark.parametrize("stale", [False, True])
def test_of_eight_jobs_at_once_one_has_the_out_dir(tmp_path, stale):
    path = tmp_path / lock.NAME
    if stale:
        write(path, dead_holder())
    context = multiprocessing.get_context("fork")
    gate, winners = context.Barrier(8), context.Queue()
    jobs = [context.Process(target=_contend, args=(path, gate, winners)) for _ in range(8)]
    for job in jobs:
        job.start()
    found = [winners.get(timeout=60) for _ in jobs]
    for job in jobs:
        job.join()
    assert sum(winner is not None for winner in found) == 1


def test_how_a_job_ended_is_written_for_its_script(tmp_path, monkeypatch):
    signals.record(75)  # nobody asked
    monkeypatch.setenv(signals.VARIABLE, str(tmp_path / "end"))
    signals.record(75)
    assert (tmp_path / "end").read_text() == "75\n"
    signals.record(70, {"node7", "node3"})
    assert (tmp_path / "end").read_text() == "70 node3,node7\n"
    monkeypatch.setenv(signals.VARIABLE, "/proc/none/end")
    signals.record(75)


def test_a_console_that_is_full_and_never_read_does_not_hold_a_stop(tmp_path):
    """mpirun reads no more once it is told to end; its ranks print on until they are told."""
    code = """if True:
        import sys
        from deberta_ds.cluster import signals
        from deberta_ds.base.errors import tell
        request = signals.listen()
        open(sys.argv[1], "w").close()
        while not request:
            tell("x" * 999, sys.stdout)  # waits as soon as the pipe is full
        tell("the step is saved", sys.stdout)
    """
    ready = tmp_path / "ready"
    child = subprocess.Popen([sys.executable, "-c", code, str(ready)], env=ENVIRONMENT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with child:
        while not ready.exists():
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)  # to fill 64 KiB
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0
