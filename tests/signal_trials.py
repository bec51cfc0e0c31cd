"""A job of the shipped scripts under a launcher, a signal to it, and what is left of it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from launching import ENVIRONMENT, ROOT, deepspeed_json, losses, make_run, options_of
from rank_helpers import free_port

from deberta_ds.checkpoint.find import list_finished, step_of

LAUNCHERS = {"python": [sys.executable],
             "deepspeed": [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus=2"]}
SIGNALS = {  # what is sent to whom, and how long after each other
    "SIGTERM to the launcher": (os.kill, [signal.SIGTERM], 0.0),
    "SIGTERM to the group": (os.killpg, [signal.SIGTERM], 0.0),
    "Ctrl-C": (os.killpg, [signal.SIGINT], 0.0),
    "Ctrl-C twice": (os.killpg, [signal.SIGINT] * 2, 1.2)}
END_SECONDS = 120  # who is there after this is left running


@dataclass(frozen=True)
class Trial:
    """What one signal did; exit codes are the shell's (128 + signal)."""

    exit_code: int
    last_step: int
    saved_step: int  # 0: nothing
    left_running: int  # processes, END_SECONDS after the signal


def _default_signals() -> None:
    """Undo what a shell does to its background jobs, which ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(launcher: str, work: Path, workers: int, *more: str) -> tuple[subprocess.Popen, str]:
    """Start a job that would take minutes; return its first process and the mark of all of them."""
    ranks = 1 if launcher == "python" else 2
    run_file = make_run(work, steps="5000", save_every="5000", eval_every="5000",
                        workers=str(workers), global_batch_size="2", micro_batch_size="1",
                        two_layers=True)
    ds_file, mark = deepspeed_json(work / "ds.json", 3 if ranks == 2 else 1), uuid.uuid4().hex
    port = [f"--master_port={free_port()}"] if launcher == "deepspeed" else []
    command = [*LAUNCHERS[launcher], *port, str(ROOT / "launch/pretrain.py"),
               *options_of(run_file, ds_file), *more]
    with open(work / "log", "ab") as log:
        process = subprocess.Popen(command, cwd=work, stdout=log, stderr=log,
                                   start_new_session=True, env=ENVIRONMENT | {"TRIAL": mark},
                                   preexec_fn=_default_signals)
    return process, mark


def processes_of(mark: str) -> list[int]:
    """Return the ids of the living processes with this mark in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"TRIAL={mark}".encode() in (directory / "environ").read_bytes():
                if (directory / "stat").read_text().rpartition(") ")[2][0] not in "ZX":
                    found.append(int(directory.name))
        except OSError:
            continue
    return sorted(found)


def trial(launcher: str, what: str, workers: int, work: Path) -> Trial:
    """Run one job and signal it; leaves nothing running."""
    # Under "twice" the first step boundary must not come before the second Ctrl-C.
    slow = ["--train.global_batch_size=64"] if what == "Ctrl-C twice" else []
    process, mark = start(launcher, work, workers, *slow)
    out, log = work / "out", work / "log"
    try:
        deadline = time.monotonic() + 300
        while (1 if slow else 3) not in losses(out):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)
        kill, signals, between = SIGNALS[what]
        for turn, number in enumerate(signals):
            time.sleep(between * turn)
            if process.poll() is None:
                kill(process.pid, number)  # which leads a group of its own
        code, started = process.wait(timeout=240), time.monotonic()
        while (left := processes_of(mark)) and time.monotonic() < started + END_SECONDS:
            time.sleep(0.05)
    finally:
        for pid in processes_of(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    saved = [step_of(path) for path in list_finished(out)]
    return Trial(128 - code if code < 0 else code, max(losses(out), default=0),
                 max(saved, default=0), len(left))
