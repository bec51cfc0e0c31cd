"""Tasks x seeds: read everything first, run what is not done yet, sum up as the leaderboard does.

Per task: median, minimum and maximum over seeds, and how many runs failed (constant predictions, no
better than the majority, or diverged). Never the best seed alone.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.json_files import read_json
from deberta_ds.cluster import dist
from deberta_ds.config.toml_files import flatten
from deberta_ds.finetuning.directory import (
    RESULT,
    Finetuned,
    find_finetuned,
    is_finetuned,
    load_finetuned,
)
from deberta_ds.finetuning.encoded import Encoded, encode_split
from deberta_ds.finetuning.job import Job
from deberta_ds.finetuning.models import Start, start_from
from deberta_ds.finetuning.run import (
    check_splits,
    digests,
    finished,
    metrics_on,
    run,
    write_result,
)
from deberta_ds.tasks import readers
from deberta_ds.tasks.layouts import is_labelled
from deberta_ds.tasks.metrics import score_name
from deberta_ds.tasks.readers import Split
from deberta_ds.tasks.scores import percent
from deberta_ds.tasks.settings import Settings, resolve
from deberta_ds.tasks.tables import Faults
from deberta_ds.tasks.task import TASK_NAMES, TEST, Task, diagnostics_of, suite_of
from deberta_ds.training.check import check_alike
from deberta_ds.training.step import BadStepError

RESULTS_FILE = "results.json"
CARVED_SHARE = 0.8  # of a labelled validation split, where the train file is not at hand
_CARVE_SEED = 0


@dataclass(frozen=True)
class Sweep:
    """What the command line asks for."""

    tasks: tuple[Task, ...]
    num_seeds: int
    start: Start
    data: str
    out: Path
    deepspeed: dict
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


def run_all(sweep: Sweep) -> list[dict]:
    """Return the results of every (task, seed), reading finished ones from disk."""
    for option, names in (("--init_from", sweep.init_from), ("--carve_train", sweep.carved)):
        if unknown := set(names) - {task.name for task in sweep.tasks}:
            raise UserError(f"{option} {min(unknown)}: is none of the tasks of this run, "
                            f"{', '.join(task.name for task in sweep.tasks)}")
    encoded: dict[str, dict[int, Encoded]] = {task.name: {} for task in sweep.tasks}  # of all seeds
    splits = {task.name: read_task(sweep, task, encoded[task.name]) for task in sweep.tasks}
    dist.together(lambda: _check_read(sweep, splits))
    settings = _settings(sweep)
    init_from, initial = dist.together(lambda: _open_initial(sweep))
    jobs = []
    for task in sweep.tasks:
        train, val, tests, diagnostics = splits[task.name]
        jobs += [
            Job(task=task, seed=seed, settings=settings[task.name], start=sweep.start,
                train=train, val=val, tests=tests, diagnostics=diagnostics,
                out=sweep.out / task.name / f"seed-{seed}",
                deepspeed=sweep.deepspeed, device=sweep.device,
                init_from=init_from.get(task.name, ""), initial=initial.get(task.name),
                keep_model=sweep.keep_models, show_scores=sweep.show_scores, say=sweep.say,
                encoded=encoded[task.name])
            for seed in range(1, sweep.num_seeds + 1)]
    check_alike({f"{job.task.name} {key}": value for job in jobs[::sweep.num_seeds]
                 for key, value in dist.together(lambda job=job: flatten(
                     job.identity() | {"tests": digests(job)})).items()})
    done = dist.together(lambda: [finished(job) is not None for job in jobs])
    check_alike({f"{job.out / RESULT} is there": is_done
                 for job, is_done in zip(jobs, done, strict=True)})
    unfinished = {job.task.name: job for job, is_done in zip(jobs, done, strict=True)
                  if not is_done}
    for job in unfinished.values():
        if job.init_from and not job.initial:
            load_finetuned(job.init_from)  # says that it is gone
    check_splits(list(unfinished.values()))
    results = []
    for job in jobs:
        try:
            results.append(run(job))
        except BadStepError as error:
            results.append(_diverged(job, error))
        if job.seed == sweep.num_seeds:  # the task's last
            job.encoded.clear()
    return results


def _open_initial(sweep: Sweep) -> tuple[dict[str, str], dict[str, Finetuned]]:
    """Return the directory that each task starts from, and what was read there; one that is gone
    does not matter to runs that are finished.
    """
    places, found = {}, {}
    for name, given in sweep.init_from.items():
        place = find_finetuned(given)
        places[name] = str(place)
        if is_finetuned(place):
            found[name] = load_finetuned(place)
            start_from(sweep.start, found[name], str(place))  # said before hours of training
            if found[name].failure:
                sweep.say(f"warning: the run of {place} failed: {found[name].failure}")
    return places, found


def _check_read(sweep: Sweep, splits: Mapping[str, tuple]) -> None:
    """UserError for what is wrong with the tables; texts that two of them share are said."""
    for train, val, tests, _ in splits.values():
        readers.check_targets(train)
        readers.check_targets(val)
        for split in (val, *tests.values()):
            lost = [e.place for e in split.examples if e.group is None and is_labelled(e)]
            if lost and (column := split.task.columns.get("group")):
                raise UserError(f"{lost[0]}: no column {column!r} (group in the task file); scores "
                                "are to be shown by its values")
            shared, place = readers.count_shared(train, split)
            if shared:
                sweep.say(f"WARNING: {shared:,} of {len(split.examples):,} examples of "
                          f"{split.source} are in {train.source} too (such as {place}); their "
                          "scores say nothing about new texts")


def _settings(sweep: Sweep) -> dict[str, Settings]:
    """Return the settings of every task; a learning rate that was not given is said."""
    settings = {task.name: resolve(task, sweep.settings, sweep.start.config)
                for task in sweep.tasks}
    if by_size := [task.name for task in sweep.tasks
                   if resolve(task, sweep.settings) != settings[task.name]]:
        sweep.say(f"learning_rate of {', '.join(by_size)}: {settings[by_size[0]].learning_rate:g}, "
                  "by the size of the encoder")
    return settings


def _diverged(job: Job, error: BadStepError) -> dict:
    """Record a diverged run as failed with score 0, so that the sweep goes on and counts it."""
    job.say(f"{job.task.name} seed {job.seed}: {error}; counted as failed")
    zero = dict.fromkeys(job.task.metrics, 0.0)
    result = job.identity() | {"metrics": zero, "score": 0.0, "baseline": None, "failed": True,
                               "failure": str(error), "error": str(error), "history": [],
                               "diagnostics": {}}
    write_result(job, result)
    return result


def read_task(sweep: Sweep, task: Task, encoded: dict[int, Encoded]
              ) -> tuple[Split, Split, dict[str, Split], dict[str, Split]]:
    """Return (train, val, test splits to predict, labelled diagnostics to score) of `task`.

    Both dictionaries are by name, of an own task's test without one by the task's; the diagnostic
    of MNLI is MNLI-mm. Labelled tests are scored too.
    Under `max_bad` all are encoded here (by the id of a split), without what cannot be.
    """
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
    tests: dict[str, Split] = {}
    diagnostics: dict[str, Split] = {}
    if task.name not in TASK_NAMES:
        for place, table in task.files.items():
            if sweep.predict_test and place.startswith("test"):
                name = task.name if place == "test" else place.removeprefix(TEST)
                own = replace(task, files={"test": table})
                tests[name] = read(own, "test", place.replace("/", "."))
        return train, val, tests, diagnostics
    for test in (task, *diagnostics_of(task.name)) if sweep.predict_test else ():
        there = dist.together(lambda test=test: [
            readers.has_split(test, sweep.data, split) for split in ("val", "test")])
        check_alike({f"{test.name}: there are val and test": there})
        if test.predicted_by and there[0]:
            diagnostics[test.name] = read(test, "val")
        if not there[1]:
            sweep.say(f"{test.name}: no test split under {sweep.data}, no submission file")
            continue
        tests[test.name] = read(test, "test")
    return train, val, tests, diagnostics


def _that_fit(sweep: Sweep, task: Task, split: Split, faults: Faults, encoded: dict[int, Encoded]
              ) -> Split:
    """Return a split that `task` predicts, without what cannot be encoded, such as long texts."""
    settings = resolve(task, sweep.settings)
    features = encode_split(split, sweep.start.tokenizer, settings, sweep.say, faults)
    if lost := {*features.lost}:
        split = replace(split, examples=tuple(
            example for n, example in enumerate(split.examples) if n not in lost))
    encoded[id(split)] = features
    return split


def summarize(tasks: Sequence[Task], results: Sequence[dict]) -> dict:
    """Return {"tasks": {name: numbers over seeds}, "mean", "mean_of", "baseline_mean"}."""
    summary: dict[str, dict] = {}
    for task in tasks:
        runs = [result for result in results if result["task"] == task.name]
        if not runs:
            continue
        scores = [result["score"] for result in runs]
        summary[task.name] = {
            "score": _spread(scores),
            "metrics": {name: _spread([result["metrics"][name] for result in runs])
                        for name in task.metrics},
            "baseline": next((r["baseline"] for r in runs if r["baseline"] is not None), None),
            "seeds": len(runs),
            "score_is": score_name(task),
            "failed": sum(result["failed"] for result in runs),
            "failures": Counter(result["failure"] for result in runs if result["failed"]),
            "labels": list(task.labels),
            "diagnostics": {
                name: {metric: _spread([r["diagnostics"][name][metric] for r in runs
                                        if name in r["diagnostics"]])
                       for metric in metrics_on(task, name)}
                for name in sorted({name for result in runs for name in result["diagnostics"]})}}
    return _over_tasks(summary)


def _over_tasks(summary: dict[str, dict]) -> dict:
    suite, main = suite_of(list(summary))
    medians = [row["score"]["median"] for name, row in summary.items() if name in main]
    return {"tasks": summary, "mean": statistics.fmean(medians or [0.0]), "mean_of": len(medians),
            "suite": suite, "suite_tasks": len(main)}


def merged(sweep: Sweep, results: Sequence[dict]) -> tuple[list[dict], dict]:
    """Return (runs, their summary): `results`, and those of other tasks and seeds in the same
    directory that began from the same model; of another one, which is said, they stay where they
    are.
    """
    path, new = sweep.out / RESULTS_FILE, {(run["task"], run["seed"]) for run in results}
    before = read_json(path) if path.is_file() else {}
    runs = before.get("runs")
    old = [run for run in runs if isinstance(run, dict) and (run.get("task"), run.get("seed"))
           not in new and (sweep.out / str(run.get("task")) / f"seed-{run.get('seed')}" / RESULT
                           ).is_file()] if isinstance(runs, list) else []
    begun = {key: results[0][key] for key in ("start_weights", "tokenizer", "shape")
             if key in results[0]}
    others = [run for run in old if any(run.get(key, value) != value
                                        for key, value in begun.items())]
    if others:
        names = ", ".join(sorted({str(run["task"]) for run in others}))
        sweep.say(f"note: {path}: without {len(others)} runs of another model ({names}), whose "
                  f"results stay in {sweep.out}/TASK/seed-N")
    runs = [*(run for run in old if run not in others), *results]
    summary = summarize(sweep.tasks, runs)
    rows = before.get("tasks", {})
    kept = {name: row for name, row in rows.items() if name not in summary["tasks"]
            and any(run["task"] == name for run in runs)} if isinstance(rows, dict) else {}
    return runs, _over_tasks(kept | summary["tasks"])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(summary: Mapping, compare: Mapping | None = None) -> str:
    """Return the summary as text; `compare` is another sweep's summary for one more column."""
    rows = [("task", "majority", "compared", "median", "min", "max", "failed", "metrics (medians)")]
    for name, row in summary["tasks"].items():
        score = row["score"]
        other = compare["tasks"].get(name) if compare else None
        rows.append((
            name, percent(row["baseline"]), percent(other["score"]["median"] if other else None),
            percent(score["median"]), percent(score["min"]), percent(score["max"]),
            f"{row['failed']}/{row['seeds']}", _medians(row["metrics"])))
        for diagnostic, values in row["diagnostics"].items():
            text = f"{_medians(values)}  (by the {name} model)"
            rows.append((diagnostic, "", "", "", "", "", "", text))
    if len(summary["tasks"]) > 1:
        count, tasks, suite = (summary[key] for key in ("mean_of", "suite_tasks", "suite"))
        what = f"{suite}, all of {count}" if count == tasks else (
            f"{count} of {tasks} tasks of {suite}")
        other = percent(compare["mean"]) if compare else ""
        rows.append(("mean", "", other, percent(summary["mean"]), "", "", "", what))
    name_width = max(9, 2 + max(len(name) for name, *_ in rows))
    widths = (name_width, 9, 8 if compare else 0, 8, 7, 7, 8)
    lines = ["".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True) if width)
             + f"   {last}" for *cells, last in
             ((f"{name:<{name_width}}", *others) for name, *others in rows)]
    lines += ["", *(f"{name}: majority, median, min and max are its {row['score_is']}"
                    for name, row in summary["tasks"].items())]
    lines += [f"{name}: {count} of {row['seeds']} failed: {reason}"
              for name, row in summary["tasks"].items()
              for reason, count in row["failures"].items()]
    if any(row["failed"] for row in summary["tasks"].values()):
        lines.append("If runs fail, try another learning_rate (models from scratch need a higher "
                     "one), more\nepochs, or another seed.")
    return "\n".join(lines)


def _medians(metrics: Mapping) -> str:
    return "  ".join(f"{name} {percent(value['median'])}" for name, value in metrics.items())
