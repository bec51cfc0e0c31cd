"""The pretraining loop: resume, step, log, evaluate, save, stop.

The state of a run is its step: the learning rate, the sequences, their masks, the samples of the
generator and the dropout masks are functions of it, so a checkpoint holds neither the state of a
random number generator nor a data iterator.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from deberta_ds.base import user_code
from deberta_ds.base.errors import EXIT_REQUEUE, UserError
from deberta_ds.base.files import ReadFile
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.find import BEST, Best, RunRecord
from deberta_ds.checkpoint.save import Save, begin_save, finish_save, is_permanent, point_best
from deberta_ds.checkpoint.upload import Uploads
from deberta_ds.cluster import dist, lock, signals
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config.optim import learning_rate
from deberta_ds.config.run_config import PROFILE_AFTER, RunConfig, TrainConfig
from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.engine.state import base_optimizer, read_loss_scale
from deberta_ds.model.backbone import count_parameters
from deberta_ds.objectives.build import objective_of
from deberta_ds.tracking.log import read_metrics
from deberta_ds.training import best
from deberta_ds.training.held_out import evaluate, score_minimal_pairs
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.journal import Journal
from deberta_ds.training.meters import pause_of_copy, save_interval
from deberta_ds.training.start import Started, start
from deberta_ds.training.step import BadStepError, BadSteps, StepResult, train_step


def pretrain(run: RunConfig, ds: DeepSpeedConfig, *, resume: str, place: str,
             origins: dict[str, str], callbacks: Sequence[Callable[[dict], None]] = ()) -> int:
    """Train `run` from its newest checkpoint (or step 0) to its end; call on every rank.

    Each of `callbacks` gets every train and eval record, on rank 0.
    Returns the exit code: 0, or EXIT_REQUEUE if a signal asked to stop.
    """
    watchdog = Watchdog(run.out_dir, run.train.watchdog_seconds)
    with watchdog.watch(), start(run, ds, resume=resume, place=place, origins=origins,
                                 watchdog=watchdog, callbacks=callbacks) as started:
        stopped = _train(run, started, watchdog)
    return EXIT_REQUEUE if stopped else 0


def _train(run: RunConfig, started: Started, watchdog: Watchdog) -> bool:
    """Train; return whether a signal stopped the run before its end."""
    trainer = Trainer(run, started, watchdog)
    event, detail = ("resume", f"from {started.found.path}") if started.record else (
        "start", "from step 0")
    trainer.journal.event(event, detail, lost_seconds=started.lost_now, kernels=started.kernels,
                          world_size=dist.world_size())
    try:
        with _profiled(run) as trainer.after_step:
            stopped = trainer.run_to_end()
    except UserError as error:
        if isinstance(error, BadStepError):  # on every rank
            with trainer.meters.during("saves"):
                trainer.finish_save(wait=True)
            trainer.saver.finish_uploads(watchdog.patience)
        trainer.journal.event("fail", str(error))
        raise
    with watchdog.patience():  # rank 0's trackers may take minutes
        dist.together(started.log.close)
    if stopped and dist.is_main():  # before what a launcher may cut short
        signals.record(EXIT_REQUEUE)
    if trainer.saver.finish_uploads(watchdog.patience, lambda: bool(
            not stopped and started.stop_request)):
        signals.record(EXIT_REQUEUE)
        return True
    return stopped


@contextmanager
def _profiled(run: RunConfig) -> Iterator[Callable[[], None]]:
    """Yield what is called after each step, and record train.profile_steps steps on the way."""
    if not run.train.profile_steps or dist.rank() not in run.train.profile_ranks:
        yield lambda: None
        return
    traces = Path(run.out_dir) / "traces"
    traces.mkdir(exist_ok=True)
    plan = torch.profiler.schedule(wait=PROFILE_AFTER - 1, warmup=1, repeat=1,
                                   active=run.train.profile_steps)
    file = traces / f"start-{time.strftime('%Y%m%d-%H%M%S')}-rank-{dist.rank()}.json.gz"
    with torch.profiler.profile(schedule=plan, on_trace_ready=lambda recorded:
                                recorded.export_chrome_trace(str(file))) as profiler:
        yield profiler.step


class Saver:
    """The checkpoints of one run: when they are due, and those written in the background.

    Every decision is equal on all ranks: steps are, and where time decides it is rank 0's clock.
    While a checkpoint is in the background, each step ends with one small all-reduce, so that all
    ranks see at the same step that every file is on the disk, and finish it together.
    """

    def __init__(self, engine, out_dir: str | Path, train: TrainConfig,
                 tokenizer: Mapping[str, ReadFile], say: Callable[[str], None]):
        self.uploads = dist.together(lambda: Uploads(out_dir, train, say)
                                     if train.upload and dist.is_main() else None)
        if self.uploads:  # what was saved before a kill
            self.uploads.begin_round()
        self.engine, self.out_dir, self.train, self.tokenizer = engine, out_dir, train, tokenizer
        self.begun_at = time.monotonic()
        self.in_background: Save | None = None
        self.pause_seconds = self.write_seconds = 0.0  # none was measured

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`; call on every rank, once a step."""
        if step % self.train.save_every == 0 or is_permanent(self.train.keep_every, step):
            return True
        if self.train.save_minutes == 0 or step % self.train.log_every:
            return False
        late = time.monotonic() - self.begun_at >= self.interval_seconds()
        return self.any_rank(late and dist.is_main())

    def interval_seconds(self) -> float:
        """Return the time after which a checkpoint is due whatever the step."""
        if self.train.save_minutes != "auto":
            return 60 * self.train.save_minutes
        pause = self.pause_seconds or pause_of_copy(
            count_parameters(self.engine.module), dist.world_size())
        return save_interval(dist.world_size(), pause, self.write_seconds)

    def begin(self, record: RunRecord, is_best: bool) -> None:
        """Begin a checkpoint; a former one must have been finished."""
        assert self.in_background is None, "two copies of the state would be in memory"
        self.begun_at = time.monotonic()
        self.in_background = begin_save(
            self.engine, self.out_dir, record, self.train.keep, self.tokenizer,
            in_background=self.train.save_in_background, is_best=is_best,
            is_spared=self._is_spared)
        self.pause_seconds = time.monotonic() - self.begun_at

    def finish(self, *, wait: bool) -> Path | None:
        """Return the directory of a checkpoint that is whole now, or None; call on every rank.

        Without `wait`, only if every rank has written its file. Raises CheckpointError.
        """
        if self.in_background is None:
            return None
        if not wait and self.any_rank(not self.in_background.is_written()):
            return None
        one, self.in_background = self.in_background, None
        path = finish_save(one)
        self.write_seconds = time.monotonic() - self.begun_at
        if self.uploads:
            self.uploads.begin_round()
        return path

    def finish_uploads(self, patience: Callable[[], AbstractContextManager],
                       asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the last checkpoint and the end of the metrics are at train.upload; return
        whether any rank was `asked` to stop before: the next start copies the rest.
        """
        if self.uploads:
            self.uploads.begin_round()
        while self.train.upload and dist.from_main(
                lambda: self.uploads is not None and self.uploads.is_running()):
            if self.any_rank(asked()):
                return True
            with patience():
                time.sleep(0.2)
        return False

    def _is_spared(self, path: Path) -> bool:
        return is_permanent(self.train.keep_every, find.step_of(path)) or (
            self.uploads is not None and path == self.uploads.current)

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on some rank; call on every rank."""
        return bool(dist.sum_over_ranks(torch.tensor(float(flag), device=self.engine.device)))


class _StopError(Exception):
    """An evaluation is asked to stop, on all ranks at the same micro-batch."""


class Trainer:
    """The loop, and what it carries from step to step."""

    def __init__(self, run: RunConfig, started: Started, watchdog: Watchdog):
        record = started.record
        self.run, self.inputs, self.engine = run, started.inputs, started.engine
        self.log, self.stop_request = started.log, started.stop_request
        self.objective = objective_of(run)
        self.best = Best(run.train.best_metric)
        if run.train.best_metric:
            scored = best.what_is_scored(run, self.inputs.held_out, self.inputs.pairs[0])
            self.best, note = best.continued(run, record.best if record else Best(), scored)
            if note:
                self.log.info(note)
        self.journal = Journal(run, started, watchdog)
        self.meters = self.journal.meters
        self.bad_steps = BadSteps(run, self.engine, record.recent_losses if record else [])
        if self.best.value is not None and dist.is_main():  # a kill may have come between
            point_best(find.path_of(run.out_dir, self.best.step))
        self.saved_at = self.journal.step if record else -1
        self.is_own = record is not None and started.found.path is not None and (
            started.found.path.parent.parent == Path(run.out_dir))
        self.is_cut_short = False  # by a signal in an evaluation
        self.saver = Saver(self.engine, run.out_dir, run.train, self.inputs.tokenizer.files,
                           self.log.info)
        self.stop_request.resumes_from = f"step {self.journal.step:,}"
        self.after_update = [user_code.function("train.after_update", value)
                             for value in run.train.after_update]
        self.after_save = [user_code.function("train.after_save", value)
                           for value in run.train.after_save]
        self.after_step: Callable[[], None] = lambda: None

    def run_to_end(self) -> bool:
        """Train to the last step or train.stop_after; return whether a signal stopped it."""
        run, train, journal = self.run, self.run.train, self.journal
        end = min(train.steps, train.stop_after or train.steps)
        if self._lacks_its_scores() and self._evaluate():  # a signal came before
            self._save(is_best=True)
        batches = batches_of(run, self.inputs, start=journal.step, end=end)
        self.meters.speed.start()
        while journal.step < end and not self._is_past_its_best():
            # ---------------------------------------------------------------- single training step
            rate = learning_rate(run.optim, journal.step, train.steps)
            engine.set_learning_rate(self.engine, rate,
                                     is_thawed=journal.step >= train.freeze_steps)
            with self.meters.work.loading():
                progress = journal.step / max(1, train.steps - 1)
                micro = [replace(batch, run_fraction=progress) for batch in next(batches)]
            signals.listen_again()
            result = train_step(self.engine, micro, step=journal.step, seed=train.seed,
                                request=bool(self.stop_request or self.log.problem),
                                ceiling=self.bad_steps.spikes.ceiling(),
                                raise_if_bad=train.on_spike == "stop", meter=self.meters.work)
            journal.step += 1
            self.after_step()
            self._account(result)
            self.meters.watchdog.heartbeat(journal.step)
            # -------------------------------------------------------------------------------------
            step, is_best, ends = journal.step, False, journal.step == end or result.request
            is_due = self.saver.is_due(step)
            if step % train.log_every == 0 or step == end:
                journal.train_line(rate)
            if self._is_scored(step):
                if is_due and not train.best_metric:  # a save that needs no score waits for none
                    self._save(is_best=False)
                    is_due = False
                is_best = self._evaluate()
                ends |= self._is_past_its_best()
                if not ends:  # the end says it, too
                    journal.say_where_time_goes()
            self.finish_save(wait=False)
            stops = result.request or self.is_cut_short
            ends |= stops
            if is_due or is_best or ends and self.saved_at != step:
                self._save(is_best)
            if ends:
                with self.meters.during("saves"):
                    self.finish_save(wait=True)
                dist.together(self.log.check)
                journal.say_where_time_goes()
            if result.request and step < end or self.is_cut_short:
                why = self.stop_request.reason or "another rank"
                journal.end("stop", f"asked to by {why}; saved, exit code {EXIT_REQUEUE} "
                            "(a launcher's own may be 1): the same command goes on from here")
                return True
        self._say_the_end(end)
        return False

    def _say_the_end(self, end: int) -> None:
        train = self.run.train
        if self.best.value is not None:
            link = Path(self.run.out_dir) / BEST  # none of what --resume found in another run
            self.log.info(f"best: {self.best}, " + (f"kept as {link}" if link.exists() else
                          "a checkpoint of the run from which this one began"))
        if self._is_past_its_best():
            self.journal.end("end", f"{train.patience} evaluations without a better score: "
                             f"{self.best}")
        elif end < train.steps:
            self.journal.end("stop", f"train.stop_after = {end}; leave it out to go on")
        else:
            self.journal.end("end", "all steps done")

    def _is_past_its_best(self) -> bool:
        """Return whether train.patience says that the run ends here."""
        return 0 < self.run.train.patience <= self.best.without

    def _account(self, result: StepResult) -> None:
        """Count a good step; skip a bad one as train.on_spike says."""
        if result.problem:
            with self.meters.during("saves"):
                if self.run.train.on_spike == "rollback":
                    self.finish_save(wait=True)
                event, detail, place = self.bad_steps.skip(self.journal.step, result.problem)
            self.journal.event(event, detail, **place)
            return
        if not result.updated:
            self.journal.event("overflow", "fp16 gradient overflow: update skipped, the loss scale "
                               "(one for both networks) was lowered",
                               loss_scale=read_loss_scale(self.engine)["cur_scale"])
        for function in self.after_update if result.updated else ():
            function(base_optimizer(self.engine), self.journal.step)
        self.bad_steps.accept(result.loss)
        self.journal.count(result)

    def _is_scored(self, step: int) -> bool:
        return step % self.run.train.eval_every == 0 or step == self.run.train.steps

    def _lacks_its_scores(self) -> bool:
        """Return whether the checkpoint that was loaded was saved before its evaluation ended."""
        step = self.journal.step
        if not (self.inputs.held_out and self.is_own and self._is_scored(step)):
            return False
        return dist.from_main(lambda: not any(
            record["kind"] == "eval" and record["step"] == step
            for record in read_metrics(self.log.path)))

    def _look(self) -> None:
        """Finish a save that is written; raise _StopError, on every rank, if any was asked to stop.
        """
        self.finish_save(wait=False)
        if self.saver.any_rank(bool(self.stop_request)):
            raise _StopError

    def _evaluate(self) -> bool:
        """Score the held-out rows; return whether train.best_metric has not been better before.

        A request to stop ends it without scores: the next start begins with it.
        """
        run, inputs, device = self.run, self.inputs, self.engine.device
        if not inputs.held_out:
            return False
        try:
            with self.meters.during("evaluations"):
                scores = evaluate(self.engine, self.objective, device, inputs.held_out,
                                  run.train.micro_batch_size, run.evaluate.metrics, self._look)
                if inputs.pairs[0]:
                    scores |= score_minimal_pairs(self.engine, self.objective, device,
                                                  *inputs.pairs, inputs.tokenizer, self._look)
        except _StopError:
            self.is_cut_short = True
            return False
        self.journal.scores(scores)
        metric = best.metric_of(run)
        return metric is not None and self.best.accept(
            metric, self.journal.step, scores.get(run.train.best_metric))

    def _save(self, is_best: bool) -> None:
        self.saved_at = self.journal.step
        with self.meters.during("saves"):
            self.finish_save(wait=True)
            dist.on_main(lambda: lock.check(self.run.out_dir))
        record = self.journal.run_record(self.bad_steps, self.best)
        with self.meters.during("saves"):
            self.saver.begin(record, is_best)
            self.finish_save(wait=not self.run.train.save_in_background)

    def finish_save(self, *, wait: bool) -> None:
        """Make the checkpoint whole that is being written, if all ranks are done with it."""
        path = self.saver.finish(wait=wait)
        if path:
            self.stop_request.resumes_from = f"step {find.step_of(path):,}"
            self.journal.event("save", str(path))
            if self.after_save:
                with self.meters.watchdog.patience():
                    dist.on_main(lambda: [function(path, find.step_of(path))
                                          for function in self.after_save])
