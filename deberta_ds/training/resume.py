"""Go on from a checkpoint: is it of this run, what has changed since, and what is loaded of it."""

import itertools
import json
from pathlib import Path

from deberta_ds.base.errors import UserError, listed
from deberta_ds.base.json_files import flatten
from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import RunRecord, read_run_record
from deberta_ds.checkpoint.save import set_aside
from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.config.run_config import FREE_FIELDS, RunConfig
from deberta_ds.engine.optim import learning_rate
from deberta_ds.engine.state import CheckpointError
from deberta_ds.objectives.build import held_parameters
from deberta_ds.release.initialize import shape_differences
from deberta_ds.release.vocabulary import has_other_tokens
from deberta_ds.tracking.log import RunLog
from deberta_ds.training.inputs import Inputs

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
    return [f"WARNING: {name}: other content, {others[name][0][:12]} -> {others[name][1][:12]}: "
            "its scores are not those of before" for name in measured]


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


def restore(run: RunConfig, inputs: Inputs, found: find.Found, record: RunRecord,
            model_engine, log: RunLog) -> None:
    """Load the checkpoint that was found into the engine, and say what differs."""
    assert found.path is not None  # where `record` is from
    saved_state.load(model_engine, found.path)
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
    for line in changed_values(run, record):
        log.info(f"changed since the checkpoint: {line}")
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
        saved_state.load(model_engine, path, is_other_run=True)
    except UserError as error:
        raise CheckpointError(f"init.moments = true: {error}; leave init.moments out") from None
    return path
