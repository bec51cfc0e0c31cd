"""The best evaluation of a run so far: its checkpoint is kept, and when it is old the run stops."""

import math
from dataclasses import asdict, dataclass

from deberta_ds.config import RunConfig
from deberta_ds.objectives.base import MINIMAL_PAIRS, Metric
from deberta_ds.objectives.build import objective_of


@dataclass
class Best:
    """What `train.best` has come to; a part of every checkpoint's run.json."""

    score: str  # a metric's key; empty: none is looked at
    value: float | None = None
    step: int = 0
    without: int = 0  # evaluations since then, none of them better

    def accept(self, metric: Metric, step: int, value: float | None) -> bool:
        """Take note of an evaluation; return whether it is the best one so far."""
        if value is not None and math.isfinite(value) and (
                self.value is None or metric.is_better(value, self.value)):
            self.value, self.step, self.without = value, step, 0
            return True
        self.without += 1
        return False

    def state(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.score} = {self.value:.6g} at step {self.step:,}" if self.value is not None \
            else f"{self.score} was never measured"


def continued(run: RunConfig, record: dict | None) -> Best:
    """Return the best of a checkpoint's run.json, or a new one where it is of another score."""
    saved = (record or {}).get("best") or {}
    return Best(**saved) if saved.get("score") == run.train.best else Best(run.train.best)


def metric_of(run: RunConfig) -> Metric | None:
    """Return the metric that `train.best` names, None if it is no score of this run."""
    key, _, corpus = run.train.best.partition("/")  # of one of several held-out corpora
    corpora = run.data.eval_corpora
    if corpus and (len(corpora) < 2 or corpus not in corpora):
        return None
    of_all = [MINIMAL_PAIRS] if run.evaluate.minimal_pairs and not corpus else []
    metrics = [*objective_of(run).METRICS, *of_all]
    return next((metric for metric in metrics if metric.key == key), None)


def problems(run: RunConfig) -> list[str]:
    """Return what is wrong with [train] best and patience of a run."""
    train = run.train
    if not train.best:
        return ["train.patience counts evaluations without a better train.best; name a score "
                "there"] if train.patience else []
    found = []
    if not run.data.eval:
        found.append(f"train.best = {train.best!r}: is a score of evaluations, and without "
                     "data.eval there are none; name a held-out corpus, or leave it out")
    if metric_of(run) is None:
        known = [metric.key for metric in objective_of(run).METRICS]
        found.append(f"train.best = {train.best!r}: is no score of this run; one of "
                     f"{', '.join(known)} (of one of several corpora as roc_auc/NAME), or "
                     "minimal_pairs with evaluate.minimal_pairs")
    return found
