"""Before training, a rank that fails ends all ranks within seconds: none waits for one that left.

`dist.together` lets all ranks raise what one of them found. This is for what fails elsewhere, while
the others may be in any collective: the rank writes its message to the group's store, where a
thread of each rank looks twice a second.
"""

import os
import socket
import threading
import time
from contextlib import suppress

import torch.distributed as torch_dist

from deberta_ds.base.errors import EXIT_USER_ERROR

_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 1.0  # for a rank that has heard to end by itself
_WAIT_SECONDS = 4.0  # for all to hear: the store may be in this process
_FAILED, _KNOW, _FIRST = (f"deberta_ds/{name}" for name in ("failed", "know", "first"))


class Alarm:
    """The alarm of one rank, between `begin` and `end`."""

    def __init__(self):
        # A connection of its own: the group's may be waiting.
        self._store = torch_dist.distributed_c10d._get_default_store().clone()
        self._rank, self._num_ranks = torch_dist.get_rank(), torch_dist.get_world_size()
        self._ended, self.heard = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="alarm", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def sound(self, text: str, code: int) -> None:
        """Let the other ranks end with `code`, and wait until they know."""
        if self._ended.is_set() or self.heard.is_set():
            return
        self._ended.set()
        with suppress(RuntimeError):  # torch's: the store is gone
            self._store.set(_FAILED, f"{code} rank {self._rank} on {socket.gethostname()}: {text}")
            self._store.add(_KNOW, 1)
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _WAIT_SECONDS
        while self._store.add(_KNOW, 0) < self._num_ranks and time.monotonic() < until:
            time.sleep(0.05)

    def _listen(self) -> None:
        with suppress(RuntimeError):
            while not self._ended.wait(_LOOK_SECONDS):
                if self._store.check([_FAILED]):
                    self.heard.set()
                    self._store.add(_KNOW, 1)
                    time.sleep(_LEAVE_SECONDS)
                    if self._rank == 0:
                        self._wait()
                    os._exit(int(self._store.get(_FAILED).split()[0]))


_alarm: Alarm | None = None


def begin() -> None:
    """Listen from now on; call on every rank when the group is there."""
    global _alarm
    if _alarm is None and torch_dist.get_world_size() > 1:
        _alarm = Alarm()


def end() -> None:
    """Training begins, where the watchdog sees who fails, or the group ends."""
    global _alarm
    if _alarm:
        _alarm.end()
    _alarm = None


def is_first() -> bool:
    """Return whether no other rank has failed before; call it once, before `sound`."""
    with suppress(RuntimeError):
        return _alarm is None or _alarm._store.add(_FIRST, 1) == 1
    return True


def sound(text: str, code: int = EXIT_USER_ERROR) -> None:
    """Tell the other ranks, if they do not know, that this one fails, and all end with `code`."""
    if _alarm:
        _alarm.sound(text, code)


def was_heard() -> bool:
    """Return whether another rank has failed, so that an error of this one is its echo."""
    if _alarm is None:
        return False
    return _alarm.heard.wait(3 * _LOOK_SECONDS)
