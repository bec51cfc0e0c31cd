"""Setup before the model is built: process group, inputs, consistency checks, log lines."""

import hashlib
import json
import os
import platform
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deberta_ds import __version__
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import counted, format_count
from deberta_ds.checkpoint.find import Found, find
from deberta_ds.checkpoint.run_record import RunRecord, read_run_record
from deberta_ds.cluster import dist
from deberta_ds.config import batch_schedule, own_parts, run_config
from deberta_ds.config.model import ModelConfig, padded_rows
from deberta_ds.config.options import raise_problems
from deberta_ds.config.run_config import RunConfig, SourceConfig
from deberta_ds.config.toml_files import flatten, non_default_texts
from deberta_ds.data.batch import Batch
from deberta_ds.data.loader import build_loader
from deberta_ds.data.remote import Cache
from deberta_ds.data.rows import Row, RowDataset, eval_sequences
from deberta_ds.engine import ds_config, engine
from deberta_ds.engine.engine import check_deepspeed, local_device
from deberta_ds.evaluate.held_out import Pairs, open_pairs
from deberta_ds.model import cpu
from deberta_ds.model.backbone import count_parameters, on_meta
from deberta_ds.model.kernels import kernel_check, kernel_table
from deberta_ds.model.precision import DTYPES
from deberta_ds.objectives.build import build_model, held_parameters
from deberta_ds.planner.epochs import FEW_EPOCHS, MANY_EPOCHS
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training import meters
from deberta_ds.training.best import check_link
from deberta_ds.training.check import check_alike, check_identity, check_run

EVAL_SEED = 20_260_101  # of the held-out masks: the same for every run, so scores compare
_PACKAGES = ("torch", "deepspeed", "numpy", "sentencepiece")


@dataclass(frozen=True)
class Inputs:
    """What a run reads, opened and checked, and the complete DeepSpeed dict."""

    tokenizer: Tokenizer
    dataset: RowDataset
    held_out: dict[str, list[Row]]  # by the names of data.heldout
    ds: dict
    num_parameters: int
    pairs: tuple[Pairs, list[str]]


def open_run(run: RunConfig, ds_values: dict, place: str, resume: str
             ) -> tuple[Found, RunRecord | None, Inputs]:
    """Find where the run goes on, open its inputs and check them; the group is joined.

    Returns what was found, its run.json (None at step 0) and the inputs. Raises UserError, on every
    rank.
    """
    found = find(run.out_dir, resume)
    record = read_record(found.path) if found.path else None
    raise_problems(place, batch_schedule.problems_with_ranks(
        run.train, dist.world_size(), record.step if record else 0))
    dist.together(lambda: check_link(run))
    inputs = _open_inputs(run, ds_values, place)
    if record:
        check_identity(run, inputs.dataset.content_hashes, inputs.tokenizer.sha256, record,
                       str(found.path))
    return found, record, inputs


def read_record(path: Path) -> RunRecord:
    """Return run.json of a checkpoint; call on every rank, as one alone may fail to read it."""
    return dist.together(lambda: read_run_record(path))


def join_group(run: RunConfig, ds_values: dict, place: str) -> list[str]:
    """Join the process group, check what can be checked without the inputs; return warnings.

    `ds_values` is a DeepSpeed JSON, `place` names the run file in errors. Raises UserError, on
    every rank.
    """
    warnings = check_deepspeed(ds_values, place)
    join_with_kernels(partial(kernel_choices, run.model, ds_values, run.data.seq_len))
    check_alike(flatten(run_config.to_dict(run)) | {
        f"{key} of the DeepSpeed JSON": value for key, value in flatten(ds_values).items()} | {
        f"version of {name}": version for name, version in versions().items()})
    dist.together(lambda: check_run(run, ds_values, dist.world_size(), None, place))
    if local_device().type == "cpu":
        cpu.use_onednn()
    elif run.train.tf32:
        torch.set_float32_matmul_precision("high")
    return warnings


def join_with_kernels(choose: Callable[[], Any]) -> Any:
    """Join the process group; return what `choose` says of the kernels on this rank.

    The first rank of each node checks them before the group is there. UserError on every rank if a
    kernel fails its check on any node.
    """
    engine.prepare_rank()
    if dist.local_rank() == 0:
        with suppress(UserError):  # raised below, on every rank
            choose()
    engine.init_distributed()
    for found in dist.gather_objects(kernel_check.verdicts):
        kernel_check.merge(found)
    return dist.together(choose)


def _open_inputs(run: RunConfig, ds_values: dict, place: str) -> Inputs:
    """Open the inputs and check the whole run; as `join_group`."""
    tokenizer, dataset, held_out = dist.together(lambda: _open(run))
    check_run(run, ds_values, dist.world_size(), tokenizer.size, place)
    ds = ds_config.resolve(run, ds_values, dist.world_size())
    num_parameters = count_parameters(on_meta(build_model, run))
    pairs = dist.together(lambda: open_pairs(run, tokenizer))
    check_alike({"sha256 of data.tokenizer": tokenizer.sha256,
                 "hash of evaluate.minimal_pairs": hashlib.sha256(repr(pairs).encode()).hexdigest()}
                | {f"content hash of {name}": digest for name, digest in
                   (dataset.content_hashes | own_parts.digests(run)).items()}
                | {f"hash of held-out {name}": hashlib.sha256(
                    b"".join(row.input_ids.tobytes() for row in rows)).hexdigest()
                   for name, rows in held_out.items()})
    return Inputs(tokenizer, dataset, held_out, ds, num_parameters, pairs)


def _open(run: RunConfig) -> tuple[Tokenizer, RowDataset, dict[str, list[Row]]]:
    """Open tokenizer and corpora; each rank verifies its share of the shards."""
    data, tokenizer = run.data, Tokenizer(run.data.tokenizer)
    dataset = RowDataset(data.sources, tokenizer, seed=data.seed, sample_by=run.objective.sample_by,
                         rows_of_run=batch_schedule.rows_of_run(run.train), **_row_options(run))
    return tokenizer, dataset, held_out_sequences(
        run, tokenizer, data.heldout_corpora, data.heldout_replacements, run.train.eval_sequences)


def held_out_sequences(run: RunConfig, tokenizer: Tokenizer, corpora: dict[str, str],
                       replaced: dict[str, str], num_rows: int) -> dict[str, list[Row]]:
    """Return `num_rows` sequences of each of `corpora` {name: path}, as a run is evaluated on."""
    return {name: eval_sequences(path, tokenizer, eval_seed=EVAL_SEED, num_rows=num_rows,
                                 replaced=replaced.get(name, ""), **_row_options(run))
            for name, path in corpora.items()}


def _row_options(run: RunConfig) -> dict[str, Any]:
    """Return what `RowDataset` takes of a run for training and held-out rows alike."""
    data = run.data
    return {"seq_len": data.seq_len, "mask": run.objective.mask, "verify": data.verify,
            "verify_rank": dist.rank(), "verify_world_size": dist.world_size(),
            "attend_across_documents": data.attend_across_documents,
            "cache": Cache(data.cache, data.cache_gigabytes)}


def batches_of(run: RunConfig, inputs: Inputs, *, start: int, end: int) -> Iterator[list[Batch]]:
    """Return an iterator over this rank's micro-batches of each of the steps `start` .. `end` - 1.
    """
    stretches = batch_schedule.stretches(run.train, start, end)
    loader = build_loader(
        inputs.dataset, stretches=stretches, micro_batch_size=run.train.micro_batch_size,
        rank=dist.rank(), world_size=dist.world_size(), num_workers=run.data.workers)
    for one in stretches:
        count = batch_schedule.micro_batches(one.rows, dist.world_size(),
                                             run.train.micro_batch_size)
        for _ in range(one.steps):
            yield [next(loader) for _ in range(count)]


def describe(run: RunConfig, inputs: Inputs, origins: dict[str, str]) -> list[str]:
    """Return what a user wants to know at the start: the model, the data, non-default values."""
    values, usual = run_config.to_dict(run), run_config.to_dict(SourceConfig(path=" "))
    for source in values["data"]["sources"]:
        for key in [key for key in source if source[key] == usual[key]]:
            del source[key]
    lines = non_default_texts(values, origins, "run")
    stage, precision = ds_config.zero_stage(inputs.ds), ds_config.precision(inputs.ds)
    matmuls = ds_config.matmul_precision(inputs.ds)
    if matmuls != precision:
        precision += f" weights with {matmuls} matmuls"
    if run.train.tf32 and local_device().type == "cuda":
        precision += ", fp32 matmuls in TF32"
    rows = batch_schedule.rows_of_run(run.train)
    epochs = ", ".join(f"{path} {share:.2f}" for path, share in inputs.dataset.epochs(rows).items())
    lines.append(f"{run.objective.kind} model: {format_count(inputs.num_parameters)} parameters, "
                 f"ZeRO-{stage}, {precision}, {counted(dist.world_size(), 'rank')}")
    lines.append(f"kernels: {kernels_of(run, inputs.ds)}")
    lines.append(f"data: {rows:,} sequences of {run.data.seq_len} tokens = "
                 f"{format_count(rows * run.data.seq_len)} tokens; epochs: {epochs}")
    lines += _frozen_lines(run, precision)
    first, full = run.train.initial_batch_size, run.train.global_batch_size
    if first:
        lines.append(f"batch size warm-up: from {first:,} to {full:,} sequences in "
                     f"{run.train.batch_warmup_steps:,} of {run.train.steps:,} steps")
    return lines + _warnings(run, inputs)


def _frozen_lines(run: RunConfig, precision: str) -> list[str]:
    """Return how much is not trained, and until when."""
    sizes = {name: p.numel() for name, p in on_meta(build_model, run).named_parameters()}
    frozen, waiting = held_parameters(run, sizes)
    lines = [f"frozen {until}: {format_count(sum(sizes[name] for name in names))} parameters"
             for until, names in (("all along", frozen),
                                  (f"before step {run.train.freeze_steps:,}", waiting)) if names]
    if frozen and not precision.startswith("fp32"):
        lines.append(f"WARNING: frozen parts have no fp32 copy and are rounded to {precision}, in "
                     "exports too; to keep them, write torch_autocast for it in the DeepSpeed JSON")
    return lines


def kernel_choices(model: ModelConfig, ds: dict, length: int, without: tuple[str, ...] = ()
                   ) -> dict[str, dict[str, str]]:
    """Return which implementation of each part of a model this rank takes, and why."""
    weights = DTYPES[ds_config.precision(ds)]
    matmuls = DTYPES[ds_config.matmul_precision(ds)]
    return kernel_table.choices(model, local_device(), weights, matmuls, length,
                                ds_config.zero_stage(ds), without)


def kernels_of(run: RunConfig, ds: dict) -> str:
    """Return `kernel_choices` of a run as one line."""
    return kernel_table.in_a_line(kernel_choices(run.model, ds, run.data.seq_len))


def _warnings(run: RunConfig, inputs: Inputs) -> list[str]:
    """Return what is allowed and rarely meant: rows nobody uses, rows seen very often."""
    lines, rows = [], batch_schedule.rows_of_run(run.train)
    fitting = padded_rows(inputs.tokenizer.size)
    unused = run.model.vocab_size - fitting
    if unused > fitting // 10:
        lines.append(
            f"WARNING: {unused:,} of {run.model.vocab_size:,} token embeddings are never used "
            f"({format_count(unused * run.model.hidden_size)} parameters): the tokenizer has "
            f"{inputs.tokenizer.size:,} ids; a new run without model.vocab_size would have "
            f"{fitting:,} embeddings")
    for path, epochs in inputs.dataset.epochs(rows).items():
        if epochs > MANY_EPOCHS:
            fewer = bisect(range(run.train.steps), rows * FEW_EPOCHS / epochs,
                           key=lambda step: batch_schedule.rows_before(run.train, step + 1)) or 1
            warmup = max(run.optim.warmup_steps, run.train.batch_warmup_steps)
            shorter = " with a shorter warm-up" if fewer < warmup else ""
            lines.append(f"WARNING: {path} is seen {epochs:,.0f} times; after a few epochs new "
                         f"text helps more than repeated text (train.steps = {fewer:,}{shorter}:"
                         f" {FEW_EPOCHS} times)")
    trained = {os.path.realpath(source.path) for source in run.data.sources}
    lines += [f"WARNING: {path} is held out and trained on as well: its scores are of sequences "
              "that the model has seen" for path in run.data.heldout_corpora.values()
              if os.path.realpath(path) in trained]
    available = sum(inputs.dataset.num_rows.values())
    if run.train.global_batch_size > available:
        lines.append(f"WARNING: train.global_batch_size = {run.train.global_batch_size:,} is more "
                     f"than the {available:,} sequences of the data: one step repeats some")
    return lines


def versions() -> dict[str, str]:
    """Return the versions that decide a run's numbers."""
    found = {name: metadata.version(name) for name in _PACKAGES}
    return {"deberta_ds": __version__, "python": platform.python_version()} | found


def write_config(run: RunConfig, inputs: Inputs, origins: dict[str, str]) -> None:
    """Have rank 0 write OUT/config.json: the run, DeepSpeed dict, origins, versions, data."""
    if not dist.is_main():
        return
    record = {"run": run_config.to_dict(run), "deepspeed": inputs.ds, "origins": origins,
              "versions": versions(),
              "content_hashes": inputs.dataset.content_hashes | own_parts.digests(run),
              "world_size": dist.world_size(),
              "parameters": inputs.num_parameters, 
              "kernels": kernel_choices(run.model, inputs.ds, run.data.seq_len),
              "hardware": meters.hardware(local_device()), "device": local_device().type,
              **meters.source()}
    write_atomic(Path(run.out_dir) / "config.json", json.dumps(record, indent=1) + "\n")
