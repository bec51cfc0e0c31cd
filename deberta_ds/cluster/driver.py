"""The GPUs of this machine that torch can use; where it can use none of them, why."""

import os
import re
from pathlib import Path

import torch

from deberta_ds.base.errors import UserError

_VERSION = Path("/proc/driver/nvidia/version")
# Wheels of torch 2.12 to 2.14 and the oldest driver of each (NVIDIA, "Minor Version Compatibility")
_WHEELS = ((580, "cu130"), (525, "cu126"))


def count_gpus() -> int:
    """Return how many GPUs torch can use; 0 under DS_ACCELERATOR=cpu.

    Raises UserError where the machine has some that torch cannot use. `device_count` alone does not
    tell: it asks the driver, not CUDA.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    found = torch.cuda.device_count()
    if torch.cuda.is_available() or not (found or Path("/dev/nvidiactl").exists()):
        return found
    text = _VERSION.read_text() if _VERSION.exists() else ""
    driver = re.search(r"\b(\d{3})\.\d+(\.\d+)?\b", text)
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    raise UserError(f"this machine has an NVIDIA driver{f' {driver[0]}' if driver else ''}, but "
                    f"torch {torch.__version__}, built {built}, can use no GPU. "
                    f"{_remedy(int(driver[1]) if driver else 0, torch.version.cuda)}, or set "
                    "DS_ACCELERATOR=cpu to use the CPU")


def _remedy(driver: int, cuda: str | None) -> str:
    """Return what to do, by the version of the driver (0: unknown) and that of the wheel's CUDA."""
    wheel = next((name for oldest, name in _WHEELS if driver >= oldest), "")
    install = (f" (pip install torch=={torch.__version__.partition('+')[0]}+{wheel} --index-url "
               f"https://download.pytorch.org/whl/{wheel})") if wheel else ""
    needed = 580 if cuda and cuda >= "13" else 525
    if not cuda:
        return f"Install a wheel with CUDA{install}"
    if not driver or driver >= needed:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        return f"Look at CUDA_VISIBLE_DEVICES ({shown}) and at what nvidia-smi says"
    update = f"CUDA {cuda} needs driver {needed} or newer: update the driver"
    return f"{update}, or install a wheel for this one{install}" if wheel else update
