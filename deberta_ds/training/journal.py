"""What a run has done so far, and what it writes down of it: metrics.jsonl, console, run.json."""

import os
import socket
import time
from dataclasses import replace
from typing import Any

from deberta_ds.base.numbers import format_count
from deberta_ds.checkpoint.find import Best, RunRecord
from deberta_ds.cluster import dist
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config import batch_schedule, run_config
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine.engine import gradient_norm
from deberta_ds.engine.gpus import peak_flops
from deberta_ds.objectives.build import objective_of
from deberta_ds.training import meters
from deberta_ds.training.meters import Meters, SpeedMeter, TimeUse, WorkMeter, find_slowest
from deberta_ds.training.start import Started, versions
from deberta_ds.training.step import BadSteps, StepResult

_SETTLED_STEPS = 20  # after which the speed is compared with the planned one


def slower_than_planned(planned: float, measured: float) -> str:
    """Return what is said of a run that has less than half of the tokens per second that were
    planned, with the load of this machine; "" of others.
    """
    if planned < 2 * measured or not measured:
        return ""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = ": it is busy with other work" * (load > cores + 1)
    return (f"WARNING: {planned / measured:.1f} times slower than planned: {format_count(measured)}"
            f" tokens/s, train.planned_tokens_per_second = {format_count(planned)}; this node "
            f"has a load of {load:.1f} on {cores} cores{busy}")


class Journal:
    """Counts, clocks and log lines of one run, over all its starts."""

    def __init__(self, run: RunConfig, started: Started, watchdog: Watchdog):
        record = started.record
        self._run, self._inputs, self._engine = run, started.inputs, started.engine
        self._log, self._begun_from = started.log, started.found.begun_from
        self._objective = objective_of(run)
        self.step = record.step if record else 0
        self.tokens_seen = record.tokens_seen if record else 0
        # Sums and counts of the good steps since the last logged line, over all ranks.
        self._since_line: dict[str, float] = record.since_line if record else {}
        self._seconds_before = record.seconds if record else 0.0
        self._started = time.monotonic()
        device = self._engine.device
        matmuls = self._inputs.ds.matmul_precision
        has_peak = device.type == "cuda" and not (run.train.tf32 and matmuls == "fp32")
        peak = peak_flops(device, matmuls) if has_peak else None
        speed = SpeedMeter(peak, dist.world_size(), self.sequences_seen)
        time_use = TimeUse(record.time_use if record else {},
                           started.lost_before + started.lost_now)
        self.meters = Meters(speed, time_use, WorkMeter(device), watchdog)
        self._slow_after = self.step + _SETTLED_STEPS
        self._hosts = dist.gather_objects(socket.gethostname())
        self._worked = [0.0] * len(self._hosts)  # seconds of each rank, since it was last said

    @property
    def sequences_seen(self) -> int:
        """Sequences of all steps so far."""
        return batch_schedule.rows_before(self._run.train, self.step)

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume too."""
        return self._seconds_before + time.monotonic() - self._started

    def count(self, result: StepResult) -> None:
        """Add a good step to the running sums."""
        self.tokens_seen += int(result.sums["tokens"])
        self.meters.speed.count(result.sums["tokens"])
        for name, value in result.sums.items():
            self._since_line[name] = self._since_line.get(name, 0.0) + value

    def event(self, event: str, detail: str, **more: float | str) -> None:
        """Record that something happened at this step."""
        self._log.metrics({"kind": "event", "step": self.step, "seconds": self.seconds,
                           "event": event, "detail": detail} | more)

    def end(self, event: str, detail: str) -> None:
        """As `event`, with where the time of the whole run went."""
        self.event(event, detail, **self.meters.time_use.record(self.seconds))

    def scores(self, scores: dict[str, float]) -> None:
        """Write the scores of an evaluation."""
        self._log.metrics({"kind": "eval", "step": self.step, "tokens_seen": self.tokens_seen,
                           "seconds": self.seconds} | scores)

    def train_line(self, rate: float) -> None:
        """Write one line of means over the good steps since the last line, if there are any."""
        worked = dist.gather_number(self.meters.work.read(), self._engine.device)
        slowest = find_slowest(worked, self._hosts)
        self._worked = [a + b for a, b in zip(self._worked, worked, strict=True)]
        if not self._since_line:
            return
        total, self._since_line = self._since_line, {}
        record: dict[str, Any] = {
            "kind": "train", "step": self.step, "sequences_seen": self.sequences_seen,
            "tokens_seen": self.tokens_seen, "seconds": self.seconds,
            "epochs": self.sequences_seen / sum(self._inputs.dataset.num_rows.values())}
        record |= self.meters.time_use.record(record["seconds"])
        record |= self._objective.means(self._run, total)
        record |= {"learning_rate": rate, "grad_norm": gradient_norm(self._engine)}
        record |= self.meters.speed.read(
            self.sequences_seen, batch_schedule.rows_of_run(self._run.train),
            self._objective.flops_per_token(self._run))
        record |= meters.machine_load(self._engine.device)
        if slowest:
            record["slowest_share"] = slowest.share
        self._log.metrics(record)
        if self._slow_after and self.step >= self._slow_after:
            self._slow_after = 0  # once
            if slow := slower_than_planned(self._run.train.planned_tokens_per_second,
                                           record["tokens_per_second"]):
                self._log.info(slow)

    def say_where_time_goes(self) -> None:
        """Log where the time went, and the slowest host."""
        self._log.info(self.meters.time_use.line(self.seconds))
        slowest, self._worked = find_slowest(self._worked, self._hosts), [0.0] * len(self._hosts)
        if slowest and slowest.share > meters.SHOWN_SHARE:
            self._log.info(f"slowest: {slowest.name}, {slowest.share:.0%} behind the median")

    def run_record(self, bad_steps: BadSteps, best: Best) -> RunRecord:
        """Return what run.json of a checkpoint says now."""
        run, inputs = self._run, self._inputs
        return RunRecord(
            step=self.step, sequences_seen=self.sequences_seen, tokens_seen=self.tokens_seen,
            seconds=self.seconds, world_size=dist.world_size(), config=run_config.to_dict(run),
            deepspeed=inputs.ds.as_dict(), content_hashes=inputs.identity,
            tokenizer_sha256=inputs.tokenizer.sha256, versions=versions(),
            recent_losses=list(bad_steps.spikes.losses), since_line=self._since_line,
            time_use=dict(self.meters.time_use.seconds), best=replace(best),
            begun_from=self._begun_from)
