"""What a rank leaves behind when the watchdog ends it: its stacks, and what NCCL was doing."""

import faulthandler
import os
import sys
from pathlib import Path

_NCCL_RECORDS = "2000"  # collectives that are remembered, a few hundred bytes each


def keep_nccl_records() -> None:
    """Have NCCL's flight recorder remember collectives; before the process group is made."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # the new name, the old
        os.environ.setdefault(name, _NCCL_RECORDS)


def show() -> None:
    """Print the stacks of all threads to stderr."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def write(directory: Path, rank: int) -> None:
    """Write DIRECTORY/rank-00000.stack and, under NCCL, .nccl (for torch's fr_trace)."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"rank-{rank:05d}.stack", "w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
    if records := _nccl_records():
        (directory / f"rank-{rank:05d}.nccl").write_bytes(records)


def _nccl_records() -> bytes:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return b""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump else b""
