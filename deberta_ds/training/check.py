"""Consistency checks between a run file, its DeepSpeed config, tokenizer and checkpoint."""

import hashlib
import itertools
import json
import socket
from typing import Any

from deberta_ds.base.errors import listed
from deberta_ds.base.own_code import short_name
from deberta_ds.checkpoint.find import CheckpointError
from deberta_ds.checkpoint.run_record import RunRecord
from deberta_ds.cluster import dist
from deberta_ds.config import own_parts, run_config
from deberta_ds.config.options import ConfigError, raise_problems
from deberta_ds.config.run_config import FREE_FIELDS, IDENTITY_FIELDS, RunConfig
from deberta_ds.config.toml_files import flatten
from deberta_ds.engine import ds_config, engine, passes
from deberta_ds.objectives.base import MINIMAL_PAIRS
from deberta_ds.objectives.build import freeze_problems, objective_of
from deberta_ds.training import best


def check_run(run: RunConfig, ds: dict, world_size: int, tokenizer_size: int | None,
              place: str) -> None:
    """Raise ConfigError with every cross problem of a run; `tokenizer_size` None is not checked."""
    problems = own_parts.problems(run)
    try:
        ds_config.accumulation_steps(run, world_size)
    except ConfigError as error:
        problems.append(str(error))
    model, train, optim = run.model, run.train, run.optim
    if tokenizer_size is not None and model.vocab_size < tokenizer_size:
        problems.append(f"model.vocab_size = {model.vocab_size}: smaller than the {tokenizer_size} "
                        f"ids of {run.data.tokenizer}; raise it (a multiple of 64 is fast)")
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


def check_identity(run: RunConfig, content_hashes: dict[str, str], tokenizer_sha256: str,
                   record: RunRecord, place: str) -> None:
    """Raise CheckpointError with a diff if a checkpoint's run.json is of another run.

    Corpora and tokenizer are what is in their files, wherever these lie: `content_hashes` {path of
    a source: hex} and `tokenizer_sha256` are compared with the saved ones, the paths are not.
    """
    now, then = _now_and_then(run, record)
    lines = [_difference(key, *(json.dumps(values.get(key), ensure_ascii=False)
                               for values in (then, now)))
             for key in sorted(now.keys() | then.keys())
             if now.get(key) != then.get(key) and _is_identity(key)]
    if record.tokenizer_sha256 != tokenizer_sha256:
        lines.append(_difference(
            "data.tokenizer", f"{then['data.tokenizer']}, sha256 {record.tokenizer_sha256}",
            f"{now['data.tokenizer']}, sha256 {tokenizer_sha256}"))
    sources = itertools.zip_longest(
        _described_sources(then["data.sources"], record.content_hashes),
        _described_sources(now["data.sources"], content_hashes), fillvalue=("none", "none"))
    lines += [_difference(f"data.sources[{number}]", *map(": ".join, pair))
              for number, pair in enumerate(sources) if pair[0][1] != pair[1][1]]
    lines += [_difference(name, f"sha256 {record.content_hashes[name]}", f"sha256 {sha256}")
              for name, sha256 in own_parts.digests(run).items()
              if record.content_hashes.get(name, sha256) != sha256]
    if lines:
        raise CheckpointError(
            f"{place} is of another run (- saved, + now):\n  " + "\n  ".join(lines)
            + "\n  change these back, or use another out_dir: for a new run, or to go on from here "
            f'with other data, with [init] from = "{place}" and moments = true')


def _difference(key: str, then: str, now: str) -> str:
    return f"- {key} = {then}\n  + {key} = {now}"


def _described_sources(
        sources: list[dict], content_hashes: dict[str, str]) -> list[tuple[str, str]]:
    """Return (path, everything else that decides its rows) of each source, in order."""
    return [(source["path"], json.dumps(
        {"content_hash": content_hashes.get(source["path"])}
        | {key: value for key, value in source.items()
           if key not in ("path", "replaced")})) for source in sources]  # known by content_hash


def changed_values(run: RunConfig, record: RunRecord) -> list[str]:
    """Return "key: then -> now" for values that may change on resume and did."""
    now, then = _now_and_then(run, record)
    return [f"{key}: {then.get(key)} -> {now.get(key)}" for key in sorted(now.keys() | then.keys())
            if now.get(key) != then.get(key) and not _is_identity(key)]


def _now_and_then(run: RunConfig, record: RunRecord) -> tuple[dict, dict]:
    """Return both configs flat; one saved before a key existed gets that key's default."""
    then = record.run("run.json")
    return flatten(run_config.to_dict(run)), flatten(run_config.to_dict(then))


def _is_identity(key: str) -> bool:
    if key in FREE_FIELDS:
        return False
    return any(key == field or key.startswith(f"{field}.") for field in IDENTITY_FIELDS)
