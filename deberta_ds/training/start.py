"""Start a run: join the group, check the run, lock out_dir, open the inputs, build the engine."""

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deberta_ds.base import user_code
from deberta_ds.base.errors import EXIT_REQUEUE, ConfigError, UserError, listed, raise_problems
from deberta_ds.base.files import flatten, write_atomic
from deberta_ds.base.numbers import counted, format_count
from deberta_ds.base.version import __version__
from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import BEST, RunRecord, read_run_record
from deberta_ds.checkpoint.save import set_aside
from deberta_ds.checkpoint.upload import check_owner
from deberta_ds.cluster import dist, lock, signals
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config import run_config
from deberta_ds.config.model import RANDOM, ModelConfig
from deberta_ds.config.run_config import RunConfig, SourceConfig
from deberta_ds.engine import ds_config, engine, passes
from deberta_ds.engine.ds_config import CompleteConfig, DeepSpeedConfig
from deberta_ds.engine.engine import local_device
from deberta_ds.engine.optim import thaw_factor
from deberta_ds.engine.passes import Engine
from deberta_ds.engine.state import CheckpointError
from deberta_ds.model import choose, cpu
from deberta_ds.model.precision import DTYPES
from deberta_ds.objectives.build import held_parameters, metrics_of, objective_problems
from deberta_ds.release.initialize import has_other_tokens, initial_tensors, shape_differences
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tracking import trackers
from deberta_ds.tracking.log import RunLog, non_default_texts
from deberta_ds.training import best, meters
from deberta_ds.training.inputs import Inputs, check_identity, open_inputs

_PACKAGES = ("torch", "deepspeed", "numpy", "sentencepiece")


@dataclass(frozen=True)
class Started:
    """A run that is ready for its next step."""

    found: find.Found
    record: RunRecord | None  # run.json of the checkpoint that was loaded; None at step 0
    inputs: Inputs
    log: RunLog
    stop_request: signals.StopRequest
    engine: Engine
    lost_before: float  # seconds that earlier starts took, and the steps that they lost
    lost_now: float  # the same of this start
    kernels: str  # which were chosen, in a line


@contextmanager
def start(run: RunConfig, ds: DeepSpeedConfig, *, resume: str, place: str,
          origins: dict[str, str], watchdog: Watchdog,
          callbacks: Sequence[Callable[[dict], None]] = ()) -> Iterator[Started]:
    """Yield a started run, and hold its out_dir until the end; call on every rank.

    Raises UserError, on every rank.
    """
    warnings, kernels, complete = join_group(
        run, ds, place, {"--resume": resume, "--check": False})
    stop_request = signals.listen()  # before, a signal ends the process
    stop_request.leave = partial(_leave, run.out_dir)
    with lock.held(run.out_dir):
        watchdog.join()
        found, record, inputs = open_run(run, complete, place, resume)
        if run.train.upload:
            dist.on_main(lambda: check_owner(run.out_dir, run.train.upload, resume, claims=True))
        lines = [*describe(run, inputs, origins, kernels), *warnings, *found.warnings]
        log = dist.together(lambda: _open_log(run, callbacks))
        for line in lines:
            log.info(line)
        dist.on_main(lambda: write_config(run, inputs, origins, kernels))
        model_engine = build(run, inputs, record, log.info)
        if record:
            restore(run, inputs, found, record, model_engine, log)
        before, now = dist.together(lambda: meters.lost_seconds(log.path, record))
        dist.together(lambda: log.truncate(record.step if record else 0))
        stop_request.leave = None  # the loop looks
        dist.barrier()
        dist.end_alarm()  # from here on the watchdog sees who fails
        watchdog.start_at(record.step if record else 0)
        yield Started(found, record, inputs, log, stop_request, model_engine, before, now,
                      choose.in_a_line(kernels))


def _open_log(run: RunConfig, callbacks: Sequence[Callable[[dict], None]]) -> RunLog:
    track = [*trackers.trackers_of(run.log), *map(trackers.callback, callbacks)]
    return RunLog(run.out_dir, dist.is_main(), metrics=metrics_of(run),
                  total_steps=run.train.steps, track=track)


def _leave(out_dir: str) -> None:
    """End all ranks in the middle of a start: there is nothing to save."""
    signals.record(EXIT_REQUEUE)
    lock.release(out_dir)
    dist.sound_alarm("asked to stop", EXIT_REQUEUE)
    os._exit(EXIT_REQUEUE)


def join_group(run: RunConfig, ds: DeepSpeedConfig, place: str, asked: dict[str, Any] | None = None
               ) -> tuple[list[str], dict[str, dict[str, str]], CompleteConfig]:
    """Join the process group, check what can be checked without the inputs; return (warnings,
    `kernel_choices`, what DeepSpeed gets).

    `place` names the run file in errors; `asked`: what else was asked on the command line. Raises
    UserError, on every rank.
    """
    warnings = engine.check_machine(ds, place)
    join(run_config.to_dict(run) | (asked or {}) | {
        "DeepSpeed JSON": ds.as_dict(), "out_dir, absolute": os.path.abspath(run.out_dir)})
    kernels = agreed_kernels(partial(kernel_choices, run.model, ds))
    complete = dist.together(lambda: check_run(run, ds, dist.world_size(), place))
    if local_device().type == "cpu":
        cpu.use_onednn()
    elif run.train.tf32:
        torch.set_float32_matmul_precision("high")
    return warnings, kernels, complete


def join(asked: dict[str, Any]) -> torch.device:
    """Join the process group and return this rank's device; UserError on every rank if they were
    `asked` for different things.
    """
    asked = {"version of": versions()} | asked
    device = engine.init_distributed()
    dist.check_alike(asked)
    return device


def agreed_kernels(choose: Callable[[], Any]) -> Any:
    """Return what `choose` says of the kernels on this rank, which the first one of each node
    checks. UserError on every rank if a kernel fails its check on any node.
    """
    dist.together(lambda: choose() if dist.local_rank() == 0 else None)
    return dist.together(choose)


def kernel_choices(model: ModelConfig, ds: DeepSpeedConfig, without: tuple[str, ...] = ()
                   ) -> dict[str, dict[str, str]]:
    """Return which implementation of each part of a model this rank takes, and why."""
    return choose.choices(model, local_device(), DTYPES[ds.precision],
                          DTYPES[ds.matmul_precision], ds.stage, without)


def versions() -> dict[str, str]:
    """Return the versions that decide a run's numbers."""
    found = {name: metadata.version(name) for name in _PACKAGES}
    return {"deberta_ds": __version__, "python": platform.python_version()} | found


def check_run(run: RunConfig, ds: DeepSpeedConfig, world_size: int, place: str) -> CompleteConfig:
    """Return what DeepSpeed gets for a run. Raises ConfigError with every cross problem,
    but for those of its inputs.
    """
    on_nvme = any(ds.offload(name).nvme_path for name in ds_config.OFFLOADS)
    problems = [*user_code.problems(run), *objective_problems(run, on_nvme)]
    if run.train.best_metric or run.train.patience:
        problems += best.problems(run)
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
    if run.evaluate.minimal_pairs and not run.data.heldout:
        problems.append("evaluate.minimal_pairs needs evaluations, and without data.heldout there "
                        "are none; set data.heldout, or leave evaluate.minimal_pairs out")
    if optim.warmup_steps > train.steps:
        problems.append(f"optim.warmup_steps = {optim.warmup_steps}: more than train.steps = "
                        f"{train.steps}")
    if train.batch_warmup_steps > train.steps:
        problems.append(f"train.batch_warmup_steps = {train.batch_warmup_steps}: more than "
                        f"train.steps = {train.steps}")
    problems += ds_config.problems_on_this_node(ds)
    problems += ds_config.problems_with_optimizer(optim.name, ds)
    if train.after_update and ds.offload().device == "nvme":
        problems.append("train.after_update: its functions get weights in memory, and those of "
                        "offload_optimizer are on NVMe; leave one of the two out")
    if train.cuda_graph == "on" and (found := passes.graph_obstacle(run, ds, engine.device_type())):
        problems.append(f"train.cuda_graph = 'on': {found}; or write train.cuda_graph = \"auto\"")
    raise_problems(place, problems)
    return ds_config.resolve(run, ds, world_size)


def open_run(run: RunConfig, ds: CompleteConfig, place: str, resume: str
             ) -> tuple[find.Found, RunRecord | None, Inputs]:
    """Find where the run goes on, open its inputs and check them; the group is joined.

    Returns what was found, its run.json (None at step 0) and the inputs. Raises UserError, on every
    rank.
    """
    dist.on_main(lambda: check_link(run))
    found = find.find(run.out_dir, resume)
    record = dist.together(lambda: read_run_record(found.path) if found.path else None)
    inputs = open_inputs(run, ds, place, record.step if record else 0)
    if record:
        lines = check_identity(run, inputs.identity, record, str(found.path))
        found = replace(found, warnings=(*found.warnings, *lines))
    return found, record, inputs


def check_link(run: RunConfig) -> None:
    """Raise UserError if OUT/best is something else than our link."""
    link = Path(run.out_dir) / BEST
    if run.train.best_metric and link.exists() and not link.is_symlink():
        raise UserError(f"train.best_metric: {link} is in the way of the link to the best "
                        "checkpoint; rename it")


def describe(run: RunConfig, inputs: Inputs, origins: dict[str, str],
             kernels: dict[str, dict[str, str]]) -> list[str]:
    """Return what a user wants to know at the start: non-default values, the model, the inputs."""
    precision = inputs.ds.precision
    if (matmuls := inputs.ds.matmul_precision) != precision:
        precision += f" weights with {matmuls} matmuls"
    if run.train.tf32 and local_device().type == "cuda":
        precision += ", fp32 matmuls in TF32"
    size = format_count(sum(inputs.sizes.values()))
    lines = [f"{run.objective.kind} model: {size} parameters, ZeRO-{inputs.ds.stage}, {precision}, "
             f"{counted(dist.world_size(), 'rank')}", f"kernels: {choose.in_a_line(kernels)}",
             *frozen_lines(run, inputs.sizes, precision)]
    first, full = run.train.initial_batch_size, run.train.global_batch_size
    if first:
        lines.append(f"batch size warm-up: from {first:,} to {full:,} sequences in "
                     f"{run.train.batch_warmup_steps:,} of {run.train.steps:,} steps")
    values, usual = run_config.to_dict(run), run_config.to_dict(SourceConfig(path=" "))
    for source in values["data"]["sources"]:
        for key in [key for key in source if source[key] == usual[key]]:
            del source[key]
    return [*non_default_texts(flatten(values), origins, "run"), *lines, *inputs.lines]


def frozen_lines(run: RunConfig, sizes: dict[str, int], precision: str) -> list[str]:
    """Return how much is not trained, and until when; `sizes` are those of the parameters."""
    frozen, waiting = held_parameters(run, sizes)
    lines = [f"frozen {until}: {format_count(sum(sizes[name] for name in names))} parameters"
             for until, names in (("all along", frozen),
                                  (f"before step {run.train.freeze_steps:,}", waiting)) if names]
    if waiting and run.optim.name in ("adamw", "muon") and (
            factor := thaw_factor(run.optim, run.train.freeze_steps)) > 1.05:
        lines.append(f"{'WARNING: ' * (factor > 2)}train.freeze_steps: with optim.betas = "
                     f"{list(run.optim.betas)} the first updates of what was frozen are up to "
                     f"{factor:.1f} learning rates; a smaller second beta lowers it")
    if frozen and not precision.startswith("fp32"):
        lines.append(f"WARNING: frozen parts have no fp32 copy and are rounded to {precision}, in "
                     "exports too; to keep them, write torch_autocast for it in the DeepSpeed JSON")
    return lines


def write_config(run: RunConfig, inputs: Inputs, origins: dict[str, str],
                 kernels: dict[str, dict[str, str]]) -> None:
    """Write OUT/config.json: the run, DeepSpeed dict, origins, versions, data. Rank 0 alone."""
    record = {"run": run_config.to_dict(run), "deepspeed": inputs.ds.as_dict(), "origins": origins,
              "versions": versions(), "content_hashes": inputs.identity,
              "world_size": dist.world_size(), "parameters": sum(inputs.sizes.values()),
              "kernels": kernels,
              "hardware": meters.hardware(local_device()),
              "device": local_device().type, **meters.source()}
    write_atomic(Path(run.out_dir) / "config.json", json.dumps(record, indent=1) + "\n")


def build(run: RunConfig, inputs: Inputs, record: RunRecord | None, say: Callable[[str], None]):
    """Return the engine of a run, with the weights of `[init]` unless it goes on from `record`."""
    tensors, notes = ({}, []) if record else first_weights(run, inputs.tokenizer)
    for line in notes:
        say(line)
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size, tensors)
    if run.init.moments and not record:
        say(f"init: optimizer state of {take_moments(run, inputs, model_engine)}")
    return model_engine


def first_weights(run: RunConfig, tokenizer: Tokenizer) -> tuple[dict[str, Tensor], list[str]]:
    """Return what `[init] from` gives, on rank 0; DeepSpeed hands rank 0's weights to the others.

    A resumed run does not need it.
    """
    is_random = run.init.source.startswith(RANDOM)
    if is_random or not (run.init.source or run.init.generator):
        return {}, [f"init: {run.init.source}: its shape, and random weights"] * is_random
    return dist.together(lambda: initial_tensors(run, tokenizer) if dist.is_main() else ({}, []))


def restore(run: RunConfig, inputs: Inputs, found: find.Found, record: RunRecord,
            model_engine, log: RunLog) -> None:
    """Load the checkpoint that was found into the engine, and say what differs."""
    assert found.path is not None  # where `record` is from
    saved_state.load_state(model_engine, found.path)
    if change := find.layout_changes(record, inputs.ds):
        log.info(f"resumed in another layout: {change}")
    mask, others = run.objective.mask, []
    if max(run.model.hidden_dropout, run.model.attention_dropout):
        others.append("dropout drops other elements")
    if mask.random_share and mask.selection != "deberta_window":
        others.append("random tokens of masks are any ids")
    if others and "cuda_graph" not in record.config["train"]:
        log.info(f"the checkpoint is of version 0.2.0, whose {' and '.join(others)}: the run goes "
                 "on from it, but not bit for bit as 0.2.0 would")
    for line in dist.together(lambda: set_aside(run.out_dir, record.step)
                              if dist.is_main() else []):
        log.info(line)


def take_moments(run: RunConfig, inputs: Inputs, model_engine) -> Path:
    """Load the source of [init] with its optimizer's state, bit for bit; return the checkpoint."""
    def opened() -> Path:
        try:
            path = find.newest(run.init.source)
            saved = read_run_record(path).run(path)
        except CheckpointError as error:
            raise CheckpointError(f"init.moments = true needs a checkpoint of this project, with "
                                  f"its optimizer's state: {error}; or leave init.moments out"
                                  ) from None
        if saved.optim.name != run.optim.name:
            raise CheckpointError(f"init.moments = true: {path} has the state of optim.name = "
                                  f"{saved.optim.name!r}, the run has {run.optim.name!r}; set it "
                                  "as there, or leave init.moments out")
        others = shape_differences(run.model, saved.model)
        if has_other_tokens(run.init.source, inputs.tokenizer):
            others.append(f"data.tokenizer = {run.data.tokenizer} (source: other tokens)")
        names = [name for name, _ in model_engine.module.named_parameters()]
        if held_parameters(saved, names)[0] - held_parameters(run, names)[0]:
            others.append("train.freeze (source: more is frozen, and has no state)")
        if others:  # the tensors of the source would take the place of what [init] made of them
            raise CheckpointError(f"init.moments = true: {path} is of another model: "
                                  f"{'; '.join(others)}; leave init.moments out")
        return path

    path = dist.broadcast_object(dist.together(opened))  # a run that goes on may have saved since
    if problems := find.problems_of(path):
        raise CheckpointError(f"{path}: not a whole checkpoint: {listed(problems)}")
    try:
        saved_state.load_state(model_engine, path, is_other_run=True)
    except UserError as error:
        raise CheckpointError(f"init.moments = true: {error}; leave init.moments out") from None
    return path
