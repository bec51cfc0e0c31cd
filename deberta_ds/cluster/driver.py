"""The GPUs of this machine that torch can use; where it can use none of them, why."""

import os
import re
from pathlib import Path

import torch

from deberta_ds.base.errors import UserError

_VERSION = Path("/proc/driver/nvidia/version")
# Wheels of torch 2.12 to 2.14 and the oldest driver of each (NVIDIA, "Minor Version Compatibility")
_WHEELS = ((580, "cu130"), (525, "cu126"))
_PATCH = re.compile(r"\b(\d{3})\.\d+(\.\d+)?\b")


def count_gpus() -> int:
    """Return how many GPUs torch can use; 0 under DS_ACCELERATOR=cpu.

    Raises UserError where the machine has some that torch cannot use. `device_count` alone does not
    tell: it asks the driver, not CUDA.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    found = torch.cuda.device_count()
    if torch.cuda.is_available():
        return found
    if found or Path("/dev/nvidiactl").exists():
        raise UserError(f"this machine has an NVIDIA driver{_driver()}, but torch "
                        f"{torch.__version__}, {_built_for()}, can use no GPU. {_remedy()}, or set "
                        "DS_ACCELERATOR=cpu to use the CPU")
    return 0


def _built_for() -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def _driver() -> str:
    """Return " 535.104.05", or an empty string where the version cannot be read."""
    found = _PATCH.search(_VERSION.read_text()) if _VERSION.exists() else None
    return f" {found[0]}" if found else ""


def _remedy() -> str:
    """Return what to do, by the version of the driver and that of the wheel's CUDA."""
    driver = int(_driver().partition(".")[0] or 0)
    wheel = next((name for oldest, name in _WHEELS if driver >= oldest), "")
    release = torch.__version__.partition("+")[0]
    install = (f"pip install torch=={release}+{wheel} --index-url "
               f"https://download.pytorch.org/whl/{wheel}")
    if not torch.version.cuda:
        return f"Install a wheel with CUDA ({install})" if wheel else "Install a torch with CUDA"
    needed = 580 if torch.version.cuda >= "13" else 525
    if not driver or driver >= needed:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        return f"Look at CUDA_VISIBLE_DEVICES ({shown}) and at what nvidia-smi says"
    update = f"CUDA {torch.version.cuda} needs driver {needed} or newer: update the driver"
    return f"{update}, or install a wheel for this one ({install})" if wheel else update
