"""Join the process group, check the kernels, and compare what was asked of every rank."""

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.version import __version__
from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.config.model import ModelConfig
from deberta_ds.config.run_config import RunConfig
from deberta_ds.config.toml_files import flatten
from deberta_ds.engine import ds_config, engine
from deberta_ds.engine.engine import check_deepspeed, local_device
from deberta_ds.model import cpu
from deberta_ds.model.choose import choices
from deberta_ds.model.kernels import kernel_check
from deberta_ds.model.precision import DTYPES
from deberta_ds.training.check import check_alike, check_run

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
