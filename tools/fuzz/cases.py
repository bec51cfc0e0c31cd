"""The classes of broken input: each makes one case in a directory that holds whole inputs."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from tools.fuzz import (
    cases_data,
    cases_model,
    cases_options,
    cases_paths,
    cases_run,
    cases_task,
)
from tools.fuzz.case import Case

CLASSES: dict[str, Callable[[Random, Path], Case]] = {
    function.__name__: function for function in (
        cases_run.run_file, cases_run.override, cases_run.deepspeed_json, cases_run.environment,
        cases_data.corpus, cases_data.shards, cases_data.replaced, cases_data.findings,
        cases_data.remote, cases_data.filters, cases_data.against, cases_data.pairs,
        cases_data.tokenizer,
        cases_model.checkpoint, cases_model.model,
        cases_model.microsoft, cases_model.official, cases_model.ours,
        cases_task.task, cases_task.own_task_file, cases_task.settings_file, cases_task.results,
        cases_task.submission, cases_task.finetuned, cases_task.page, cases_paths.paths,
        cases_options.options)}
