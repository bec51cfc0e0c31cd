"""What a run runs on, for its log and its page: hardware, commit of the source, memory."""

import platform
import re
import resource
import subprocess
from pathlib import Path

import torch


def hardware(device: torch.device) -> str:
    """Return the name of one rank's processor or GPU."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    name = re.sub(r"\((R|TM)\)| Processor\b| CPU\b", "", names[0]) if names else ""
    return " ".join(name.split()) if names else platform.processor() or platform.machine()


def commit() -> str:
    """Return the commit this package was checked out at ("+" if files changed); empty if none."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *words], text=True,
                              capture_output=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        package = Path(__file__).resolve().parents[1].relative_to(git("rev-parse",
                                                                      "--show-toplevel"))
        if not git("ls-files", f":/{package}/__init__.py"):  # somebody else's repository
            return ""
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this rank has held: on its GPU, or resident on a CPU."""
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
