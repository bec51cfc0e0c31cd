"""What a signal does under each launcher: exit code, what was saved, what was left running.

    python tools/faults/signal_table.py --out benchmarks/results/signals.json

Each trial starts two ranks of a tiny RTD run (one rank where there is no launcher; under srun one
on each of two hosts made of namespaces), waits for its third step, sends a signal, and waits until
no process of the job is left. Prints the table of docs/evidence/reliability.md; trials that --out
has are made again if they are asked for, and kept otherwise. Launchers that are not installed are
left out.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hosts")]

import fake_hosts  # noqa: E402
from launching import ENVIRONMENT, ROOT, deepspeed_json, losses, make_run  # noqa: E402

from deberta_ds.base.files import write_atomic  # noqa: E402
from deberta_ds.checkpoint.find import list_finished, step_of  # noqa: E402


def _free_port() -> int:
    """Return a port for DeepSpeed's launcher, whose own is the same for every job of a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


BIN = Path(sys.executable).parent
LAUNCHERS = {
    "python": [],
    "timeout": ["timeout", "1000"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc_per_node=2"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus=2"],  # and a port, free at the time
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "--bind-to", "none",
               "--mca", "odls_base_sigkill_timeout", "60"],
    "srun": ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "--kill-on-bad-exit=1"],
}
# What is sent to whom: the launcher alone, its process group (as a terminal and most tools do),
# or one rank.
SIGNALS = {
    "SIGTERM to the launcher": (signal.SIGTERM, "launcher"),
    "SIGTERM to the group": (signal.SIGTERM, "group"),
    "SIGUSR1 to the launcher": (signal.SIGUSR1, "launcher"),
    "SIGUSR1 to one rank": (signal.SIGUSR1, "rank"),
    "SIGHUP to the group": (signal.SIGHUP, "group"),  # the terminal is closed
    "Ctrl-C": (signal.SIGINT, "group"),
    "Ctrl-C twice": (signal.SIGINT, "group twice"),
    "Ctrl-C twice within a second": (signal.SIGINT, "group twice at once"),
    "SIGKILL to the launcher": (signal.SIGKILL, "launcher"),
    "scancel --signal=TERM": (signal.SIGTERM, "scancel"),
}
SECONDS_BETWEEN = {"group twice": 1.2,  # as fast as a person, slower than a launcher's echo
                   "group twice at once": 0.4}  # what srun asks for
END_SECONDS = 120  # who is there after this is left running


@dataclass(frozen=True)
class Trial:
    """What one signal did; exit codes are the shell's (128 + signal)."""

    launcher: str
    signal: str
    workers: int
    exit_code: int
    last_step: int
    saved_step: int  # 0: nothing
    seconds: float  # until the last process of the job was gone
    left_running: int  # processes, END_SECONDS after the signal
    our_tracebacks: int
    launcher_tracebacks: int


def applies(launcher: str, what: str) -> bool:
    """Return whether a trial says anything."""
    if what.startswith("scancel"):
        return launcher == "srun"
    if launcher == "python":  # it is its own launcher and rank
        return what not in ("SIGKILL to the launcher", "SIGUSR1 to the launcher",
                            "Ctrl-C twice within a second")
    if what in ("Ctrl-C", "Ctrl-C twice"):
        return launcher != "srun"  # which then says how the tasks are, and goes on
    return what != "Ctrl-C twice within a second" or launcher == "srun"


def available() -> list[str]:
    return [name for name, command in LAUNCHERS.items()
            if not command or fake_hosts.find(command[0])]


@contextmanager
def on_fake_hosts(work: Path) -> Iterator[dict[str, list[str]]]:
    """Yield the commands of srun and scancel on two hosts that have a Slurm of their own."""
    from test_slurm import start_slurm

    with fake_hosts.FakeHosts(2, work) as hosts:
        variables = [f"{name}={value}" for name, value in start_slurm(hosts, work).items()]
        commands = {"scancel": ["scancel", "--signal=TERM", "--user=root"],
                    # A session of its own, so that its group can be told from that of nsenter.
                    "srun": ["setsid", "--wait", *LAUNCHERS["srun"]]}
        yield {name: hosts.command("host1", ["env", *variables, *command], ROOT)
               for name, command in commands.items()}


def start(launcher: str, work: Path, workers: int, commands: Mapping[str, list[str]],
          *more: str) -> tuple[subprocess.Popen, str]:
    """Start a job that would take minutes; return its first process and the mark of all of them."""
    ranks = 1 if launcher in ("python", "timeout") else 2
    run_file = make_run(work, steps="5000", save_every="5000", eval_every="5000",
                        workers=str(workers), global_batch_size="2", micro_batch_size="1")
    ds_file = deepspeed_json(work / "ds.json", 3 if ranks == 2 else 1)
    mark = uuid.uuid4().hex
    script = [str(ROOT / "launch/pretrain.py"), "--config", str(run_file), "--deepspeed_config",
              str(ds_file), *more]
    interpreter = [] if launcher in ("torchrun", "deepspeed") else [sys.executable]
    with open(work / "log", "ab") as log:
        process = subprocess.Popen([*commands[launcher], *interpreter, *script], cwd=work,
                                   stdout=log, stderr=log, start_new_session=True,
                                   env=ENVIRONMENT | {"TRIAL": mark},
                                   preexec_fn=default_signals)
    return process, mark


def default_signals() -> None:
    """Undo what a shell does to its background jobs, which ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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


def ranks_of(mark: str) -> list[int]:
    """Return the ids of the ranks: processes of pretrain.py that have no parent among them."""
    ours = {}
    for pid in processes_of(mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if Path(words[0]).name.startswith("python") and \
                any(word.endswith("launch/pretrain.py") for word in words[1:3]):
            ours[pid] = parent
    return sorted(pid for pid, parent in ours.items() if parent not in ours)


def wait_for_step(step: int, out: Path, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while step not in losses(out):
        if time.monotonic() > deadline or process.poll() is not None:
            raise AssertionError(f"no step {step}:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def launcher_of(process: subprocess.Popen, launcher: str, mark: str) -> int:
    """Return the id of the launcher's own process: srun is started inside a host."""
    if launcher != "srun":
        return process.pid
    return min(pid for pid in processes_of(mark)
               if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"srun\0"))


def send(number: signal.Signals, target: str, launcher: int, mark: str) -> None:
    if target == "rank":
        os.kill(ranks_of(mark)[-1], number)
    elif target == "launcher":
        os.kill(launcher, number)
    else:
        group = os.getpgid(launcher)
        os.killpg(group, number)
        if target in SECONDS_BETWEEN:
            time.sleep(SECONDS_BETWEEN[target])
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                pass


def trial(launcher: str, what: str, workers: int, work: Path,
          commands: dict[str, list[str]] = LAUNCHERS) -> Trial:
    """Run one job and signal it; leaves nothing running."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    # Under "twice" the first step boundary must not come before the second Ctrl-C.
    slow = ["--train.global_batch_size=64"] if what == "Ctrl-C twice" else []
    if launcher == "deepspeed":
        commands = commands | {launcher: [*commands[launcher], f"--master_port={_free_port()}"]}
    process, mark = start(launcher, work, workers, commands, *slow)
    out, log = work / "out", work / "log"
    try:
        wait_for_step(1 if slow else 3, out, process, log)
        started = time.monotonic()
        if what.startswith("scancel"):
            subprocess.run(commands["scancel"], check=True)
        else:
            send(*SIGNALS[what], launcher_of(process, launcher, mark), mark)
        code = process.wait(timeout=240)
        while (left := processes_of(mark)) and time.monotonic() < started + END_SECONDS:
            time.sleep(0.05)
        seconds = time.monotonic() - started
    finally:
        for pid in processes_of(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    text = log.read_text(errors="replace")
    saved = [step_of(path) for path in list_finished(out)]
    ours = text.count("launch/pretrain.py\", line")
    return Trial(launcher, what, workers, 128 - code if code < 0 else code,
                 max(losses(out), default=0), max(saved, default=0), round(seconds, 1), len(left),
                 ours, text.count("Traceback (most recent call last)") - ours)


def table(trials: list[Trial]) -> str:
    lines = ["| launcher | signal | `data.workers` | exit code | saved | gone after | tracebacks |",
             "|---|---|---|---|---|---|---|"]
    for t in trials:
        saved = "the last step" if t.saved_step == t.last_step else \
            f"step {t.saved_step} of {t.last_step}" if t.saved_step else "nothing"
        gone = f"{t.left_running} processes left" if t.left_running else f"{t.seconds:.0f} s"
        tracebacks = f"{t.launcher_tracebacks} of the launcher" if t.launcher_tracebacks else "none"
        if t.our_tracebacks:
            tracebacks = f"{t.our_tracebacks} of ours, {tracebacks}"
        lines.append(f"| {t.launcher} | {t.signal} | {t.workers} | {t.exit_code} | {saved} "
                     f"| {gone} | {tracebacks} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=list(LAUNCHERS), default=available())
    parser.add_argument("--signals", nargs="+", choices=list(SIGNALS), default=list(SIGNALS))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--work", type=Path, default=Path("runs/signal_table"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the jobs, too
    found = {}
    if options.out and options.out.exists():
        trials = [Trial(**values) for values in json.loads(options.out.read_text())]
        found = {_key(t): t for t in trials}
    wanted = [(launcher, what, workers) for launcher in options.launchers
              for what in options.signals if applies(launcher, what)
              for workers in options.workers]
    work = options.work.resolve()
    with on_fake_hosts(work / "slurm") if "srun" in options.launchers else nullcontext({}) as more:
        commands = LAUNCHERS | more
        for launcher, what, workers in wanted:
            done = trial(launcher, what, workers, work / "job", commands)
            print(done, flush=True)
            found[_key(done)] = done
            if options.out:
                trials = sorted(found.values(), key=_order)
                write_atomic(options.out, json.dumps([asdict(t) for t in trials], indent=1) + "\n")
    print(table(sorted(found.values(), key=_order)))


def _key(t: Trial) -> tuple:
    return t.launcher, t.signal, t.workers


def _order(t: Trial) -> tuple:
    return list(LAUNCHERS).index(t.launcher), list(SIGNALS).index(t.signal), t.workers


if __name__ == "__main__":
    main()
