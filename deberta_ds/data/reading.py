"""Reading a few bytes at a known place of many files, from many threads, with few descriptors.

Not by memory maps: each would keep a descriptor, touch 128 KiB around a row of 1 KB, and turn an
error of the file system into a killed process. One cache of open files serves all corpora of a
process; it leaves some of the limit of descriptors, which it raises first as far as allowed.
"""

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable
from functools import cache, lru_cache

from deberta_ds.base.errors import UserError

_MOST_DESCRIPTORS = 1 << 16
_lock = threading.Lock()


class OpenFile:
    """A descriptor that is closed when nobody uses it any more, whatever the cache has dropped."""

    def __init__(self, path: str):
        # O_NONBLOCK: to open a pipe would wait for who writes to it; files know nothing of it.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise UserError(f"{path}: is no file but a pipe, a device or a directory; run "
                            "data_prep/verify.py and copy the damaged file again")
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self, close=os.close):
        if hasattr(self, "descriptor"):
            close(self.descriptor)


def read_bytes(path: str, offset: int, count: int) -> bytes:
    """Return `count` bytes of the file from `offset`; UserError if it has fewer or cannot be read.
    """
    try:
        file = _open(path)
        data = os.pread(file.descriptor, count, offset)
        while len(data) < count:  # a signal, or a network file system
            more = os.pread(file.descriptor, count - len(data), offset + len(data))
            if not more:
                raise UserError(f"{path}: ends at byte {offset + len(data)}, cut short; run "
                                "data_prep/verify.py and copy the damaged file again")
            data += more
    except OSError as error:
        remedy = "run data_prep/verify.py and copy the damaged file again"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit of open files (ulimit -n)"
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    return data


def _open(path: str) -> OpenFile:
    try:
        return kept_open()(path)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    kept_open().cache_clear()  # others have taken what was left: give ours back and try once more
    return kept_open()(path)


@cache
def kept_open():
    """Return `OpenFile` with a cache of this process's open files."""
    return lru_cache(most_open_files())(OpenFile)


@cache
def most_open_files() -> int:
    """Return how many files the cache keeps open: most of the limit, which is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return limit // 2 if limit < 1024 else limit - max(limit // 8, 256)


class SmallFiles:
    """Files of at most 64 KiB, read whole and kept from then on, as long as the process has room
    for them; of all others, the part that is asked for. Nothing that is kept makes way for others:
    rows come in a random order.
    """

    most_bytes = 1 << 16
    room_bytes = 1 << 25  # of all instances together

    def __init__(self, read: Callable[[str, int, int], bytes]):
        """`read`: as `read_bytes`."""
        self._read = read
        self._kept: dict[str, bytes] = {}

    def part(self, path: str, size: int, offset: int, count: int) -> tuple[bytes, int]:
        """Return (bytes, place of byte `offset` of the file among them); errors as of `read`."""
        data = self._kept.get(path)
        if data is None:
            if size > min(self.most_bytes, SmallFiles.room_bytes):
                return self._read(path, offset, count), 0
            data = self._read(path, 0, size)
            with _lock:
                SmallFiles.room_bytes -= size if path not in self._kept else 0
                self._kept[path] = data
        return data, offset

    def __del__(self):
        type(self).room_bytes += sum(map(len, self._kept.values()))
