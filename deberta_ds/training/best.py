"""Best checkpoint by a validation metric, and early stopping by patience."""

import itertools
import json
from dataclasses import replace

import xxhash

from deberta_ds.checkpoint.find import Best
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.rows import Row
from deberta_ds.objectives.base import MINIMAL_PAIRS, Metric
from deberta_ds.objectives.build import metrics_of
from deberta_ds.training.pairs import Pairs


def what_is_scored(run: RunConfig, held_out: dict[str, list[Row]], pairs: Pairs) -> str:
    """Return a checksum of what train.best_metric is a score of, wherever its files lie."""
    digest = xxhash.xxh3_128()
    if run.train.best_metric == MINIMAL_PAIRS.key:
        digest.update(json.dumps(pairs).encode())
    else:
        for row in itertools.chain.from_iterable(held_out.values()):
            digest.update(row.input_ids.tobytes() + row.labels.tobytes())
    return digest.hexdigest()


def continued(run: RunConfig, saved: Best, scored: str) -> tuple[Best, str]:
    """Return the `saved` best of a checkpoint and "", or a new one where it is of another score.

    Also of the same score of other rows than now, `scored`, whose value would never be reached, or
    always; that is worth a line of the log.
    """
    new = Best(run.train.best_metric, scored=scored)
    if saved.score != run.train.best_metric:
        return new, ""
    if saved.value is None or saved.scored == scored:
        return replace(saved, scored=scored), ""
    return new, ("WARNING: the held-out sequences of train.best_metric have changed: the best so "
                 f"far, {saved}, is discarded")


def metric_of(run: RunConfig) -> Metric | None:
    """Return the metric that `train.best_metric` names, None if it is no score of this run."""
    key, _, corpus = run.train.best_metric.partition("/")  # of one of several held-out corpora
    corpora = run.data.heldout_corpora
    if corpus and (len(corpora) < 2 or corpus not in corpora):
        return None
    has_pairs = run.evaluate.minimal_pairs and not corpus  # which are of all corpora
    return next((metric for metric in metrics_of(run) if metric.key == key
                 and (metric is not MINIMAL_PAIRS or has_pairs)), None)


def problems(run: RunConfig) -> list[str]:
    """Return what is wrong with [train] best and patience of a run."""
    train = run.train
    if not train.best_metric:
        return ["train.patience counts evaluations without a better train.best_metric; name a "
                "score there"] if train.patience else []
    found = []
    if not run.data.heldout:
        found.append(f"train.best_metric = {train.best_metric!r}: needs evaluations, and without "
                     "data.heldout there are none; set data.heldout, or leave train.best_metric "
                     "out")
    if metric_of(run) is None:
        known = [metric.key for metric in metrics_of(run) if metric is not MINIMAL_PAIRS]
        found.append(f"train.best_metric = {train.best_metric!r}: is not a score of this run; use "
                     f"one of {', '.join(known)} (of one of several corpora as roc_auc/NAME), or "
                     "minimal_pairs with evaluate.minimal_pairs")
    return found
