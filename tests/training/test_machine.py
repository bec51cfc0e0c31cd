"""What a run says of its machine: a name of the hardware, the commit of the source, its memory."""

import subprocess

import numpy as np
import torch

from deberta_ds.training import meters

CPU = torch.device("cpu")


def test_hardware_has_a_name_and_memory_grows_with_what_is_held():
    assert meters.hardware(CPU)
    before = meters.peak_memory_bytes(CPU)
    held = np.ones(40_000_000)  # 320 MB
    assert meters.peak_memory_bytes(CPU) >= max(before, held.nbytes)


def test_commit_is_the_checkouts_and_empty_where_there_is_none(monkeypatch, tmp_path):
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=meters.Path(meters.__file__).parent,
                          capture_output=True, text=True)
    assert meters.source()["commit"].removesuffix("+") == done.stdout.strip()
    package = tmp_path / "somebody/else/deberta_ds/training"
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path / "somebody")], check=True)
    for place in (package / "machine.py", "/proc/deberta_ds/training/machine.py"):
        monkeypatch.setattr(meters, "__file__", str(place))
        assert meters.source() == {"commit": "", "branch": ""}
