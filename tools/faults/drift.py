"""A long run of two ranks, watched: memory, descriptors, threads, /dev/shm, bytes on disk.

    unshare -m sh -c "mount -t tmpfs none /dev/shm && python tools/faults/drift.py --work DIR"

Evaluations, background saves, uploads to an S3 server of this machine (moto) and loader processes
all take part. Every 250 steps, half way between two saves, everything is added up over the
launcher, the ranks and the loaders. The mount gives the run a /dev/shm of its own (needs root).
Prints a line fitted to each figure after the first 1,000 steps; --out keeps the samples as JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import pytest  # noqa: E402
from launching import ENVIRONMENT, ROOT, losses, make_run  # noqa: E402
from s3_server import s3_bucket  # noqa: E402

EVERY, SETTLED = 250, 1000


def total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def bytes_at_url(port: int) -> int:
    from pyarrow.fs import FileSelector, S3FileSystem

    store = S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http")
    return sum(info.size or 0 for info in store.get_file_info(FileSelector("shop", recursive=True))
               if not info.path.endswith(".jsonl"))


def sample(launcher: psutil.Process, out: Path, port: int) -> dict[str, int]:
    """Return the figures of this moment."""
    processes = [launcher, *launcher.children(recursive=True)]
    shm = os.statvfs("/dev/shm")
    return {"RSS": sum(one.memory_info().rss for one in processes),
            "PSS": sum(int(Path(f"/proc/{one.pid}/smaps_rollup").read_text().split("\nPss:")[1]
                           .split()[0]) for one in processes) * 1024,
            "processes": len(processes), "threads": sum(one.num_threads() for one in processes),
            "open descriptors": sum(one.num_fds() for one in processes),
            "entries in /dev/shm": len(os.listdir("/dev/shm")),
            "bytes in /dev/shm": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "bytes on disk": total_bytes(out) - (out / "metrics.jsonl").stat().st_size,
            "bytes of metrics.jsonl": (out / "metrics.jsonl").stat().st_size,
            "bytes at the URL": bytes_at_url(port)}


def watch(command: list[str], work: Path, port: int) -> list[dict[str, int]]:
    """Run to the end; return the samples, each with its step."""
    samples: list[dict[str, int]] = []
    with open(work / "log", "w") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT | dict(os.environ), cwd=ROOT,
                                   stdout=log, stderr=log)
    while process.poll() is None:
        step = max(losses(work / "out"), default=0)
        if step >= EVERY * len(samples) + EVERY // 2:
            samples.append({"step": step} | sample(psutil.Process(process.pid), work / "out", port))
            print(samples[-1], flush=True)
        time.sleep(0.5)
    assert process.returncode == 0, (work / "log").read_text()[-3000:]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--work", type=Path, default=Path("runs/drift"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    run = make_run(work, two_layers=True, steps=str(options.steps), workers="1", keep="2",
                   save_every=str(EVERY), eval_every=str(EVERY), log_every="25",
                   activation_checkpointing='"none"', global_batch_size="4")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "launch/pretrain.py", "--config", str(run), "--deepspeed_config",
               "ds_configs/zero1_fp32.json", "--train.upload=s3://shop/run"]
    with pytest.MonkeyPatch.context() as patch, s3_bucket(patch) as port:
        samples = watch(command, work, port)
    settled = [one for one in samples if one["step"] >= SETTLED]
    steps = np.array([one["step"] for one in settled]) / 1000
    for name in list(samples[0])[1:]:
        values = np.array([one[name] for one in settled], dtype=float)
        slope, error = np.polyfit(steps, values, 1)[0], 0.0
        if len(steps) > 3:
            error = np.sqrt(np.polyfit(steps, values, 1, cov=True)[1][0, 0])
        print(f"{name}: {samples[0][name]:,} first, {values[0]:,.0f} then, {values[-1]:,.0f} last, "
              f"{slope:+,.1f} +- {error:,.1f} per 1,000 steps")
    if options.out:
        options.out.write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
