"""One whole run of a task: encode, train, score the kept weights, predict, write the result.

The weights of the best evaluation are read back from disk into a plain model, and that model's
score is the result. `result.json` is written last: a run with it is skipped, a run without it goes
on from its last checkpoint (loop.py), so a killed sweep continues where it was.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json, typed, write_atomic
from deberta_ds.cluster import dist, lock
from deberta_ds.engine.ds_config import precision
from deberta_ds.finetuning.answers import write_official
from deberta_ds.finetuning.directory import (
    MODEL,
    RESULT,
    RESUME,
    Finetuned,
    is_finetuned,
    load_finetuned,
    mark_failed,
)
from deberta_ds.finetuning.features import TooLongError
from deberta_ds.finetuning.inputs import Job
from deberta_ds.finetuning.loop import newest, train
from deberta_ds.finetuning.models import Start, build_model
from deberta_ds.finetuning.predict import SCORES, as_text, predictions_of, scores_of
from deberta_ds.model.precision import DTYPES
from deberta_ds.tasks import metrics
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.submission import render
from deberta_ds.tasks.tables import longer
from deberta_ds.tasks.task import Task, diagnostics_of


def run(job: Job) -> dict:
    """Return the result of `job`: the one on disk if it is whole and the same, else a new one.

    Raises UserError if the directory holds a run with other settings or data, or one of this
    machine that is under way.
    """
    found = finished(job)
    if found is not None:
        job.say(f"{job.task.name} seed {job.seed}: already there, {job.out / RESULT}")
        if lost := [name for name in job.tables.tests
                    if not (job.out / "submission" / f"{name}.jsonl").is_file()]:
            job.say(f"  without predictions of {', '.join(lost)}: the test data was not there, or "
                    f"left out; delete {job.out / RESULT} to run it again, with them")
        if job.keep_model and not (job.out / MODEL).is_dir() and "error" not in found:
            job.say(f"  without its model, which was not kept; delete {job.out / RESULT} to run it "
                    "again, and keep it")
        if dist.is_main():
            shutil.rmtree(job.out / RESUME, ignore_errors=True)  # killed when it had just ended
            lock.release(job.out)
        return found
    with lock.held(job.out):
        trained = train(job)
        began = time.monotonic()
        result = job.identity() | trained | _predict(job)
        result |= {"world_size": dist.world_size(),
                   "seconds": round(trained["seconds"] + time.monotonic() - began, 1)}
        if job.show_scores:
            for name, found in result["scores"].items():
                job.say(f"\n{as_text(name, found)}")
        dist.on_main(lambda: _keep(job, result))
        write_result(job, result)
        return result


def _keep(job: Job, result: dict) -> None:
    """Write the scores, and leave the best weights in model/ if they are wanted."""
    write_atomic(job.out / SCORES, json.dumps(result["scores"], indent=1) + "\n")
    if not job.keep_model:
        shutil.rmtree(job.out / MODEL)


def write_result(job: Job, result: dict) -> None:
    """End a run: write its result.json, then delete its checkpoint; call on every rank."""
    def write() -> None:
        if result["failure"] and is_finetuned(job.out / MODEL):
            mark_failed(job.out / MODEL, result["failure"])
        write_atomic(job.out / RESULT, json.dumps(result, indent=1) + "\n")
        shutil.rmtree(job.out / RESUME, ignore_errors=True)

    dist.on_main(write)


def _differing(first, second) -> tuple:
    """Return both; of two dicts what is not alike."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first, second
    keys = [key for key in first | second if first.get(key) != second.get(key)]
    return tuple({key: values[key] for key in keys if key in values} for values in (first, second))


def finished(job: Job) -> dict | None:
    """Return the result on disk, None if there is none; UserError if it is another run's.

    So is a checkpoint of another run, which a run that was killed has left.
    """
    if not (job.out / RESULT).is_file():
        if killed := newest(job.out):
            _check_same(job, killed[1].identity, killed[0])
        return None
    try:
        result = read_json(job.out / RESULT)
    except UserError as error:
        raise UserError(f"{error}; delete {job.out} to run this seed again") from None
    _check_result(job, result)
    _check_same(job, result, job.out / RESULT)
    return result


def _check_same(job: Job, found: dict, place: Path) -> None:
    """Raise UserError if what is `found` at `place` is of another run than `job`."""
    for key, value in job.identity().items():
        if key == "initial" and not value:
            continue  # what it started from is gone
        if key in ("shape", "tokenizer", "tests", "initial") and key not in found:
            continue  # of version 0.2.0
        if key == "tests":  # more of them, or fewer, are no others
            for name in value.keys() & found[key].keys():
                if value[name] != found[key][name]:
                    raise UserError(f"{place}: {job.tables.tests[name].source} has changed since "
                                    f"it was predicted; delete {place} to run it again")
        elif found.get(key) != value:
            had, now = _differing(found.get(key), value)
            raise UserError(
                f"{place}: this run had {key} = {had!r}, now it is {now!r}; "
                f"choose another --out, or delete {job.out} to run it again")


@dataclasses.dataclass(frozen=True)
class _Result:
    """What is computed with of a run's result.json, and as what."""

    score: float
    baseline: float | None
    failed: bool
    failure: str
    metrics: dict[str, float]
    diagnostics: dict[str, dict[str, float]]
    history: list[dict[str, float]]
    tests: dict[str, str] = dataclasses.field(default_factory=dict)  # none of a diverged run


def _check_result(job: Job, result: dict) -> None:
    """Raise UserError unless a result.json is what `run` or a sweep writes."""
    try:
        found = typed(_Result, result)
        lost = [name for name in job.task.metrics if name not in found.metrics]
        lost += [f"{table} {name}" for table, values in found.diagnostics.items()
                 for name in metrics_on(job.task, table) if name not in values]
        if lost:
            raise ValueError(f"{lost[0]} is missing")
    except ValueError as error:
        raise UserError(f"{job.out / RESULT}: damaged ({error}); delete {job.out} to run this seed "
                        "again") from None


def metrics_on(task: Task, table: str) -> tuple[str, ...]:
    """Return the metrics of a diagnostic set, or of a labeled test table of `task`."""
    found = [other.metrics for other in diagnostics_of(task.name) if other.name == table]
    return found[0] if found else task.metrics


def check_splits(jobs: Sequence[Job]) -> None:
    """Encode every split of every job once.

    Raises one UserError for all texts that the model cannot be given: before hours of training.
    """
    problems = []
    for job in jobs:
        known = job.start.config.max_position
        positions = known if job.start.config.absolute_input else None
        tables, option = job.tables, f"--{job.task.name}."
        for split in (tables.train, tables.val, *tables.tests.values(),
                      *tables.diagnostics.values()):
            too_few = f"{job.start.name} has {positions} absolute positions"
            try:
                longest = job.features(split).longest
            except TooLongError as error:
                fits = positions is None or error.needed <= positions
                remedy = f"{option}max_length={error.needed}"
                problems.append(f"{error}. " + longer(split.task, option, remedy if fits else (
                    f"take a model of more positions: {too_few}")))
            else:
                if positions is not None and longest > positions:
                    problems.append(f"{split.source}: the longest row has {longest} tokens, but "
                                    f"{too_few}. Set {option}max_length={positions} to cut it")
                elif longest > known:
                    job.say(f"  WARNING: {split.source}: the longest row has {longest:,} tokens; "
                            f"{job.start.name} is made for {known:,}")
    if problems:
        raise UserError("texts do not fit:\n  " + "\n  ".join(problems))


def _predict(job: Job) -> dict:
    """Return the scores of the model that was written; write predictions and submission files."""
    saved = load_finetuned(job.out / MODEL)
    model = finetuned_model(saved, job.device, precision(job.deepspeed))
    examples = job.tables.val.examples
    scores = job.scores(model, job.tables.val)
    guesses = predictions_of(job.task, examples, scores, saved.threshold)
    found = scores_of(job.task, examples, guesses)
    failure = metrics.failure(job.task, examples, guesses)
    result: dict[str, Any] = {
        "labels": list(job.task.labels),
        "metrics": {name: value["value"] for name, value in found["metrics"].items()},
        "score": found["score"]["value"],
        "score_is": found["score_is"],
        "baseline": metrics.task_score(job.task, found["majority"]),
        "failed": bool(failure),
        "failure": failure,
        "diagnostics": {},
        "scores": {"val": found}}
    if job.task.no_answer:
        result["no_answer_threshold"] = saved.threshold
    if "confusion" in found:
        result["confusion"] = found["confusion"]
    if dist.is_main():
        _write_predictions(job.out / "val_predictions.jsonl", examples, guesses, scores)
        if job.task.head == "answer":
            write_official(job.out, examples, guesses, scores)
    for name, split in (*job.tables.diagnostics.items(), *job.tables.tests.items()):
        answers = predictions_of(split.task, split.examples, job.scores(model, split),
                                 saved.threshold)
        if found := scores_of(split.task, split.examples, answers):
            table = "test" if name == job.task.name else name
            result["scores"][table] = found
            result["diagnostics"][table] = {metric: value["value"]
                                            for metric, value in found["metrics"].items()}
        if dist.is_main() and split is job.tables.tests.get(name):
            text = render(split.task, split.examples, answers)
            write_atomic(job.out / "submission" / f"{name}.jsonl", text)
    return result


def finetuned_model(
        saved: Finetuned, device: torch.device, precision_name: str = "fp32") -> torch.nn.Module:
    """Return the plain model of a fine-tuned directory in evaluation mode."""
    shape = Start("", saved.config, saved.tokenizer, None)
    plain = dataclasses.replace(saved.settings, dropout=-1.0)
    model = build_model(saved.task, shape, plain, 0)
    model.load_state_dict(saved.weights)
    return model.to(device, DTYPES[precision_name]).eval()


def _write_predictions(
    path: Path, examples: Sequence[Example], guesses: Sequence, scores: Sequence[np.ndarray]
) -> None:
    lines = [
        {"key": example.key,
         "label": example.gold if example.names or example.id else example.label,
         "prediction": guess, "scores": [round(float(value), 5) for value in values]}
        for example, guess, values in zip(examples, guesses, scores, strict=True)]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))
