"""One whole run of a task: encode, train, score the kept weights, predict, write the result.

The weights of the best evaluation are read back from disk into a plain model, and that model's
score is the result. `result.json` is written last: a run with it is skipped, a run without it goes
on from its last checkpoint (loop.py), so a killed sweep continues where it was.
"""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json, typed, write_atomic
from deberta_ds.cluster import dist, lock
from deberta_ds.finetuning.inputs import Job
from deberta_ds.finetuning.loop import newest, train
from deberta_ds.finetuning.models import (
    FACTS,
    MODEL,
    RESULT,
    RESUME,
    Result,
    finetuned_model,
    load_finetuned,
)
from deberta_ds.finetuning.predict import as_text, files_of, predictions_of, score_split
from deberta_ds.tasks import metrics
from deberta_ds.tasks.readers import Split
from deberta_ds.tasks.submission import render
from deberta_ds.tasks.task import Task, metrics_on

SCORES = "scores.json"


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
        result, files = _predict(job)
        result = job.identity | trained | result
        result |= {"world_size": dist.world_size(),
                   "seconds": round(trained["seconds"] + time.monotonic() - began, 1)}
        if job.show_scores:
            for name, found in result["scores"].items():
                job.say(f"\n{as_text(name, found)}")
        write_result(job, result, files)
        return result


def write_result(job: Job, result: dict, files: Mapping[str, str] = MappingProxyType({})) -> None:
    """End a run: write `files`, then its result.json, then delete its checkpoint; call on every
    rank. The best weights stay in model/ if they are wanted.
    """
    def write() -> None:
        if files and not job.keep_model:
            shutil.rmtree(job.out / MODEL)
        if result["failure"] and (place := job.out / MODEL / FACTS).is_file():
            facts = read_json(place) | {"failure": result["failure"]}  # whoever uses it is told
            write_atomic(place, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        for name, text in {**files, RESULT: json.dumps(result, indent=1) + "\n"}.items():
            write_atomic(job.out / name, text)
        shutil.rmtree(job.out / RESUME, ignore_errors=True)

    dist.on_main(write)


def finished(job: Job) -> dict | None:
    """Return the result on disk, None if there is none; UserError if it is another run's.

    So is a checkpoint of another run, which a run that was killed has left.
    """
    place, result = job.out / RESULT, None
    if place.is_file():
        found = result = _read_result(place, job.task)
    elif killed := newest(job.out):
        place, found = killed[0], killed[1].identity
    else:
        return None
    _check_same(job, found, place)
    return result


def _check_same(job: Job, found: dict, place: Path) -> None:
    """Raise UserError if what is `found` at `place` is of another run than `job`."""
    for key, value in job.identity.items():
        if key == "initial" and not value:
            continue  # what it started from is gone
        if key in ("shape", "tokenizer", "tests", "initial") and key not in found:
            continue  # of version 0.2.0
        if key == "tests":  # more of them, or fewer, are no others
            for name in value.keys() & found[key].keys():
                if value[name] != found[key][name]:
                    raise UserError(f"{place}: {job.tables.tests[name].source} has changed since "
                                    f"it was predicted; delete {place} to run it again")
        elif (had := found.get(key)) != value:
            now = value
            if isinstance(had, dict) and isinstance(now, dict):  # what is not alike of them
                keys = [key for key in had | now if had.get(key) != now.get(key)]
                had, now = ({key: values[key] for key in keys if key in values}
                            for values in (had, now))
            raise UserError(
                f"{place}: this run had {key} = {had!r}, now it is {now!r}; "
                f"choose another --out, or delete {job.out} to run it again")


def _read_result(path: Path, task: Task) -> dict:
    """Return a result.json; UserError unless it is what `run` or a sweep writes."""
    try:
        result = read_json(path)
        found = typed(Result, result)
        lost = [name for name in task.metrics if name not in found.metrics]
        lost += [f"{table} {name}" for table, values in found.diagnostics.items()
                 for name in metrics_on(task, table) if name not in values]
        if lost:
            raise ValueError(f"{lost[0]} is missing")
    except UserError as error:
        raise UserError(f"{error}; delete {path.parent} to run this seed again") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); delete {path.parent} to run this seed "
                        "again") from None
    return result


def _predict(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (the scores of the model that was written, its files {name: text} on the first rank:
    predictions and submission).
    """
    task, tables = job.task, job.tables
    saved = load_finetuned(job.out / MODEL)
    model = finetuned_model(saved, job.device, job.deepspeed.precision)

    def scores_on(split: Split) -> list[np.ndarray]:
        return score_split(model, split.task, split.examples, tables.encoded[id(split)],
                           global_batch_size=job.settings.eval_batch_size, device=job.device)

    examples = tables.val.examples
    scores = scores_on(tables.val)
    guesses = predictions_of(task, examples, scores, saved.threshold)
    found = metrics.scores_of(task, examples, guesses)
    failure = metrics.failure(task, examples, guesses)
    result: dict[str, Any] = {
        "labels": list(task.labels),
        "metrics": {name: value["value"] for name, value in found["metrics"].items()},
        "score": found["score"]["value"], "score_is": found["score_is"],
        "baseline": metrics.task_score(task, found["majority"]),
        "failed": bool(failure), "failure": failure, "diagnostics": {}, "scores": {"val": found}}
    if task.no_answer:
        result["no_answer_threshold"] = saved.threshold
    if "confusion" in found:
        result["confusion"] = found["confusion"]
    files = files_of(task, examples, guesses, scores) if dist.is_main() else {}
    for name, split in (*tables.diagnostics.items(), *tables.tests.items()):
        guesses = predictions_of(split.task, split.examples, scores_on(split), saved.threshold)
        if found := metrics.scores_of(split.task, split.examples, guesses):
            table = "test" if name == task.name else name
            result["scores"][table] = found
            result["diagnostics"][table] = {metric: value["value"]
                                            for metric, value in found["metrics"].items()}
        if dist.is_main() and split is tables.tests.get(name):
            files[f"submission/{name}.jsonl"] = render(split.task, split.examples, guesses)
    return result, files | {SCORES: json.dumps(result["scores"], indent=1) + "\n"}
