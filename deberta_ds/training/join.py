"""Join the process group, check a run and its kernels, and compare what was asked of every rank."""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

import torch

from deberta_ds.base.errors import UserError, listed
from deberta_ds.base.user_code import short_name
from deberta_ds.base.version import __version__
from deberta_ds.cluster import dist
from deberta_ds.config import run_config, user_functions
from deberta_ds.config.model import RANDOM, ModelConfig
from deberta_ds.config.options import ConfigError, raise_problems
from deberta_ds.config.run_config import RunConfig
from deberta_ds.config.toml_files import flatten
from deberta_ds.engine import ds_config, engine, passes
from deberta_ds.engine.engine import check_deepspeed, local_device
from deberta_ds.model import cpu
from deberta_ds.model.choose import choices
from deberta_ds.model.kernels import kernel_check
from deberta_ds.model.precision import DTYPES
from deberta_ds.objectives.base import MINIMAL_PAIRS
from deberta_ds.objectives.build import freeze_problems, objective_of
from deberta_ds.training import best

_PACKAGES = ("torch", "deepspeed", "numpy", "sentencepiece")


def join_group(run: RunConfig, ds_values: dict, place: str, asked: dict[str, Any] | None = None
               ) -> list[str]:
    """Join the process group, check what can be checked without the inputs; return warnings.

    `ds_values` is a DeepSpeed JSON, `place` names the run file in errors; `asked`: what else was
    asked on the command line. Raises UserError, on every rank.
    """
    warnings = check_deepspeed(ds_values, place)
    choose = partial(kernel_choices, run.model, ds_values, run.data.seq_len)
    engine.prepare_rank()
    if dist.local_rank() == 0:  # checks them before the group is there: that may take a minute
        with suppress(UserError):  # raised below, on every rank
            choose()
    join(flatten(run_config.to_dict(run)) | (asked or {}) | {
        "out_dir, absolute": os.path.abspath(run.out_dir)} | {
        f"{key} of the DeepSpeed JSON": value for key, value in flatten(ds_values).items()})
    agreed_kernels(choose)
    dist.together(lambda: check_run(run, ds_values, dist.world_size(), place))
    if local_device().type == "cpu":
        cpu.use_onednn()
    elif run.train.tf32:
        torch.set_float32_matmul_precision("high")
    return warnings


def join(asked: dict[str, Any]) -> None:
    """Join the process group; UserError on every rank if they were `asked` for different things."""
    engine.init_distributed()
    check_alike(asked | {f"version of {name}": version for name, version in versions().items()})


def agreed_kernels(choose: Callable[[], Any]) -> Any:
    """Return what `choose` says of the kernels on this rank, which the first one of each node
    checks. UserError on every rank if a kernel fails its check on any node.
    """
    if dist.local_rank() == 0:
        with suppress(UserError):
            choose()
    for found in dist.gather_objects(kernel_check.verdicts):
        kernel_check.merge(found)
    return dist.together(choose)


def kernel_choices(model: ModelConfig, ds: dict, length: int, without: tuple[str, ...] = ()
                   ) -> dict[str, dict[str, str]]:
    """Return which implementation of each part of a model this rank takes, and why."""
    weights = DTYPES[ds_config.precision(ds)]
    matmuls = DTYPES[ds_config.matmul_precision(ds)]
    return choices(model, local_device(), weights, matmuls, length,
                                ds_config.zero_stage(ds), without)


def versions() -> dict[str, str]:
    """Return the versions that decide a run's numbers."""
    found = {name: metadata.version(name) for name in _PACKAGES}
    return {"deberta_ds": __version__, "python": platform.python_version()} | found


def check_run(run: RunConfig, ds: dict, world_size: int, place: str) -> None:
    """Raise ConfigError with every cross problem of a run, but for those of its inputs."""
    problems = user_functions.problems(run)
    if run.init.embeddings_only and run.init.source.startswith(RANDOM):
        problems.append("init.embeddings_only needs weights; leave random: out of init.from")
    try:
        ds_config.accumulation_steps(run, world_size)
    except ConfigError as error:
        problems.append(str(error))
    model, train, optim = run.model, run.train, run.optim
    if run.data.seq_len > model.max_position:
        problems.append(f"data.seq_len = {run.data.seq_len}: above model.max_position = "
                        f"{model.max_position}, the longest sequence of the model")
    problems += objective_of(run).problems(run)
    scores = [*(metric.key for metric in objective_of(run).METRICS), MINIMAL_PAIRS.key,
              *map(short_name, run.evaluate.metrics)]
    problems += [f"evaluate.metrics: {name} is the name of another score; call the function "
                 "otherwise" for name in {name for name in scores if scores.count(name) > 1}]
    if run.evaluate.minimal_pairs and not run.data.heldout:
        problems.append("evaluate.minimal_pairs needs evaluations, and without data.heldout there "
                        "are none; set data.heldout, or leave evaluate.minimal_pairs out")
    problems += best.problems(run)
    if optim.warmup_steps > train.steps:
        problems.append(f"optim.warmup_steps = {optim.warmup_steps}: more than train.steps = "
                        f"{train.steps}")
    if train.batch_warmup_steps > train.steps:
        problems.append(f"train.batch_warmup_steps = {train.batch_warmup_steps}: more than "
                        f"train.steps = {train.steps}")
    problems += freeze_problems(run, ds)
    problems += ds_config.problems_on_this_node(ds)
    problems += ds_config.problems_with_optimizer(optim.name, ds)
    if train.cuda_graph == "on" and (found := passes.obstacle(run, ds, engine.device_type())):
        problems.append(f"train.cuda_graph = 'on': {found}; or write train.cuda_graph = \"auto\"")
    raise_problems(place, problems)


def check_alike(values: dict[str, Any]) -> None:
    """Raise ConfigError on every rank, with the differences, unless all ranks have `values`."""
    text = json.dumps(values, sort_keys=True, default=str)
    if len(set(dist.gather_objects(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    mine, first = json.loads(text), json.loads(dist.broadcast_object(text))
    lines = [f"rank {dist.rank()} on {socket.gethostname()}: {key} = {mine.get(key, 'not set')!r}, "
             f"on rank 0 {first.get(key, 'not set')!r}"
             for key in sorted(mine.keys() | first.keys()) if mine.get(key) != first.get(key)]
    found = [line for part in dist.gather_objects(lines) for line in part]
    raise ConfigError("the ranks of this job are not one run: another job may use its port, or a "
                      "node has other files or options. Start all ranks with the same: "
                      + listed(found))
