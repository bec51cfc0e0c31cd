"""One (task, seed) run: what it is made of, and what another one must agree in to stand for it."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash

from deberta_ds.config.run_config import to_dict
from deberta_ds.engine import ds_config
from deberta_ds.finetuning.directory import Finetuned
from deberta_ds.finetuning.encoded import Encoded, encode_split
from deberta_ds.finetuning.models import Start
from deberta_ds.finetuning.predict import score_split
from deberta_ds.tasks.readers import Split
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import Task


@dataclass(frozen=True)
class Job:
    """One (task, seed) run.

    `tests` are splits to predict (and to score, with labels), `diagnostics` ones to score, by name.
    """

    task: Task
    seed: int
    settings: Settings
    start: Start
    train: Split
    val: Split
    tests: Mapping[str, Split]
    out: Path  # the run's own directory
    deepspeed: dict  # checked DeepSpeed JSON
    device: torch.device
    diagnostics: Mapping[str, Split] = field(default_factory=dict)
    init_from: str = ""  # a fine-tuned directory of another task,
    initial: Finetuned | None = None  # what was read there, once for all seeds
    keep_model: bool = True
    show_scores: bool = False  # as tables, at the end
    say: Callable[[str], None] = print
    # By the id of a split; the seeds of a task have splits, settings and this in common.
    encoded: dict[int, Encoded] = field(default_factory=dict)

    def features(self, split: Split) -> Encoded:
        """Return one of the run's splits encoded, once for all seeds.

        UserError names an example that cannot be made to fit.
        """
        if id(split) not in self.encoded:
            self.encoded[id(split)] = encode_split(split, self.start.tokenizer, self.settings,
                                                   self.say)
        return self.encoded[id(split)]

    def scores(self, model: Callable, split: Split) -> list[np.ndarray]:
        """Return what `model`, in evaluation mode, gives every example; call it on every rank."""
        return score_split(model, split.task, split.examples, self.features(split),
                           global_batch_size=self.settings.eval_batch_size, device=self.device)

    @cached_property  # a pass over all texts, and an identity is compared several times
    def data_digest(self) -> str:
        return digest(self.task, self.train, self.val)

    def identity(self) -> dict:
        """Return what a run on disk must agree in, to stand for this one."""
        return {
            "task": self.task.name,
            "seed": self.seed,
            "settings": to_dict(self.settings),
            "start": self.start.name,
            "start_weights": self.start.digest,
            "shape": to_dict(self.start.config),
            "tokenizer": self.start.tokenizer.sha256,
            "init_from": self.init_from,
            "init_weights": self.initial.file_digest if self.initial else "",
            "train": [self.train.source, len(self.train.examples)],
            "val": [self.val.source, len(self.val.examples)],
            "labels_and_texts": self.data_digest,
            "precision": ds_config.precision(self.deepspeed)}


def digest(task: Task, *splits: Split) -> str:
    """Return a hash of what a task makes of its data: texts, labels, answers, metrics."""
    found = xxhash.xxh3_128(repr((task.head, task.labels, task.metrics, task.language,
                                    task.columns.get("group"))).encode())
    for example in itertools.chain.from_iterable(split.examples for split in splits):
        found.update(repr((example.sequences, example.label, example.spans, example.names,
                           example.gold)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()
