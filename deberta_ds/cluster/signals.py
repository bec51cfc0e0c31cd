"""Pre-emption: a signal asks for a checkpoint at the next step boundary and an exit that requeues.

SIGTERM is what schedulers and spot instances send before they take a machine, SIGUSR1 what Slurm
sends ahead of the time limit (`#SBATCH --signal=USR1@300`). The handler only raises a flag; the
loop adds the flag to the step's own collective, so that all ranks stop after the same step even if
only one of them was told.
"""

import signal

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run the same command again

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self):
        self.signal_name = ""

    def __bool__(self) -> bool:
        return bool(self.signal_name)

    def _receive(self, number: int, _frame) -> None:
        self.signal_name = signal.Signals(number).name


def listen() -> StopRequest:
    """Return a request that becomes true when SIGTERM or SIGUSR1 arrives; main thread only.

    Loader processes forked later inherit the handler. That is wanted: a signal to the whole job
    must not end them before the last step is made.
    """
    request = StopRequest()
    for number in _SIGNALS:
        signal.signal(number, request._receive)
    return request
