"""torchrun that starts failed ranks again, but not those that ended for good.

    python launch/cluster/torchrun_elastic.py OPTIONS_OF_TORCHRUN launch/pretrain.py ...

torchrun itself starts the ranks again after every exit code but 0. A UserError (2: a wrong config,
a full disk, NaN under on_spike = "stop") would come again, and who asked for a stop (75: it is
saved) wants no start. With these codes this ends too. The rendezvous is left open: the same
command, given again, meets in the same store.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from deberta_ds.base.errors import EXIT_REQUEUE, EXIT_USER_ERROR

FINAL = (EXIT_USER_ERROR, EXIT_REQUEUE)
_monitor_workers = LocalElasticAgent._monitor_workers


def monitor_workers(agent, worker_group):
    """Return how the ranks of this host are, as torch's method does; a final end has no restart."""
    result = _monitor_workers(agent, worker_group)
    if any(failure.exitcode in FINAL for failure in result.failures.values()):
        agent._remaining_restarts = 0
        worker_group.spec.rdzv_handler.shutdown = lambda: True
    return result


def main() -> int:
    LocalElasticAgent._monitor_workers = monitor_workers
    try:
        run.main()
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        for code in FINAL:
            if code in codes:
                return code
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
