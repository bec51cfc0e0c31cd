"""A file system that is soon full: a small tmpfs, where this machine allows a mount."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount `size` ("64k") at a new directory; yields a function that changes the size.

    Skips the test where that is not allowed: root of a container may lack CAP_SYS_ADMIN.
    """
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")

    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", str(place)], check=True)
