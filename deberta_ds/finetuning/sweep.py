"""Tasks x seeds: read everything first, run what is not done yet, sum up as the leaderboard does.

Per task: median, minimum and maximum over seeds, and how many runs failed (constant predictions, no
better than the majority, or diverged). Never the best seed alone.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import flatten, read_json
from deberta_ds.cluster import dist
from deberta_ds.finetuning.inputs import Job, Sweep, open_inputs, prepare
from deberta_ds.finetuning.models import RESULT, RESULTS_FILE, load_finetuned
from deberta_ds.finetuning.predict import percent
from deberta_ds.finetuning.run import finished, run, write_result
from deberta_ds.tasks.metrics import score_name
from deberta_ds.tasks.settings import Settings, resolve
from deberta_ds.tasks.task import Task, metrics_on, suite_of
from deberta_ds.training.step import BadStepError


def run_all(sweep: Sweep) -> list[dict]:
    """Return the results of every (task, seed), reading finished ones from disk."""
    for option, names in (("--init_from", sweep.init_from), ("--carve_train", sweep.carved)):
        if unknown := set(names) - {task.name for task in sweep.tasks}:
            raise UserError(f"{option} {min(unknown)}: is none of the tasks of this run, "
                            f"{', '.join(task.name for task in sweep.tasks)}")
    settings, jobs = _settings(sweep), []
    for task in sweep.tasks:
        opened = open_inputs(sweep, task)
        *_, tables, initial = opened
        jobs += [Job(task=task, seed=seed, settings=settings[task.name], start=sweep.start,
                     tables=tables.value, out=sweep.out / task.name / f"seed-{seed}",
                     deepspeed=sweep.deepspeed, device=sweep.device, inputs=opened,
                     init_from=initial.value[0], initial=initial.value[1],
                     keep_model=sweep.keep_models, show_scores=sweep.show_scores, say=sweep.say)
                 for seed in range(1, sweep.num_seeds + 1)]
    dist.check_alike({f"{job.task.name} {key}": value for job in jobs[::sweep.num_seeds]
                      for key, value in flatten(
                          job.identity | {"DeepSpeed JSON": job.deepspeed.as_dict()}).items()})
    done = dist.together(lambda: [finished(job) is not None for job in jobs])
    dist.check_alike({f"{job.out / RESULT} is there": is_done
                      for job, is_done in zip(jobs, done, strict=True)})
    unfinished = {job.task.name: job for job, is_done in zip(jobs, done, strict=True)
                  if not is_done}
    for job in unfinished.values():
        if job.init_from and not job.initial:
            load_finetuned(job.init_from)  # says that it is gone
    prepare(list(unfinished.values()))
    results = []
    for job in jobs:
        try:
            results.append(run(job))
        except BadStepError as error:
            results.append(_diverged(job, error))
        if job.seed == sweep.num_seeds:  # the task's last
            job.tables.encoded.clear()
    return results


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
    result = job.identity | {"metrics": zero, "score": 0.0, "baseline": None, "failed": True,
                               "failure": str(error), "error": str(error), "history": [],
                               "diagnostics": {}}
    write_result(job, result)
    return result


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
