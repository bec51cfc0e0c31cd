"""What a fine-tuning reads, opened once for all seeds of a task; one run of it.

The model with its tokenizer, and DeepSpeed's JSON, are the same for all tasks (options.py). Tables,
and a fine-tuned model to start from, are a task's own. Their identity is what ranks compare, what
another seed and a continuation compare, and what result.json names.

A split is encoded once per node: each rank encodes a part and pickles it into memory without a name
(memfd), which all of them map. It goes with their last process, however that ends.
"""

import math
import os
import pickle
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from deberta_ds.base.errors import UserError, naming
from deberta_ds.cluster import dist
from deberta_ds.cluster.lock import machine
from deberta_ds.config.run_config import to_dict
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.finetuning.features import (
    Feature,
    TooLongError,
    count_special,
    count_unknown,
    encode,
)
from deberta_ds.finetuning.models import (
    Finetuned,
    Start,
    find_finetuned,
    is_finetuned,
    load_finetuned,
    start_from,
    tokenizer_files,
)
from deberta_ds.tasks import readers
from deberta_ds.tasks.layouts import is_labeled
from deberta_ds.tasks.readers import Split
from deberta_ds.tasks.settings import Settings, resolve
from deberta_ds.tasks.tables import Faults, longer
from deberta_ds.tasks.task import TASK_NAMES, TEST, Task, diagnostics_of
from deberta_ds.tokenizer import Tokenizer, unknown_tokens
from deberta_ds.training.inputs import Input

_BLOCK_ROWS = 4096
_SAY_SECONDS = 10.0  # between two lines on the progress of encoding
_values_of = attrgetter(*[field.name for field in fields(Feature)][1:])  # all but its position
CARVED_SHARE = 0.8  # of a labeled validation split, where the train file is not at hand
_CARVE_SEED = 0


class Encoded(Sequence[Feature]):
    """The features in files of (path, how many), each made again when it is asked for.

    lost: positions of the examples that have none; longest: tokens of the longest row.
    `Feature.position` is the place in here.
    """

    def __init__(self, files: Iterable[tuple[str, int]], lost: Sequence[int], longest: int):
        self.lost, self.longest = lost, longest
        self._parts, self._first = [], [0]
        for path, count in files:
            with open(path, "rb") as file:
                data = mmap(file.fileno(), 0, access=ACCESS_READ)
            starts = np.frombuffer(data, np.int64, count + 1, len(data) - 8 * (count + 1))
            self._parts.append((data, starts))
            self._first.append(self._first[-1] + count)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, place):
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        place = range(len(self))[place]
        part = bisect_right(self._first, place) - 1
        (data, starts), row = self._parts[part], place - self._first[part]
        return Feature(place, *pickle.loads(data[starts[row] : starts[row + 1]]))


@dataclass(frozen=True)
class Tables:
    """A task's splits: `tests` are predicted (and scored, with labels), `diagnostics` scored, both
    by name.
    """

    train: Split
    val: Split
    tests: Mapping[str, Split] = field(default_factory=dict)
    diagnostics: Mapping[str, Split] = field(default_factory=dict)
    # Made by `prepare`; the seeds of a task have splits and settings in common.
    encoded: dict[int, Encoded] = field(default_factory=dict)  # by the id of a split
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)  # next to each model; of rank 0


@dataclass(frozen=True)
class Job:
    """One (task, seed) run."""

    task: Task
    seed: int
    settings: Settings
    start: Start
    tables: Tables
    out: Path  # the run's own directory
    deepspeed: DeepSpeedConfig
    device: torch.device
    inputs: tuple[Input, ...] = ()  # all that was read
    init_from: str = ""  # a fine-tuned directory of another task,
    initial: Finetuned | None = None  # what was read there, once for all seeds
    keep_model: bool = True
    show_scores: bool = False  # as tables, at the end
    say: Callable[[str], None] = print

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a run on disk must agree in, to stand for this one."""
        return {"task": self.task.name, "seed": self.seed, "settings": to_dict(self.settings),
                "start": self.start.name, "init_from": self.init_from,
                **{name: one for each in self.inputs for name, one in each.identity.items()}}


@dataclass(frozen=True)
class Sweep:
    """What the command line asks for."""

    tasks: tuple[Task, ...]
    num_seeds: int
    start: Start
    data: str
    out: Path
    deepspeed: DeepSpeedConfig
    device: torch.device
    # task name -> the settings that were given
    settings: Mapping[str, Mapping] = field(default_factory=dict)
    init_from: Mapping[str, str] = field(default_factory=dict)  # task name -> fine-tuned directory
    carved: tuple[str, ...] = ()  # tasks whose train split is cut out of val
    any_size: bool = False
    max_bad: int = 0  # rows of a table that may be left out because they cannot be used
    predict_test: bool = True
    keep_models: bool = True
    show_scores: bool = False  # of every run
    say: Callable[[str], None] = print


def open_inputs(sweep: Sweep, task: Task) -> tuple[Input, ...]:
    """Open what the runs of a task read; call on every rank. UserError on every rank."""
    tables = read_tables(sweep, task)
    dist.together(lambda: _check(sweep, tables))
    train, val = tables.train, tables.val
    place, initial = dist.together(lambda: _initial(sweep, task))
    return (
        Input("model", sweep.start, sweep.start.identity()),
        Input("DeepSpeed JSON", sweep.deepspeed, {"precision": sweep.deepspeed.precision}),
        Input("tables", tables, {
            "train": [train.source, len(train.examples)], "val": [val.source, len(val.examples)],
            "labels_and_texts": digest(task, train, val),
            "tests": {name: digest(split.task, split) for name, split in tables.tests.items()}}),
        Input("init_from", (place, initial), {"initial": initial.identity if initial else {}}))


def _initial(sweep: Sweep, task: Task) -> tuple[str, Finetuned | None]:
    """Open the fine-tuned model that a task starts from: (its place, what was read there). One that
    is gone does not matter to runs that are finished.
    """
    if task.name not in sweep.init_from:
        return "", None
    place = find_finetuned(sweep.init_from[task.name])
    if not is_finetuned(place):
        return str(place), None
    found = load_finetuned(place)
    start_from(sweep.start, found, str(place))  # said before hours of training
    if found.failure:
        sweep.say(f"warning: the run of {place} failed: {found.failure}")
    return str(place), found


def digest(task: Task, *splits: Split) -> str:
    """Return a hash of what a task makes of its data: texts, labels, answers, metrics."""
    found = xxhash.xxh3_128(repr((task.head, task.labels, task.metrics, task.language,
                                    task.columns.get("group"))).encode())
    for example in chain.from_iterable(split.examples for split in splits):
        found.update(repr((example.sequences, example.label, example.spans, example.names,
                           example.gold)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _check(sweep: Sweep, tables: Tables) -> None:
    """UserError for what is wrong with the tables; texts that two of them share are said."""
    readers.check_targets(tables.train)
    readers.check_targets(tables.val)
    for split in (tables.val, *tables.tests.values()):
        if (column := split.task.columns.get("group")) and (lost := [
                e.place for e in split.examples if e.group is None and is_labeled(e)]):
            raise UserError(f"{lost[0]}: no column {column!r} (group in the task file); scores "
                            "are to be shown by its values")
        shared, place = readers.count_shared(tables.train, split)
        if shared:
            sweep.say(f"WARNING: {shared:,} of {len(split.examples):,} examples of "
                      f"{split.source} are in {tables.train.source} too (such as {place}); their "
                      "scores say nothing about new texts")


def read_tables(sweep: Sweep, task: Task) -> Tables:
    """Return the splits of `task`.

    A test of an own task that has no name is called as the task; the diagnostic of MNLI is MNLI-mm.
    Under `max_bad` all are encoded here, without what cannot be.
    """
    encoded: dict[int, Encoded] = {}

    def read_parts(of: Task, split: str, carved: float = 0, name: str = "") -> list[Split]:
        """Return a split, or the two that are carved out of it, the first with such a share."""
        faults = Faults(sweep.max_bad, sweep.out / f"{of.name}.{name or split}.bad_rows.txt")
        whole = dist.together(lambda: readers.read_split(
            of, sweep.data, split, any_size=sweep.any_size, faults=faults))
        before = len(faults.errors)
        parts = [*readers.carve(whole, carved, _CARVE_SEED)] if carved else [whole]
        if sweep.max_bad and "gender_parity" not in of.metrics:  # of pairs, no line goes alone
            parts = [_that_fit(sweep, task, part, faults, encoded) for part in parts]
        said = whole.left_out if len(faults.errors) == before else faults.check(
            before + len(whole.examples), faults.fit(task, f"--{task.name}."))
        if said:
            sweep.say(f"{whole.source}: {said}")
        return parts

    def read(of: Task, split: str, name: str = "") -> Split:
        return read_parts(of, split, name=name)[0]

    if task.val_share and "val" not in task.files:
        train, val = read_parts(task, "train", 1 - task.val_share)
    elif task.name in sweep.carved:
        train, val = read_parts(task, "val", CARVED_SHARE)
    else:
        val, train = read(task, "val"), read(task, "train")
    found = Tables(train, val, tests := {}, diagnostics := {}, encoded)
    if task.name not in TASK_NAMES:
        for place, table in task.files.items():
            if sweep.predict_test and place.startswith("test"):
                name = task.name if place == "test" else place.removeprefix(TEST)
                own = replace(task, files={"test": table})
                tests[name] = read(own, "test", place.replace("/", "."))
        return found
    for test in (task, *diagnostics_of(task.name)) if sweep.predict_test else ():
        there = dist.together(lambda test=test: [
            readers.has_split(test, sweep.data, split) for split in ("val", "test")])
        dist.check_alike({f"{test.name}: there are val and test": there})
        if test.predicted_by and there[0]:
            diagnostics[test.name] = read(test, "val")
        if there[1]:
            tests[test.name] = read(test, "test")
        else:
            sweep.say(f"{test.name}: no test split under {sweep.data}, no submission file")
    return found


def _that_fit(sweep: Sweep, task: Task, split: Split, faults: Faults,
              encoded: dict[int, Encoded]) -> Split:
    """Return a split that `task` predicts, without what cannot be encoded, such as long texts."""
    settings = resolve(task, sweep.settings)
    features = encode_split(split, sweep.start, settings, sweep.say, faults)
    if lost := {*features.lost}:
        split = replace(split, examples=tuple(
            example for n, example in enumerate(split.examples) if n not in lost))
    encoded[id(split)] = features
    return split


def prepare(jobs: Sequence[Job]) -> None:
    """Encode the splits of every job, and make what goes next to its model, once for all seeds.

    Raises one UserError for all texts that the model cannot be given: before hours of training.
    """
    problems = []
    for job in jobs:
        tables, start, option = job.tables, job.start, f"--{job.task.name}."
        known = start.config.max_position
        positions = known if start.config.absolute_input else math.inf
        too_few = f"{start.name} has {known} absolute positions"
        for split in (tables.train, tables.val, *tables.tests.values(),
                      *tables.diagnostics.values()):
            try:
                if id(split) not in tables.encoded:
                    tables.encoded[id(split)] = encode_split(split, start, job.settings, job.say)
                longest = tables.encoded[id(split)].longest
            except TooLongError as error:
                problems.append(f"{error}. " + longer(
                    split.task, option, f"{option}max_length={error.needed}" if error.needed <=
                    positions else f"take a model of more positions: {too_few}"))
            else:
                if longest > positions:
                    problems.append(f"{split.source}: the longest row has {longest} tokens, but "
                                    f"{too_few}. Set {option}max_length={positions} to cut it")
                elif longest > known:
                    job.say(f"  WARNING: {split.source}: the longest row has {longest:,} tokens; "
                            f"{start.name} is made for {known:,}")
        dist.on_main(lambda tables=tables, start=start, length=job.settings.max_length:
                     tables.tokenizer_files.update(tokenizer_files(start.tokenizer, length)))
    if problems:
        raise UserError("texts do not fit:\n  " + "\n  ".join(problems))


def encode_split(split: Split, start: Start, settings: Settings,
                 say: Callable[[str], None], faults: Faults | None = None) -> Encoded:
    """Return a split's features as `encode` does; say every 10 seconds how far it is, and at the
    end what of the texts is cut, read in windows, or not as the model knows it.

    Call it on every rank; all raise the same error.
    """
    total, bad, where = len(split.examples), Faults(), f"{split.source}, encoded in memory"
    ours = [rank for rank, name in enumerate(dist.gather_objects(machine())) if name == machine()]
    part = range(*(total * (ours.index(dist.rank()) + n) // len(ours) for n in (0, 1)))

    def encode_part() -> tuple[int, list, list, np.ndarray, int]:
        with naming(where):
            return _encode_part(file, split, part, start.tokenizer, settings, say,
                                None if faults is None else bad)

    with naming(where), os.fdopen(os.memfd_create("features"), "wb") as file:
        count, *counted = dist.together(encode_part)
        mine = (f"/proc/{os.getpid()}/fd/{file.fileno()}", count)
        found = dist.gather_objects((mine, bad.errors, bad.needed, *counted))
        files, named, most, gone, long, sums, longest = zip(
            *[found[rank] for rank in ours], strict=True)
        if too_long := [*chain(*long)]:
            needed, place, _ = max(too_long)
            raise TooLongError(place, needed, sum(count for *_, count in too_long), total,
                               settings.max_length)
        if faults is not None:
            faults.errors |= dict(chain(*(errors.items() for errors in named)))
            faults.needed = max(faults.needed, *most)
        # No file is closed before all ranks have opened it.
        encoded = dist.together(lambda: Encoded(files, [*chain(*gone)], max(longest)))
    cut, windowed, special, unknown, tokens = sum(sums).tolist()
    if cut or windowed:
        say(f"  {split.source}: of {total} examples {cut} were cut at {settings.max_length} tokens,"
            f" {windowed} read in windows")
    if lost := unknown_tokens(unknown, tokens):
        say(f"  {split.source}: {lost}; {start.name} was not trained on text like this")
    if special:
        say(f"  {split.source}: {special} of {total} examples have a special token, such as [SEP], "
            "in their text: plain text here, one token for transformers")
    return encoded


def _encode_part(file: BinaryIO, split: Split, part: range, tokenizer: Tokenizer,
                 settings: Settings, say: Callable[[str], None], faults: Faults | None
                 ) -> tuple[int, list[int], list[tuple[int, str, int]], np.ndarray, int]:
    """Write the features of a part of a split, then where each begins. Return (how many there are,
    positions of the examples that have none, (tokens, place, count) of what is too long, [cut, in
    windows, with a special token's name, unknown pieces, tokens], tokens of the longest row).
    """
    said, starts, longest, sums = time.monotonic(), array("q", [0]), 0, np.zeros(5, int)
    lost: list[int] = []
    long: list[tuple[int, str, int]] = []
    for first in part[::_BLOCK_ROWS]:
        rows, features = range(first, min(first + _BLOCK_ROWS, part.stop)), []
        examples = split.examples[first : rows.stop]
        try:
            features = encode(
                split.task, examples, tokenizer,
                max_length=settings.max_length, window_overlap=settings.window_overlap,
                truncation=settings.truncation, faults=faults)
        except TooLongError as error:
            long.append((error.needed, error.place, error.count))
        for feature in features:
            starts.append(starts[-1] + file.write(pickle.dumps(_values_of(feature), 5)))
            rows_of_text = len(examples[feature.position].sequences)
            sums[:2] += feature.cut_tokens > 0, len(feature.sequences) > rows_of_text
            longest = max(longest, *map(len, feature.sequences))
        sums[2:] += (count_special(examples, tokenizer), *count_unknown(features, tokenizer))
        lost += sorted({*rows} - {first + feature.position for feature in features})
        if time.monotonic() >= said + _SAY_SECONDS:
            said, share = time.monotonic(), (rows.stop - part.start) / len(part)
            say(f"  encoding {split.source}: {share:.0%} of {len(split.examples):,}")
    file.write(starts.tobytes())
    file.flush()
    return len(starts) - 1, lost, long, sums, longest
