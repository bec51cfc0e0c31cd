"""Ranks as threads of the test's process: what they say to each other, in milliseconds."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deberta_ds.cluster import dist


def run(world_size: int, function: Callable[[int], object]) -> list:
    """Return function(rank) of every rank; the collectives of `dist` are theirs meanwhile."""
    here, slots = threading.local(), [None] * world_size
    meeting = threading.Barrier(world_size, timeout=30)

    def gather(value) -> list:
        slots[here.rank] = value
        meeting.wait()
        found = list(slots)
        meeting.wait()
        return found

    def work(rank: int):
        here.rank = rank
        try:
            return function(rank)
        except BaseException:
            meeting.abort()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world_size) as threads:
        for name, value in (("rank", lambda: here.rank), ("world_size", lambda: world_size),
                            ("barrier", meeting.wait), ("gather_objects", gather),
                            ("gather_to_main", lambda value: gather(value) if here.rank == 0
                             else gather(value) and None),
                            ("broadcast_object", lambda value: gather(value)[0])):
            patch.setattr(dist, name, value)
        done = [threads.submit(work, rank) for rank in range(world_size)]
        problems = [future.exception() for future in done]
    first = [x for x in problems if not isinstance(x, threading.BrokenBarrierError | None)]
    if any(problems):
        raise (first or problems)[0]
    return [future.result() for future in done]
