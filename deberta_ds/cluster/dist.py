"""Ranks and collectives: the only module that talks to torch.distributed.

Everything also works in a single process that never initialized a process group.
"""

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from deberta_ds.base.errors import (
    EXIT_USER_ERROR,
    ConfigError,
    UserError,
    interrupt,
    listed,
    tell,
    user_message,
)
from deberta_ds.base.files import flatten

_left_gloo = False


def is_distributed() -> bool:
    """Return whether there is a group of ranks."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """Return this rank, 0 without a group."""
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a group."""
    return torch_dist.get_world_size() if is_distributed() else 1


def local_rank() -> int:
    """Return the rank within this host, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def barrier() -> None:
    """Wait until every rank is here."""
    if is_distributed():  # NCCL warns where it must guess the device
        on_gpu = torch_dist.get_backend() == "nccl"
        torch_dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks; the input is left alone."""
    values = values.clone()
    if is_distributed():
        all_reduce(values)
    return values


def gather_number(value: float, device) -> list[float]:
    """Return every rank's number in rank order, on all ranks; 8 bytes a rank travel."""
    if not is_distributed():
        return [value]
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    values = mine.new_empty(world_size())
    torch_dist.all_gather_into_tensor(values, mine)
    return values.tolist()


def gather_objects(value) -> list:
    """Return every rank's picklable `value`, in rank order, on all ranks."""
    if not is_distributed():
        return [value]
    values = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


def gather_to_main(value) -> list | None:
    """Return every rank's picklable `value`, in rank order, on rank 0; None elsewhere."""
    if not is_distributed():
        return [value]
    values = [None] * world_size() if is_main() else None
    torch_dist.gather_object(value, values)
    return values


def broadcast_object(value):
    """Return rank 0's picklable `value` on every rank."""
    if not is_distributed():
        return value
    values = [value]
    torch_dist.broadcast_object_list(values, src=0)
    return values[0]


def from_main(function):
    """Return rank 0's picklable `function()` on every rank; the others do not call it."""
    return broadcast_object(function() if is_main() else None)


def group_of(groups: list[list[int]]):
    """Return this rank's process group among `groups` of ranks; call on every rank."""
    made = [torch_dist.new_group(ranks) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if rank() in ranks), None)


def swap(values: Tensor, partner: int) -> None:
    """Send `values` to another rank and take as many from it, both at once."""
    theirs = torch.empty_like(values)
    work = torch_dist.batch_isend_irecv([torch_dist.P2POp(torch_dist.isend, values, partner),
                                         torch_dist.P2POp(torch_dist.irecv, theirs, partner)])
    for one in work:
        one.wait()


def all_reduce(values: Tensor, group=None) -> None:
    """Replace `values` by their sum over the ranks of `group`, or over all of them."""
    torch_dist.all_reduce(values, group=group)


def together(function):
    """Return `function()`; if the user's doing stops any rank, raise that UserError on every rank,
    with the name of the rank unless all say the same.

    Without this, the ranks that were spared would wait in their next collective for ever.
    """
    value, problem = None, None
    try:
        value = function()
    except Exception as error:
        problem = user_message(error)
        if problem is None:
            raise
    problems = gather_objects(problem and (problem, socket.gethostname()))
    if any(problems):
        number = next(number for number, one in enumerate(problems) if one)
        text, host = problems[number]
        alike = all(one and one[0] == text for one in problems)
        common = UserError(text if alike or number == 0 else f"rank {number} on {host}: {text}")
        common.on_every_rank = True
        raise common
    return value


def attended(function, look):
    """Return rank 0's `function()`, which a thread computes, and on all ranks `look()` once a
    second meanwhile: what that raises ends the wait, and the thread with the process.
    """
    task: Future = Future()

    def work() -> None:
        try:
            task.set_result(function())
        except BaseException as error:  # SystemExit, too
            task.set_exception(error)

    if is_main():
        threading.Thread(target=work, daemon=True).start()
    while not from_main(lambda: bool(wait([task], 1.0).done)):
        look()
    return broadcast_object(together(lambda: task.result() if is_main() else None))


def on_main(function) -> None:
    """Call `function` on rank 0; a UserError of it is raised on every rank, as by `together`."""
    together(lambda: function() if is_main() else None)


def destroy() -> None:
    """Leave the process group, all ranks together."""
    global _left_gloo
    if is_distributed():
        barrier()
        end_alarm()
        _left_gloo = has_gloo_threads()
        torch_dist.destroy_process_group()


def has_gloo_threads() -> bool:
    """Return whether gloo's threads may be at work: they outlive the group while anyone holds it.

    Of a rank alone they are not, and it may be part of another program.
    """
    return _left_gloo or world_size() > 1 and torch_dist.get_backend() == "gloo"


def check_alike(values: dict[str, Any]) -> None:
    """Raise ConfigError with the differences, on every rank, unless all have the same `values`."""
    text = json.dumps(values, sort_keys=True, default=str)
    if len(set(gather_objects(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    mine, first = (flatten(json.loads(one)) for one in (text, broadcast_object(text)))
    lines = [f"rank {rank()} on {socket.gethostname()}: {key} = {mine.get(key, 'not set')!r}, "
             f"on rank 0 {first.get(key, 'not set')!r}"
             for key in sorted(mine.keys() | first.keys()) if mine.get(key) != first.get(key)]
    found = [line for part in gather_objects(lines) for line in part]
    raise ConfigError("the ranks of this job are not one run: another job may use its port, or a "
                      "node has other files or options. Start all ranks with the same: "
                      + listed(found))


WAIT_SECONDS = 20.0  # for other ranks, before it is said


@contextmanager
def saying_who_waits() -> Iterator[None]:
    """Say after WAIT_SECONDS what this rank waits for; meanwhile Ctrl-C ends it at once.

    Python's own handler would have to wait as well: the waiting is torch's.
    """
    number, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    whom = "the other ranks" if number == "0" else "rank 0"
    timer = threading.Timer(WAIT_SECONDS, tell, [
        f"rank {number} of {size} waits for {whom} at {os.environ.get('MASTER_ADDR')}:"
        f"{os.environ.get('MASTER_PORT')} (from MASTER_ADDR and MASTER_PORT; RANK and WORLD_SIZE "
        "say which rank this is). If no other rank was started, unset these variables"])
    timer.daemon = True
    timer.start()
    before = signal.getsignal(signal.SIGINT)
    own = threading.current_thread() is threading.main_thread() and before in (
        signal.default_int_handler, interrupt)
    if own:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        timer.cancel()
        if own:
            signal.signal(signal.SIGINT, before)


# Before training, a rank that fails ends all ranks within seconds: none waits for one that left.
#
# `together` lets all ranks raise what one of them found. This is for what fails elsewhere, while
# the others may be in any collective: the rank writes its message to the group's store, where a
# thread of each rank looks twice a second.
_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 1.0  # for a rank that has heard to end by itself
_WAIT_SECONDS = 4.0  # for all to hear: the store may be in this process
_FAILED, _KNOW, _FIRST = (f"deberta_ds/{name}" for name in ("failed", "know", "first"))


class Alarm:
    """What one rank hears and says of failures, between `begin_alarm` and `end_alarm`."""

    def __init__(self):
        # A connection of its own: the group's may be waiting.
        self.store = torch_dist.distributed_c10d._get_default_store().clone()
        self._rank, self._num_ranks = torch_dist.get_rank(), torch_dist.get_world_size()
        self.ended, self.heard = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="alarm", daemon=True).start()

    def sound(self, text: str, code: int) -> None:
        """Let the other ranks end with `code`, and wait until they know."""
        if self.ended.is_set() or self.heard.is_set():
            return
        self.ended.set()
        with suppress(RuntimeError):  # torch's: the store is gone
            self.store.set(_FAILED, f"{code} rank {self._rank} on {socket.gethostname()}: {text}")
            self.store.add(_KNOW, 1)
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _WAIT_SECONDS
        while self.store.add(_KNOW, 0) < self._num_ranks and time.monotonic() < until:
            time.sleep(0.05)

    def _listen(self) -> None:
        with suppress(RuntimeError):
            while not self.ended.wait(_LOOK_SECONDS):
                if self.store.check([_FAILED]):
                    self.heard.set()
                    self.store.add(_KNOW, 1)
                    time.sleep(_LEAVE_SECONDS)
                    if self._rank == 0:
                        self._wait()
                    os._exit(int(self.store.get(_FAILED).split()[0]))


_alarm: Alarm | None = None


def begin_alarm() -> None:
    """Listen from now on; call on every rank when the group is there."""
    global _alarm
    if _alarm is None and torch_dist.get_world_size() > 1:
        _alarm = Alarm()


def end_alarm() -> None:
    """Training begins, where the watchdog sees who fails, or the group ends."""
    global _alarm
    if _alarm:
        _alarm.ended.set()
    _alarm = None


def is_first_to_fail() -> bool:
    """Return whether no other rank has failed before; call it once, before `sound_alarm`."""
    with suppress(RuntimeError):
        return _alarm is None or _alarm.store.add(_FIRST, 1) == 1
    return True


def sound_alarm(text: str, code: int = EXIT_USER_ERROR) -> None:
    """Tell the other ranks, if they do not know, that this one fails, and all end with `code`."""
    if _alarm:
        _alarm.sound(text, code)


def heard_alarm() -> bool:
    """Return whether another rank has failed, so that an error of this one is its echo."""
    return _alarm is not None and _alarm.heard.wait(3 * _LOOK_SECONDS)
