"""What a run and the doctor say of a machine: hardware, commit, memory, what would stop a run."""

import subprocess

import numpy as np
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.training import doctor, meters

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


def test_the_report_of_this_machine(process_group, capsys):
    assert doctor.examine() == []
    text = capsys.readouterr().out
    for words in ("packages: torch ", "cores", "TRITON_CACHE_DIR: /", "TFLOP/s", "GB/s",
                  "kernels: attention tiled", "one layer of base, 4 x 128", "would stop a run"):
        assert words in text, text


def test_a_kernel_that_fails_is_a_problem(process_group, capsys, monkeypatch):
    def fail(*_arguments, **_more):
        raise UserError("a kernel fails its check; --model.attention=dense")

    monkeypatch.setattr(doctor.choose, "choices", fail)
    assert doctor.examine() == ["a kernel fails its check; --model.attention=dense"]
    assert "PROBLEM: a kernel fails its check" in capsys.readouterr().out
