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
from deberta_ds.config.model import RANDOM
from deberta_ds.config.options import ConfigError, raise_problems
from deberta_ds.config.run_config import FREE_FIELDS, RunConfig
from deberta_ds.config.toml_files import flatten
from deberta_ds.engine import ds_config, engine, passes
from deberta_ds.engine.optim import learning_rate
from deberta_ds.objectives.base import MINIMAL_PAIRS
from deberta_ds.objectives.build import freeze_problems, objective_of
from deberta_ds.training import best

_JUMP = 1.5  # of the learning rate, of which a resumed run warns
MEASURED = ("held-out ", "minimal pairs")  # names of inputs that decide scores, not weights


def check_run(run: RunConfig, ds: dict, world_size: int, place: str) -> None:
    """Raise ConfigError with every cross problem of a run, but for those of its inputs."""
    problems = own_parts.problems(run)
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


def changed_values(run: RunConfig, record: RunRecord) -> list[str]:
    """Return "key: then -> now" for values that may change on resume and did."""
    now, then = _now_and_then(run, record)
    lines = [f"{key}: {then.get(key)} -> {now.get(key)}" for key in sorted(now.keys() | then.keys())
             if now.get(key) != then.get(key) and not _decides_weights(key)]
    saved = record.run("run.json")
    before = learning_rate(saved.optim, max(0, record.step - 1), saved.train.steps)
    rate = learning_rate(run.optim, record.step, run.train.steps)
    is_changed = any(line.startswith(("optim.", "train.steps:")) for line in lines)
    if is_changed and record.step > run.optim.warmup_steps and rate > _JUMP * before:
        lines.append(f"WARNING: the learning rate of step {record.step:,} is {rate:.2g}; the one "
                     f"before was {before:.2g}. To go on at low rates, set train.steps back and "
                     "start another run from this one, with [init] moments = true and an "
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
