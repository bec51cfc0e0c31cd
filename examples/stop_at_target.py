"""A callback: stop a run once a held-out loss has reached a target, and say what that took.

    from examples.stop_at_target import StopAtTarget
    train("run.toml", callbacks=[StopAtTarget("masked_loss", 2.5)])

Called on the first rank with every train and eval record of metrics.jsonl, as a dict. It stops the
run as a signal does, on every rank: the step is finished, a checkpoint is saved, and `train`
returns with `finished = False`. (SIGUSR1, because shells let their background jobs ignore SIGINT.
To stop a run that no longer improves, set train.patience.)
"""

import signal


class StopAtTarget:
    def __init__(self, metric: str, target: float):
        self.metric, self.target = metric, target

    def __call__(self, record: dict) -> None:
        if record["kind"] == "eval" and record[self.metric] <= self.target:
            print(f"{self.metric} = {record[self.metric]:.4f} at step {record['step']:,}")
            signal.raise_signal(signal.SIGUSR1)
