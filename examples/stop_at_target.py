"""A callback: stop a run when its held-out loss has not improved for some evaluations.

    from examples.stop_early import StopEarly
    train("run.toml", callbacks=[StopEarly(patience=3)])

Called on the first rank with every train and eval record of metrics.jsonl, as a dict. It stops the
run as Ctrl-C does, on every rank: the step is finished, a checkpoint is saved, and `train` returns
with `finished = False`. With train.best_metric set, the result's `model()` is the best one.
"""

import signal


class StopEarly:
    def __init__(self, patience: int, metric: str = "loss", min_improvement: float = 0.0):
        self.patience, self.metric, self.min_improvement = patience, metric, min_improvement
        self.best, self.waited = float("inf"), 0

    def __call__(self, record: dict) -> None:
        if record["kind"] != "eval":
            return
        self.waited += 1
        if record[self.metric] < self.best - self.min_improvement:
            self.best, self.waited = record[self.metric], 0
        if self.waited == self.patience:
            print(f"{self.metric} was best at {self.best:.4f}, {self.waited} evaluations ago")
            signal.raise_signal(signal.SIGINT)
