"""How often to save, and what share of a cluster's time goes into steps that count.

Young's interval (CACM 17(9), 1974; Daly, FGCS 22, 2006): a job that fails every M seconds on
average and stands still for d seconds in a save loses d / t + (t / 2 + r) / M of its time when it
saves every t seconds and needs r to start again; the least at t = sqrt(2 d M).
"""

import math

# Llama 3 (arXiv 2407.21783, section 3.3.4): 419 interruptions in 54 days on 16,384 H100.
HOURS_OF_A_GPU_BETWEEN_FAILURES = 50_000
COPY_BYTES_PER_SECOND = 2e9  # of a rank's state to host memory: pageable, with nothing next to it
STATE_BYTES = 12  # a parameter: fp32 weights and both moments
LEAST_SECONDS = 600.0  # below, nothing is gained and a shared file system has work all the time
_MOST_WRITING = 0.1  # share of the time in which a save is being written
RESTART_SECONDS = 300.0  # the watchdog, the launcher, start-up, resume


def seconds_between_failures(ranks: int) -> float:
    """Return the mean time between two failures of a job."""
    return 3600.0 * HOURS_OF_A_GPU_BETWEEN_FAILURES / ranks


def pause_of_copy(parameters: int, ranks: int) -> float:
    """Return the seconds in which a rank copies its part of the state."""
    return STATE_BYTES * parameters / ranks / COPY_BYTES_PER_SECOND


def save_interval(ranks: int, pause_seconds: float, write_seconds: float = 0.0) -> float:
    """Return the seconds after which a job of `ranks` best saves again.

    `pause_seconds`: training stands still; `write_seconds`: until the save is whole.
    """
    young = math.sqrt(2 * pause_seconds * seconds_between_failures(ranks))
    return max(young, LEAST_SECONDS, write_seconds / _MOST_WRITING)


def lost_share(ranks: int, pause_seconds: float, interval: float) -> float:
    """Return the share of the time that saves, repeated steps and restarts take."""
    failures = (interval / 2 + RESTART_SECONDS) / seconds_between_failures(ranks)
    return pause_seconds / interval + failures
