"""Start a run: join the process group, lock out_dir, open the inputs, build the engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deberta_ds.base.errors import UserError, listed
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.run_record import RunRecord, read_run_record
from deberta_ds.checkpoint.save import set_aside
from deberta_ds.cluster import dist, lock, signals
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine import engine
from deberta_ds.engine.layout import CheckpointError
from deberta_ds.engine.state import check_restorable
from deberta_ds.objectives.base import MINIMAL_PAIRS, own_metrics
from deberta_ds.objectives.build import held_parameters, objective_of
from deberta_ds.release.initialize import initial_tensors, shape_differences
from deberta_ds.release.vocabulary import has_other_tokens
from deberta_ds.tracking import trackers
from deberta_ds.tracking.log import RunLog
from deberta_ds.training.check import changed_values
from deberta_ds.training.meters import lost_seconds
from deberta_ds.training.setup import Inputs, describe, join_group, open_run, write_config


@dataclass(frozen=True)
class Started:
    """A run that is ready for its next step."""

    found: find.Found
    record: RunRecord | None  # run.json of the checkpoint that was loaded; None at step 0
    inputs: Inputs
    log: RunLog
    stop_request: signals.StopRequest
    engine: Any  # DeepSpeed's, which has no types
    lost_before: float  # seconds that earlier starts took, and the steps that they lost
    lost_now: float  # the same of this start


@contextmanager
def start(run: RunConfig, ds_values: dict, *, resume: str, place: str, origins: dict[str, str],
          watchdog: Watchdog, callbacks: Sequence[Callable[[dict], None]] = ()
          ) -> Iterator[Started]:
    """Yield a started run, and hold its out_dir until the end; call on every rank.

    Raises UserError, on every rank.
    """
    warnings = join_group(run, ds_values, place)
    stop_request = signals.listen()  # before, a signal ends the process: there is nothing to save
    with lock.held(run.out_dir):
        watchdog.join()
        found, record, inputs = open_run(run, ds_values, place, resume)
        log = dist.together(lambda: RunLog(
            run.out_dir, dist.is_main(), metrics=(*objective_of(run).METRICS, MINIMAL_PAIRS,
                                                  *own_metrics(run.evaluate.metrics)),
            total_steps=run.train.steps, track=[*trackers.chosen(run.log),
                                               *map(trackers.callback, callbacks)]))
        for line in (*describe(run, inputs, origins), *warnings, *found.warnings()):
            log.info(line)
        dist.together(lambda: write_config(run, inputs, origins))
        model_engine = build(run, inputs, record, log.info)
        if record:
            _restore(run, inputs, found, record, model_engine, log)
        before, now = dist.together(lambda: lost_seconds(log.path, record))
        dist.together(lambda: log.truncate(record.step if record else 0))
        yield Started(found, record, inputs, log, stop_request, model_engine, before, now)


def build(run: RunConfig, inputs: Inputs, record: RunRecord | None, say: Callable[[str], None]):
    """Return the engine of a run, with the weights of `[init]` unless it goes on from `record`."""
    tensors, notes = ({}, []) if record else first_weights(run)
    for line in notes:
        say(line)
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size, tensors,
                                                   say)
    check_restorable(model_engine)
    if run.init.moments and not record:
        say(f"init: optimizer state of {_take_moments(run, model_engine)}")
    return model_engine


def _take_moments(run: RunConfig, model_engine) -> Path:
    """Load the source of [init] with its optimizer's state, bit for bit; return the checkpoint."""
    def opened() -> Path:
        try:
            path = find.newest(run.init.source)
            saved = read_run_record(path).run(path)
        except CheckpointError as error:
            raise CheckpointError(f"init.moments = true needs a checkpoint of this project, with "
                                  f"its optimizer's state: {error}; or leave init.moments out"
                                  ) from None
        if saved.optim.name != run.optim.name:
            raise CheckpointError(f"init.moments = true: {path} has the state of optim.name = "
                                  f"{saved.optim.name!r}, the run has {run.optim.name!r}; set it "
                                  "as there, or leave init.moments out")
        others = shape_differences(run.model, saved.model)
        if has_other_tokens(run.init.source, run.data.tokenizer):
            others.append(f"data.tokenizer = {run.data.tokenizer} (source: other tokens)")
        names = [name for name, _ in model_engine.module.named_parameters()]
        if held_parameters(saved, names)[0] - held_parameters(run, names)[0]:
            others.append("train.freeze (source: more is frozen, and has no state)")
        if others:  # the tensors of the source would take the place of what [init] made of them
            raise CheckpointError(f"init.moments = true: {path} is of another model: "
                                  f"{'; '.join(others)}; leave init.moments out")
        return path

    path = dist.broadcast_object(dist.together(opened))  # a run that goes on may have saved since
    if problems := find.problems_of(path):
        raise CheckpointError(f"{path}: not a whole checkpoint: {listed(problems)}")
    try:
        find.load(model_engine, path, is_other_run=True)
    except UserError as error:
        raise CheckpointError(f"init.moments = true: {error}; leave init.moments out") from None
    return path


def _restore(run: RunConfig, inputs: Inputs, found: find.Found, record: RunRecord,
             model_engine, log: RunLog) -> None:
    assert found.path is not None  # where `record` is from
    find.load(model_engine, found.path)
    if change := find.layout_changes(record, inputs.ds):
        log.info(f"resumed in another layout: {change}")
    dropout = max(run.model.hidden_dropout, run.model.attention_dropout)
    if dropout and "cuda_graph" not in record.config["train"]:
        log.info("the checkpoint is of version 0.2.0, whose dropout drops other elements: the run "
                 "goes on from it, but not bit for bit as 0.2.0 would")
    for line in changed_values(run, record):
        log.info(f"changed since the checkpoint: {line}")
    for line in dist.together(lambda: set_aside(run.out_dir, record.step)
                              if dist.is_main() else []):
        log.info(line)


def first_weights(run: RunConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Return what `[init] from` gives, on rank 0; DeepSpeed hands rank 0's weights to the others.

    A resumed run does not need it.
    """
    if not (run.init.source or run.init.generator):
        return {}, []
    return dist.together(lambda: initial_tensors(run) if dist.is_main() else ({}, []))
