"""Train the 1.5B model for real steps on one CPU machine, under a memory guard; measure it.

    python -m benchmarks.studies.big_model [--out benchmarks/results/big_model.json] [--floor 1.5]
        [--config launch/runs/deberta_1p5b_cpu_steps.toml] [-- --data.tokenizer=... ...]

Runs launch/pretrain.py with the NVMe rung (ZeRO-3, bf16, optimizer on disk) as a child: two steps,
a checkpoint, a third step, kill -9. A second child resumes and takes the third step again: its loss
and gradient norm must be the same bits. Then launch/export.py makes a Hugging Face directory of the
checkpoint. Every second this script reads the child's memory, the machine's MemAvailable and the
disk; if less than `--floor` GiB are available it ends the child, so nothing else is pushed out of
memory; the child also volunteers to the kernel as the first to go (oom_score_adj).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import write_atomic
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config
from deberta_ds.model.backbone import count_parameters, on_meta
from deberta_ds.objectives.build import build_model
from deberta_ds.planner.activations import trace
from deberta_ds.planner.plan import memory_of

ROOT = Path(__file__).resolve().parents[2]
NEEDED_MEMORY_GIB, NEEDED_DISK_GIB = 19, 50
KILL_AFTER = 3  # steps; the run saves after the second
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="launch/runs/deberta_1p5b_cpu_steps.toml")
    parser.add_argument("--out", default="benchmarks/results/big_model.json")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="disk for the optimizer")
    parser.add_argument("--floor", type=float, default=1.5, help="GiB that must stay available")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    available, free = memory_available(), shutil.disk_usage(options.scratch).free
    if available < NEEDED_MEMORY_GIB * GIB or free < NEEDED_DISK_GIB * GIB:
        raise UserError(f"needs {NEEDED_MEMORY_GIB} GiB of memory and {NEEDED_DISK_GIB} GiB of "
                        f"disk; available are {available / GIB:.1f} and {free / GIB:.1f}")
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        command = prepare(scratch, options)
        results = {"predicted": predict(options, scratch / "ds.json")}
        for part in ("train", "resume"):
            shutil.rmtree(scratch / "nvme", ignore_errors=True)
            (scratch / "nvme").mkdir()
            results[part] = measure(command, options.floor, scratch, last_step=KILL_AFTER)
            results[part]["steps"] = train_lines(scratch)
            (scratch / "run/metrics.jsonl").unlink()
        shutil.rmtree(scratch / "nvme")
        first, again = (results[part]["steps"][-1] for part in ("train", "resume"))
        results["resumed_step_is_identical"] = all(
            first[key] == again[key] for key in ("step", "sequences_seen", "loss", "grad_norm"))
        results["checkpoint_bytes"] = size_of(scratch / "run/checkpoints")
        export = [sys.executable, str(ROOT / "launch/export.py"), "--run",
                  str(scratch / "run"), "--out", str(scratch / "hf")]
        results["export"] = measure(export, options.floor, scratch)
        results["export"]["bytes"] = size_of(scratch / "hf")
    write_atomic(options.out, json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def predict(options: argparse.Namespace, ds_path: Path) -> dict:
    """Return the planner's figures for this run on one rank."""
    run, _ = run_config.load(options.config, options.overrides)
    ds = ds_config.load(ds_path)
    parameters = count_parameters(on_meta(build_model, run))
    memory = memory_of(parameters, ds, 1, trace(run, torch.bfloat16, fused=False), False,
                       False)
    return {"parameters": parameters, "held_bytes": memory.held, "peak_bytes": memory.peak,
            "on_disk_bytes": memory.offloaded}


def train_lines(scratch: Path) -> list[dict]:
    """Return the training lines of the run's metrics file."""
    path = scratch / "run/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


def prepare(scratch: Path, options: argparse.Namespace) -> list[str]:
    """Write the DeepSpeed file with this scratch directory; return the training command."""
    ds = json.loads((ROOT / "ds_configs/zero3_bf16_offload_nvme.json").read_text())
    ds["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(scratch / "nvme")
    (scratch / "ds.json").write_text(json.dumps(ds))
    return [sys.executable, str(ROOT / "launch/pretrain.py"), "--config", options.config,
            "--deepspeed_config", str(scratch / "ds.json"), f"--out_dir={scratch / 'run'}",
            *options.overrides]


def measure(command: list[str], floor_gib: float, scratch: Path, last_step: int = 0) -> dict:
    """Run `command` and return its time, peak memory and disk; guard the machine.

    It runs to its end or, with `last_step`, until the metrics have that step: then it is killed.
    """
    started, peak, disk = time.monotonic(), 0, 0
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        disk = max(disk, size_of(scratch))
        if last_step and [line for line in train_lines(scratch) if line["step"] >= last_step]:
            process.kill()
        if memory_available() < floor_gib * GIB:
            process.kill()
            raise UserError(f"stopped: less than {floor_gib} GiB of memory left on the machine "
                            f"(the run held {peak / GIB:.1f})")
        time.sleep(1)
    if process.returncode not in (0, -signal.SIGKILL if last_step else 0):
        raise UserError(f"the run ended with exit code {process.returncode}")
    return {"seconds": time.monotonic() - started, "peak_resident_bytes": peak,
            "peak_disk_bytes": disk}


def memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UserError("/proc/meminfo has no MemAvailable; this script needs Linux")


def resident(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def size_of(directory: Path) -> int:
    """Return the bytes of all files under a directory; files that vanish meanwhile count 0."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    exit_cleanly(main)
