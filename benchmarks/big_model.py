"""Train the 1.5B model for real steps on one CPU machine, under a memory guard; measure it.

    python benchmarks/big_model.py [--out benchmarks/results/big_model.json] [--floor 1.5]
        [--config launch/runs/deberta_1p5b_cpu_steps.toml] [-- --data.tokenizer=... ...]

Runs launch/pretrain.py with the NVMe rung (ZeRO-3, bf16, optimizer on disk) as a child, and again
to see it resume. Every second it reads the child's memory, the machine's MemAvailable and the disk;
if less than `--floor` GiB are available it ends the child, so nothing else is pushed out of memory;
the child also volunteers to the kernel as the first to go (oom_score_adj).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deberta_ds.errors import UserError, exit_cleanly
from deberta_ds.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
NEEDED_MEMORY_GIB, NEEDED_DISK_GIB = 18, 60
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
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        command = prepare(Path(scratch), options)
        results = {"train": measure([*command, "--train.stop_after=2"], options.floor, scratch),
                   "resume": measure(command, options.floor, scratch)}
        out_dir = Path(scratch) / "run"
        results["metrics"] = [json.loads(line) for line in
                              (out_dir / "metrics.jsonl").read_text().splitlines()]
        results["checkpoint_bytes"] = size_of(out_dir / "checkpoints")
    write_atomic(options.out, json.dumps(results, indent=1) + "\n")
    print(json.dumps({name: results[name] for name in ("train", "resume", "checkpoint_bytes")}))


def prepare(scratch: Path, options: argparse.Namespace) -> list[str]:
    """Write the DeepSpeed file with this scratch directory; return the training command."""
    ds = json.loads((ROOT / "ds_configs/zero3_bf16_offload_nvme.json").read_text())
    ds["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(scratch / "nvme")
    (scratch / "nvme").mkdir()
    (scratch / "ds.json").write_text(json.dumps(ds))
    return [sys.executable, str(ROOT / "launch/pretrain.py"), "--config", options.config,
            "--deepspeed_config", str(scratch / "ds.json"), f"--out_dir={scratch / 'run'}",
            *options.overrides]


def measure(command: list[str], floor_gib: float, scratch: str) -> dict:
    """Run `command` to its end and return its time, peak memory and disk; guard the machine."""
    started, peak, disk = time.monotonic(), 0, 0
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        disk = max(disk, size_of(Path(scratch)))
        if memory_available() < floor_gib * GIB:
            process.kill()
            raise UserError(f"stopped: less than {floor_gib} GiB of memory left on the machine "
                            f"(the run held {peak / GIB:.1f})")
        time.sleep(1)
    if process.returncode:
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
