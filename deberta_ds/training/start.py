"""Start a run: join the process group, lock out_dir, open the inputs, build the engine."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from deberta_ds.base.errors import EXIT_REQUEUE, UserError, listed
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import counted, format_count
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.run_record import RunRecord, read_run_record
from deberta_ds.checkpoint.save import set_aside
from deberta_ds.checkpoint.upload import check_owner
from deberta_ds.cluster import alarm, dist, lock, signals
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config import batch_schedule, run_config
from deberta_ds.config.model import RANDOM
from deberta_ds.config.options import raise_problems
from deberta_ds.config.run_config import FREE_FIELDS, RunConfig, SourceConfig
from deberta_ds.config.toml_files import flatten, non_default_texts
from deberta_ds.engine import ds_config, engine
from deberta_ds.engine.layout import CheckpointError
from deberta_ds.engine.optim import learning_rate, thaw_factor
from deberta_ds.engine.state import check_restorable
from deberta_ds.model import choose
from deberta_ds.model.backbone import on_meta
from deberta_ds.objectives.base import MINIMAL_PAIRS, own_metrics
from deberta_ds.objectives.build import build_model, held_parameters, objective_of
from deberta_ds.release.initialize import initial_tensors, shape_differences
from deberta_ds.release.vocabulary import has_other_tokens
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tracking import trackers
from deberta_ds.tracking.log import RunLog
from deberta_ds.training import meters
from deberta_ds.training.best import check_link
from deberta_ds.training.inputs import Inputs, open_inputs
from deberta_ds.training.join import join_group, kernel_choices, versions


@dataclass(frozen=True)
class Started:
    """A run that is ready for its next step."""

    found: find.Found
    record: RunRecord | None  # run.json of the checkpoint that was loaded; None at step 0
    inputs: Inputs
    log: RunLog
    stop_request: signals.StopRequest
    engine: Any  # DeepSpeed's, which has no types
    lost_before: float  # seconds that earlier starts took, and the steps that they lost
    lost_now: float  # the same of this start


@contextmanager
def start(run: RunConfig, ds_values: dict, *, resume: str, place: str, origins: dict[str, str],
          watchdog: Watchdog, callbacks: Sequence[Callable[[dict], None]] = ()
          ) -> Iterator[Started]:
    """Yield a started run, and hold its out_dir until the end; call on every rank.

    Raises UserError, on every rank.
    """
    warnings = join_group(run, ds_values, place, {"--resume": resume, "--check": False})
    stop_request = signals.listen()  # before, a signal ends the process
    stop_request.leave = partial(_leave, run.out_dir)
    with lock.held(run.out_dir):
        watchdog.join()
        found, record, inputs = open_run(run, ds_values, place, resume)
        if run.train.upload:
            dist.on_main(lambda: check_owner(run.out_dir, run.train.upload, resume, claims=True))
        log = dist.together(lambda: RunLog(
            run.out_dir, dist.is_main(), metrics=(*objective_of(run).METRICS, MINIMAL_PAIRS,
                                                  *own_metrics(run.evaluate.metrics)),
            total_steps=run.train.steps, track=[*trackers.chosen(run.log),
                                               *map(trackers.callback, callbacks)]))
        for line in (*describe(run, inputs, origins), *warnings, *found.warnings()):
            log.info(line)
        dist.on_main(lambda: write_config(run, inputs, origins))
        model_engine = build(run, inputs, record, log.info)
        if record:
            _restore(run, inputs, found, record, model_engine, log)
        before, now = dist.together(lambda: meters.lost_seconds(log.path, record))
        dist.together(lambda: log.truncate(record.step if record else 0))
        stop_request.leave = None  # the loop looks
        dist.barrier()
        alarm.end()  # from here on the watchdog sees who fails
        yield Started(found, record, inputs, log, stop_request, model_engine, before, now)


def _leave(out_dir: str) -> None:
    """End all ranks in the middle of a start: there is nothing to save."""
    signals.record(EXIT_REQUEUE)
    lock.release(out_dir)
    alarm.sound("asked to stop", EXIT_REQUEUE)
    os._exit(EXIT_REQUEUE)


def open_run(run: RunConfig, ds_values: dict, place: str, resume: str
             ) -> tuple[find.Found, RunRecord | None, Inputs]:
    """Find where the run goes on, open its inputs and check them; the group is joined.

    Returns what was found, its run.json (None at step 0) and the inputs. Raises UserError, on every
    rank.
    """
    found = find.find(run.out_dir, resume)
    record = dist.together(lambda: read_run_record(found.path) if found.path else None)

    def check() -> None:
        raise_problems(place, batch_schedule.problems_with_ranks(
            run.train, dist.world_size(), record.step if record else 0))
        check_link(run)

    dist.together(check)
    inputs = open_inputs(run, ds_values, place)
    if record:
        measured = check_identity(run, inputs.identity(), record, str(found.path))
        found = replace(found, skipped=(*found.skipped, *measured))
    return found, record, inputs


def describe(run: RunConfig, inputs: Inputs, origins: dict[str, str]) -> list[str]:
    """Return what a user wants to know at the start: non-default values, the model, the inputs."""
    values, usual = run_config.to_dict(run), run_config.to_dict(SourceConfig(path=" "))
    for source in values["data"]["sources"]:
        for key in [key for key in source if source[key] == usual[key]]:
            del source[key]
    lines = non_default_texts(values, origins, "run")
    stage, precision = ds_config.zero_stage(inputs.ds), ds_config.precision(inputs.ds)
    matmuls = ds_config.matmul_precision(inputs.ds)
    if matmuls != precision:
        precision += f" weights with {matmuls} matmuls"
    if run.train.tf32 and engine.local_device().type == "cuda":
        precision += ", fp32 matmuls in TF32"
    lines.append(f"{run.objective.kind} model: {format_count(inputs.num_parameters)} parameters, "
                 f"ZeRO-{stage}, {precision}, {counted(dist.world_size(), 'rank')}")
    lines.append(f"kernels: {kernels_of(run, inputs.ds)}")
    lines += frozen_lines(run, precision)
    first, full = run.train.initial_batch_size, run.train.global_batch_size
    if first:
        lines.append(f"batch size warm-up: from {first:,} to {full:,} sequences in "
                     f"{run.train.batch_warmup_steps:,} of {run.train.steps:,} steps")
    return lines + [line for one in inputs.opened.values() for line in one.lines]


def frozen_lines(run: RunConfig, precision: str) -> list[str]:
    """Return how much is not trained, and until when."""
    sizes = {name: p.numel() for name, p in on_meta(build_model, run).named_parameters()}
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


def kernels_of(run: RunConfig, ds: dict) -> str:
    """Return `kernel_choices` of a run as one line."""
    return choose.in_a_line(kernel_choices(run.model, ds, run.data.seq_len))


def write_config(run: RunConfig, inputs: Inputs, origins: dict[str, str]) -> None:
    """Write OUT/config.json: the run, DeepSpeed dict, origins, versions, data. Rank 0 alone."""
    record = {"run": run_config.to_dict(run), "deepspeed": inputs.ds, "origins": origins,
              "versions": versions(), "content_hashes": inputs.identity(),
              "world_size": dist.world_size(), "parameters": inputs.num_parameters,
              "kernels": kernel_choices(run.model, inputs.ds, run.data.seq_len),
              "hardware": meters.hardware(engine.local_device()),
              "device": engine.local_device().type, **meters.source()}
    write_atomic(Path(run.out_dir) / "config.json", json.dumps(record, indent=1) + "\n")


def build(run: RunConfig, inputs: Inputs, record: RunRecord | None, say: Callable[[str], None]):
    """Return the engine of a run, with the weights of `[init]` unless it goes on from `record`."""
    tensors, notes = ({}, []) if record else first_weights(run, inputs.tokenizer)
    for line in notes:
        say(line)
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size, tensors,
                                                   say)
    check_restorable(model_engine)
    if run.init.moments and not record:
        say(f"init: optimizer state of {_take_moments(run, inputs, model_engine)}")
    return model_engine


def _take_moments(run: RunConfig, inputs: Inputs, model_engine) -> Path:
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
        find.load(model_engine, path, is_other_run=True)
    except UserError as error:
        raise CheckpointError(f"init.moments = true: {error}; leave init.moments out") from None
    return path


def _restore(run: RunConfig, inputs: Inputs, found: find.Found, record: RunRecord,
             model_engine, log: RunLog) -> None:
    assert found.path is not None  # where `record` is from
    find.load(model_engine, found.path)
    if change := find.layout_changes(record, inputs.ds):
        log.info(f"resumed in another layout: {change}")
    mask, others = run.objective.mask, []
    if max(run.model.hidden_dropout, run.model.attention_dropout):
        others.append("dropout drops other elements")
    if mask.random_share and mask.selection != "deberta_window":
        others.append("masks draw random tokens among all ids")
    if others and "cuda_graph" not in record.config["train"]:
        log.info(f"the checkpoint is of version 0.2.0, whose {' and '.join(others)}: the run goes "
                 "on from it, but not bit for bit as 0.2.0 would")
    for line in changed_values(run, record):
        log.info(f"changed since the checkpoint: {line}")
    for line in dist.together(lambda: set_aside(run.out_dir, record.step)
                              if dist.is_main() else []):
        log.info(line)


def first_weights(run: RunConfig, tokenizer: Tokenizer) -> tuple[dict[str, Tensor], list[str]]:
    """Return what `[init] from` gives, on rank 0; DeepSpeed hands rank 0's weights to the others.

    A resumed run does not need it.
    """
    is_random = run.init.source.startswith(RANDOM)
    if is_random or not (run.init.source or run.init.generator):
        return {}, [f"init: {run.init.source}: its shape, and random weights"] * is_random
    return dist.together(lambda: initial_tensors(run, tokenizer) if dist.is_main() else ({}, []))


MEASURED = ("held-out ", "minimal pairs")  # names of inputs that decide scores, not weights


def check_identity(run: RunConfig, identity: dict[str, str], record: RunRecord, place: str
                   ) -> list[str]:
    """Raise CheckpointError with a diff if a checkpoint's run.json is of another run; return lines
    on what is measured with other data now.

    Inputs are what is in their files, wherever these lie: `identity` is compared with the saved
    one, the paths are not.
    """
    now, then = _now_and_then(run, record)
    saved = {"tokenizer": record.tokenizer_sha256} | record.content_hashes
    lines = [_difference(key, *(json.dumps(values.get(key), ensure_ascii=False)
                               for values in (then, now)))
             for key in sorted(now.keys() | then.keys())
             if now.get(key) != then.get(key) and _decides_weights(key)]
    sources = itertools.zip_longest(
        _described_sources(then["data.sources"], saved),
        _described_sources(now["data.sources"], identity), fillvalue=("none", "none"))
    lines += [_difference(f"data.sources[{number}]", *map(": ".join, pair))
              for number, pair in enumerate(sources) if pair[0][1] != pair[1][1]]
    others = {name: (saved[name], digest) for name, digest in identity.items()
              if name in saved and saved[name] != digest
              and name not in [source.path for source in run.data.sources]}
    measured = [name for name in others if name.startswith(MEASURED)
                or name in run.evaluate.metrics]
    lines += [_difference(*_named(name, then, now, *others[name]))
              for name in others if name not in measured]
    if lines:
        raise CheckpointError(
            f"{place} is of another run (- saved, + now):\n  " + "\n  ".join(lines)
            + "\n  change these back, or use another out_dir: for a new run, or to go on from here "
            f'with other data, with [init] from = "{place}" and moments = true')
    return [f"{name}: other content, {others[name][0][:12]} -> {others[name][1][:12]}: its scores "
            "are not those of before" for name in measured]


def _named(name: str, then: dict, now: dict, saved: str, digest: str) -> tuple[str, str, str]:
    key, before, after = (f"data.{name}", f"{then['data.tokenizer']}, ",
                          f"{now['data.tokenizer']}, ") if name == "tokenizer" else (name, "", "")
    return key, f"{before}sha256 {saved}", f"{after}sha256 {digest}"


def _difference(key: str, then: str, now: str) -> str:
    return f"- {key} = {then}\n  + {key} = {now}"


def _described_sources(
        sources: list[dict], content_hashes: dict[str, str]) -> list[tuple[str, str]]:
    """Return (path, everything else that decides its rows) of each source, in order."""
    return [(source["path"], json.dumps(
        {"content_hash": content_hashes.get(source["path"])}
        | {key: value for key, value in source.items()
           if key not in ("path", "replaced")})) for source in sources]  # known by content_hash


_JUMP = 1.5  # of the learning rate, of which a resumed run warns


def changed_values(run: RunConfig, record: RunRecord) -> list[str]:
    """Return "key: then -> now" for values that may change on resume and did."""
    now, then = _now_and_then(run, record)
    lines = [f"{key}: {then.get(key)} -> {now.get(key)}" for key in sorted(now.keys() | then.keys())
             if now.get(key) != then.get(key) and not _decides_weights(key)]
    saved, step = record.run("run.json"), record.step
    before = learning_rate(saved.optim, max(0, step - 1), saved.train.steps)
    rate = learning_rate(run.optim, step, run.train.steps)
    is_changed = any(line.startswith(("optim.", "train.steps:")) for line in lines)
    if is_changed and step > run.optim.warmup_steps and rate > _JUMP * before:
        lines.append(f"WARNING: the learning rate of step {step:,} is {rate:.2g}; the one before "
                     f"was {before:.2g}. To go on at low rates, set train.steps back and start "
                     "another run from this one, with [init] moments = true and an "
                     "optim.learning_rate of your choice (docs/how-to/resume.md)")
    return lines


def _now_and_then(run: RunConfig, record: RunRecord) -> tuple[dict, dict]:
    """Return both configs flat; one saved before a key existed gets that key's default."""
    then = record.run("run.json")
    return flatten(run_config.to_dict(run)), flatten(run_config.to_dict(then))


_DECIDING = {"data": {"seq_len", "seed", "attend_across_documents"},
             "train": {"seed", "global_batch_size", "initial_batch_size", "batch_warmup_steps",
                       "freeze", "freeze_steps"},
             "optim": {"name"}, "init": {"embeddings_only"}}


def _decides_weights(key: str) -> bool:
    """Return whether a resumed run must agree with its checkpoint in `key`, as in the content of
    its inputs (training/inputs.py); the rest may change and is logged.
    """
    section, _, name = key.partition(".")
    return (section in ("model", "objective") and key not in FREE_FIELDS
            or name in _DECIDING.get(section, ()))
