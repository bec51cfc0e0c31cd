"""What a run does about bad steps (step.py says which are bad): `train.on_spike`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import read_run_record
from deberta_ds.cluster import dist
from deberta_ds.config.batch_schedule import rows_before
from deberta_ds.config.run_config import RunConfig
from deberta_ds.training.step import BadStepError, SpikeRule

MOST_IN_A_ROW = 10  # bad steps after which a run stops whatever it was told
MOST_ROLLBACKS = 3  # to one checkpoint, with good steps between them


class BadSteps:
    """The bad steps of one run, under "skip" and "rollback"; under "stop" the first one ends it."""

    def __init__(self, run: RunConfig, engine, losses: Sequence[float] = ()):
        self._run, self._engine = run, engine
        self.spikes = SpikeRule(run.train.spike_sigmas, losses)
        self._in_a_row = 0
        self._rollbacks: Counter[Path] = Counter()  # those that threw away good steps

    def accept(self, loss: float) -> None:
        """Take note of a good step."""
        self._in_a_row = 0
        self.spikes.accept(loss)

    def skip(self, step: int, problem: str) -> tuple[str, str, dict[str, int]]:
        """Return the event, its text and the sequences of a bad step, the last of `step` steps.

        Under "rollback", weights and optimizer become those of the newest checkpoint. The run goes
        on with the next step's sequences either way, so a bad batch is never met again. Raises
        BadStepError on every rank where that gets a run nowhere.
        """
        train = self._run.train
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise BadStepError(f"step {step}: {self._in_a_row} bad steps in a row ({problem}); the "
                               "run has diverged: resume from an older checkpoint with a lower "
                               "optim.learning_rate")
        place = {"first_sequence": rows_before(train, step - 1),
                 "last_sequence": rows_before(train, step) - 1}
        if train.on_spike == "skip":
            return "skip", f"no update: {problem}", place
        path = self._checkpoint(step, problem)
        saved_state.load(self._engine, path)
        self.spikes = SpikeRule(train.spike_sigmas, dist.together(
            lambda: read_run_record(path)).recent_losses)
        return "rollback", f"weights and optimizer of {path}: {problem}", place

    def _checkpoint(self, step: int, problem: str) -> Path:
        """Return the newest checkpoint, unless the run has come back to it too often."""
        path = find.find(self._run.out_dir, "auto").path
        if path is None:
            raise BadStepError(f"step {step}: {problem}, and there is no checkpoint to roll back "
                               'to; lower train.save_every or use train.on_spike = "skip"')
        self._rollbacks[path] += self._in_a_row == 1
        if self._rollbacks[path] > MOST_ROLLBACKS:
            raise BadStepError(
                f"step {step}: {problem}, and {MOST_ROLLBACKS} rollbacks to {path} did not get the "
                "run to its next checkpoint; resume from an older one with a lower "
                "optim.learning_rate, or lower train.save_every")
        return path
