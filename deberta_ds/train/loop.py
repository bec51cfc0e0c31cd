"""The pretraining loop: resume, step, log, evaluate, save, stop.

The state of a run is its step: the learning rate, the sequences, their masks, the samples of the
generator and the dropout masks are functions of it, so a checkpoint holds neither the state of a
random number generator nor a data iterator.
"""

import math
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import EXIT_REQUEUE, UserError
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.run_record import RunRecord
from deberta_ds.checkpoint.save import point_best
from deberta_ds.cluster import dist, lock, signals
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config import batch_schedule, own_parts, run_config
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.batch import Batch
from deberta_ds.data.loader import build_loader
from deberta_ds.engine import ds_config, engine
from deberta_ds.engine.optim import learning_rate
from deberta_ds.evaluate.held_out import evaluate, score_minimal_pairs
from deberta_ds.objectives.build import objective_of
from deberta_ds.planner.gpus import peak_flops
from deberta_ds.train import best, meters
from deberta_ds.train.meters import (
    SHOWN_SHARE,
    Meters,
    SpeedMeter,
    TimeUse,
    WorkMeter,
    find_slowest,
)
from deberta_ds.train.saver import Saver
from deberta_ds.train.setup import Inputs, read_record, versions
from deberta_ds.train.start import Started, start
from deberta_ds.train.step import (
    MOST_IN_A_ROW,
    MOST_ROLLBACKS,
    BadStepError,
    SpikeRule,
    StepResult,
    train_step,
)


def pretrain(run: RunConfig, ds_values: dict, *, resume: str, place: str,
             origins: dict[str, str]) -> int:
    """Train `run` from its newest checkpoint (or step 0) to its end; call on every rank.

    Returns the exit code: 0, or EXIT_REQUEUE if a signal asked to stop.
    """
    stop_request = signals.listen()
    watchdog = Watchdog(run.out_dir, run.train.watchdog_seconds)
    with watchdog.watch(), start(run, ds_values, resume=resume, place=place, origins=origins,
                                 watchdog=watchdog) as started:
        stopped = _train(run, started, stop_request, watchdog)
    if stopped and dist.is_main():
        signals.record(EXIT_REQUEUE)
    return EXIT_REQUEUE if stopped else 0


def _train(run: RunConfig, started: Started, stop_request: signals.StopRequest,
           watchdog: Watchdog) -> bool:
    """Train; return whether a signal stopped the run before its end."""
    trainer = Trainer(run, started, stop_request, watchdog)
    event, detail = ("resume", f"from {started.found.path}") if started.record else (
        "start", "from step 0")
    trainer.log_event(event, detail, lost_seconds=started.lost_now, world_size=dist.world_size())
    try:
        stopped = trainer.run_to_end()
    except UserError as error:
        if isinstance(error, BadStepError):  # on every rank
            with trainer.meters.during("saves"):
                trainer.finish_save(wait=True)
        trainer.log_event("fail", str(error))
        raise
    with watchdog.patience():  # rank 0's trackers may take minutes
        dist.together(started.log.close)
    return stopped


def batches_of(run: RunConfig, inputs: Inputs, *, start: int, end: int) -> Iterator[list[Batch]]:
    """Return an iterator over this rank's micro-batches of each of the steps `start` .. `end` - 1.
    """
    stretches = batch_schedule.stretches(run.train, start, end)
    loader = build_loader(
        inputs.dataset, stretches=stretches, micro_batch_size=run.train.micro_batch_size,
        rank=dist.rank(), world_size=dist.world_size(), num_workers=run.data.workers)
    for one in stretches:
        count = batch_schedule.micro_batches(one.rows, dist.world_size(),
                                             run.train.micro_batch_size)
        for _ in range(one.steps):
            yield [next(loader) for _ in range(count)]


class Trainer:
    """The loop and what it carries from step to step."""

    def __init__(self, run: RunConfig, started: Started, stop_request: signals.StopRequest,
                 watchdog: Watchdog):
        self.run, self.begun_from = run, started.found.begun_from
        self.engine, self.log = started.engine, started.log
        record, self.inputs = started.record, started.inputs
        self.objective = objective_of(run)
        self.step = record.step if record else 0
        self.tokens_seen = record.tokens_seen if record else 0
        self.seconds_before = record.seconds if record else 0.0
        self.started = time.monotonic()
        peak = peak_flops(self.engine.device,
                          ds_config.product_precision(self.inputs.ds))
        speed = SpeedMeter(self.objective.flops_per_token(run), peak, dist.world_size(),
                           self._sequences_seen())
        time_use = TimeUse(record.time_use if record else {},
                           started.lost_before + started.lost_now)
        self.meters = Meters(speed, time_use, WorkMeter(self.engine.device), watchdog)
        self.hosts = dist.gather_objects(socket.gethostname())
        self.worked = [0.0] * len(self.hosts)  # seconds of each rank, since it was last said
        self.stop_request = stop_request
        stop_request.resumes_from = f"step {self.step:,}"
        self.spikes = SpikeRule(run.train.spike_sigmas, record.recent_losses if record else [])
        self.bad_steps_in_a_row = 0
        self.rollbacks: Counter[Path] = Counter()  # those that threw away good steps
        self.best, note = best.continued(run, record.best if record else {}, best.what_is_scored(
            run, self.inputs.held_out, self.inputs.pairs[0]))
        if note:
            self.log.info(note)
        self.best_metric = best.metric_of(run)
        self.saver = Saver(self.engine, run.out_dir, run.train, self.inputs.tokenizer.files)
        if self.best.value is not None and dist.is_main():  # a kill may have come between
            point_best(find.path_of(run.out_dir, self.best.step))
        watchdog.start_at(self.step)
        # Sums and counts of the good steps since the last logged line, over all ranks.
        self.since_line: dict[str, float] = record.since_line if record else {}

    def run_to_end(self) -> bool:
        """Train to the last step or train.stop_after; return whether a signal stopped it."""
        run, train = self.run, self.run.train
        end = min(train.steps, train.stop_after or train.steps)
        batches = batches_of(run, self.inputs, start=self.step, end=end)
        self.meters.speed.start()
        while self.step < end and not self._is_past_its_best():
            # ---------------------------------------------------------------- single training step
            rate = learning_rate(run.optim, self.step, train.steps)
            engine.set_learning_rate(self.engine, rate)
            with self.meters.work.loading():
                progress = self.step / max(1, train.steps - 1)
                micro = [replace(batch, run_fraction=progress) for batch in next(batches)]
            stop = bool(self.stop_request or self.log.problem)
            result = train_step(self.engine, micro, step=self.step, seed=train.seed,
                                ceiling=self.spikes.ceiling(), stop=stop,
                                raise_if_bad=train.on_spike == "stop", meter=self.meters.work)
            self.step += 1
            self._account(result)
            self.meters.watchdog.beat(self.step)
            # -------------------------------------------------------------------------------------
            if self.step % train.log_every == 0 or self.step == end:
                self._log_step(rate)
            is_best, ends = False, self.step == end or result.stop
            if self.step % train.eval_every == 0 or self.step == train.steps:
                is_best = self._evaluate()
                ends |= self._is_past_its_best()
                if not ends:  # the end says it, too
                    self._say_where_time_goes()
            self.finish_save(wait=False)
            if self.saver.is_due(self.step) or is_best or ends:
                self._save(is_best)
            if ends:
                with self.meters.during("saves"):
                    self.finish_save(wait=True)
                dist.together(self.log.check)
                self._say_where_time_goes()
            if result.stop and self.step < end:
                why = self.stop_request.reason or "another rank"
                self._log_end("stop", f"asked to by {why}; saved, exit code "
                              f"{EXIT_REQUEUE}: the same command goes on from here")
                return True
        if self.best.value is not None:
            self.log.info(f"best: {self.best}, kept as {run.out_dir}/{find.BEST}")
        if self._is_past_its_best():
            self._log_end("end", f"{train.patience} evaluations without a better score: "
                          f"{self.best}")
        elif end < train.steps:
            self._log_end("stop", f"train.stop_after = {end}; leave it out to go on")
        else:
            self._log_end("end", "all steps done")
        return False

    def _is_past_its_best(self) -> bool:
        """Return whether train.patience says that the run ends here."""
        return 0 < self.run.train.patience <= self.best.without

    def log_event(self, event: str, detail: str, **numbers: float) -> None:
        self.log.metrics({"kind": "event", "step": self.step, "seconds": self._seconds(),
                          "event": event, "detail": detail} | numbers)

    def _log_end(self, event: str, detail: str) -> None:
        """As `log_event`, with where the time of the whole run went."""
        self.log_event(event, detail, **self.meters.time_use.record(self._seconds()))

    def _sequences_seen(self) -> int:
        return batch_schedule.rows_before(self.run.train, self.step)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _account(self, result: StepResult) -> None:
        """Add a good step to the running sums; pass over a bad one as train.on_spike says."""
        if result.problem:
            self._pass_over(result.problem)
            return
        if not result.updated:
            self.log_event("overflow", "fp16 gradient overflow: update skipped, the loss scale "
                           "(one for both networks) was lowered",
                           loss_scale=float(self.engine.optimizer.loss_scale))
        self.bad_steps_in_a_row = 0
        self.spikes.accept(result.loss)
        self.tokens_seen += int(result.sums["tokens"])
        self.meters.speed.count(result.sums["tokens"])
        for name, value in result.sums.items():
            self.since_line[name] = self.since_line.get(name, 0.0) + value

    def _pass_over(self, problem: str) -> None:
        """Record a bad step's rows; under "rollback", return to the newest checkpoint's weights.

        The run goes on with the next step's rows either way, so a bad batch is never met again.
        """
        self.bad_steps_in_a_row += 1
        if self.bad_steps_in_a_row > MOST_IN_A_ROW:
            raise BadStepError(f"step {self.step}: {self.bad_steps_in_a_row} bad steps in a row "
                               f"({problem}); the run has diverged: resume from an older "
                               "checkpoint with a lower optim.learning_rate")
        place = {"first_sequence": batch_schedule.rows_before(self.run.train, self.step - 1),
                 "last_sequence": self._sequences_seen() - 1}
        if self.run.train.on_spike == "skip":
            self.log_event("skip", f"no update: {problem}", **place)
            return
        with self.meters.during("saves"):
            self.finish_save(wait=True)
        found = find.find(self.run.out_dir, "auto")
        if found.path is None:
            raise BadStepError(f"step {self.step}: {problem}, and there is no checkpoint to roll "
                               'back to; lower train.save_every or use train.on_spike = "skip"')
        self.rollbacks[found.path] += self.bad_steps_in_a_row == 1
        if self.rollbacks[found.path] > MOST_ROLLBACKS:
            raise BadStepError(
                f"step {self.step}: {problem}, and {MOST_ROLLBACKS} rollbacks to {found.path} did "
                "not get the run to its next checkpoint; resume from an older one with a lower "
                "optim.learning_rate, or lower train.save_every")
        with self.meters.during("saves"):
            find.load(self.engine, found.path)
        self.spikes = SpikeRule(self.run.train.spike_sigmas,
                                read_record(found.path).recent_losses)
        self.log_event("rollback", f"weights and optimizer of {found.path}: {problem}", **place)

    def _log_step(self, rate: float) -> None:
        """Write one line of means over the good steps since the last line, if there are any."""
        worked = dist.gather_number(self.meters.work.read(), self.engine.device)
        slowest = find_slowest(worked, self.hosts)
        self.worked = [a + b for a, b in zip(self.worked, worked, strict=True)]
        if not self.since_line:
            return
        total, self.since_line = self.since_line, {}
        norm = self.engine.get_global_grad_norm()
        record: dict[str, Any] = {
            "kind": "train", "step": self.step, "sequences_seen": self._sequences_seen(),
            "tokens_seen": self.tokens_seen, "seconds": self._seconds(),
            "epochs": self._sequences_seen() / sum(self.inputs.dataset.num_rows.values())}
        record |= self.meters.time_use.record(record["seconds"])
        record |= self.objective.means(self.run, total)
        norm = None if norm is None or not math.isfinite(norm) else float(norm)
        record |= {"learning_rate": rate, "grad_norm": norm}
        record |= self.meters.speed.read(self._sequences_seen(),
                                         batch_schedule.rows_of_run(self.run.train))
        record["peak_memory_bytes"] = meters.peak_memory_bytes(self.engine.device)
        if slowest:
            record["slowest_share"] = slowest.share
        self.log.metrics(record)

    def _say_where_time_goes(self) -> None:
        self.log.info(self.meters.time_use.line(self._seconds()))
        slowest, self.worked = find_slowest(self.worked, self.hosts), [0.0] * len(self.hosts)
        if slowest and slowest.share > SHOWN_SHARE:
            self.log.info(f"slowest: {slowest.name}, {slowest.share:.0%} behind the median")

    def _evaluate(self) -> bool:
        """Score the held-out rows; return whether train.best_metric has not been better before."""
        if not self.inputs.held_out:
            return False
        with self.meters.during("evaluations"):
            scores = evaluate(self.engine, self.objective, self.engine.device,
                              self.inputs.held_out, self.run.train.micro_batch_size,
                              self.run.evaluate.metrics)
            if self.inputs.pairs[0]:
                scores |= score_minimal_pairs(self.engine, self.objective, self.engine.device,
                                              *self.inputs.pairs, self.inputs.tokenizer)
        self.log.metrics({"kind": "eval", "step": self.step, "tokens_seen": self.tokens_seen,
                          "seconds": self._seconds()} | scores)
        return self.best_metric is not None and self.best.accept(
            self.best_metric, self.step, scores.get(self.run.train.best_metric))

    def _save(self, is_best: bool) -> None:
        run = self.run
        record = RunRecord(
            step=self.step, sequences_seen=self._sequences_seen(), tokens_seen=self.tokens_seen,
            seconds=self._seconds(), world_size=dist.world_size(), config=run_config.to_dict(run),
            deepspeed=self.inputs.ds,
            content_hashes=self.inputs.dataset.content_hashes | own_parts.digests(run),
            tokenizer_sha256=self.inputs.tokenizer.sha256, versions=versions(),
            recent_losses=self.spikes.state(), since_line=self.since_line,
            time_use=dict(self.meters.time_use.seconds), best=self.best.state(),
            begun_from=self.begun_from)
        with self.meters.during("saves"):
            self.finish_save(wait=True)
            dist.together(lambda: lock.check(run.out_dir) if dist.is_main() else None)
            self.saver.begin(record, is_best)
            self.finish_save(wait=not run.train.save_in_background)

    def finish_save(self, *, wait: bool) -> None:
        """Make the checkpoint whole that is being written, if all ranks are done with it."""
        path = self.saver.finish(wait=wait)
        if path:
            self.stop_request.resumes_from = f"step {find.step_of(path):,}"
            self.log_event("save", str(path))
