"""A machine whose GPUs torch cannot use: the driver, the wheel and the remedy are named."""

import runpy

import pytest
import torch
from launching import ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.cluster import driver

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
    """The demo trained on the CPU, and said "GPUs: 2"."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(driver, "_VERSION", tmp_path / "version")
    if version:
        (tmp_path / "version").write_text(OPEN.format(version))
    monkeypatch.setattr(torch, "__version__", "2.13.0+x")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # by the driver
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        driver.count_gpus()
    assert words in str(caught.value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert driver.count_gpus() == 0
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert driver.count_gpus() == 8


@pytest.mark.parametrize(("script", "function", "arguments"), [
    ("evaluate.py", "main", ()), ("minimal_pairs.py", "load", ("no_model",))])
def test_scores_on_a_gpu_that_torch_cannot_use_are_an_error(monkeypatch, script, function,
                                                            arguments):
    """Both commands scored on the CPU, without a word."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [script, "--run", "no_run"])
    command = runpy.run_path(str(ROOT / "launch" / script))[function]
    with pytest.raises(UserError, match="can use no GPU"):
        command(*arguments)
