"""Checkpoint schedule of a run, and checkpoints written in the background of training.

Every decision is equal on all ranks: steps are, and where time decides it is rank 0's clock. While
a checkpoint is in the background, each step ends with one small all-reduce, so that all ranks see
at the same step that every file is on the disk, and finish it together.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from deberta_ds.base.files import ReadFile
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.run_record import RunRecord
from deberta_ds.checkpoint.save import Save, begin_save, finish_save, is_permanent
from deberta_ds.checkpoint.upload import Uploads
from deberta_ds.cluster import dist
from deberta_ds.config.run_config import TrainConfig
from deberta_ds.model.backbone import count_parameters
from deberta_ds.planner.goodput import pause_of_copy, save_interval


class Saver:
    """The checkpoints of one run."""

    def __init__(self, engine, out_dir: str | Path, train: TrainConfig,
                 tokenizer: Mapping[str, ReadFile], say: Callable[[str], None]):
        self.uploads = dist.together(lambda: Uploads(out_dir, train, say)
                                     if train.upload and dist.is_main() else None)
        if self.uploads:  # what was saved before a kill
            self.uploads.begin()
        self.engine, self.out_dir, self.train, self.tokenizer = engine, out_dir, train, tokenizer
        self.begun_at = time.monotonic()
        self.in_background: Save | None = None
        self.pause_seconds = pause_of_copy(  # until one was measured
            count_parameters(engine.module), dist.world_size())
        self.write_seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`; call on every rank, once a step."""
        if step % self.train.save_every == 0 or is_permanent(self.train.keep_every, step):
            return True
        if self.train.save_minutes == 0 or step % self.train.log_every:
            return False
        late = time.monotonic() - self.begun_at >= self.interval_seconds()
        return self._any_rank(late and dist.is_main())

    def interval_seconds(self) -> float:
        """Return the time after which a checkpoint is due whatever the step."""
        if self.train.save_minutes != "auto":
            return 60 * self.train.save_minutes
        return save_interval(dist.world_size(), self.pause_seconds, self.write_seconds)

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
        if not wait and self._any_rank(not self.in_background.is_written()):
            return None
        one, self.in_background = self.in_background, None
        path = finish_save(one)
        self.write_seconds = time.monotonic() - self.begun_at
        if self.uploads:
            self.uploads.begin()
        return path

    def finish_uploads(self, patience: Callable[[], AbstractContextManager],
                       asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the last checkpoint and the end of the metrics are at train.upload; return
        whether any rank was `asked` to stop before: the next start copies the rest.
        """
        if self.uploads:
            self.uploads.begin()
        while self.train.upload and dist.from_main(
                lambda: self.uploads is not None and self.uploads.is_running()):
            if self._any_rank(asked()):
                return True
            with patience():
                time.sleep(0.2)
        return False

    def _is_spared(self, path: Path) -> bool:
        return is_permanent(self.train.keep_every, find.step_of(path)) or (
            self.uploads is not None and path == self.uploads.current)

    def _any_rank(self, flag: bool) -> bool:
        return bool(dist.sum_over_ranks(torch.tensor(float(flag), device=self.engine.device)))
