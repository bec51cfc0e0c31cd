"""What a run reads: one opener for each input, in the order in which they need each other; and
whether a checkpoint, from which a run goes on, is of the same run.

An objective may name more inputs: its `inputs(run)` returns a list of `Input`.
"""

import hashlib
import itertools
import json
import os
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deberta_ds.base import user_code
from deberta_ds.base.errors import raise_problems
from deberta_ds.base.files import flatten
from deberta_ds.base.numbers import format_count
from deberta_ds.checkpoint.find import RunRecord
from deberta_ds.cluster import dist
from deberta_ds.config import batch_schedule, run_config
from deberta_ds.config.model import padded_rows
from deberta_ds.config.optim import learning_rate
from deberta_ds.config.run_config import FREE_FIELDS, RunConfig
from deberta_ds.data.loader import build_loader
from deberta_ds.data.mixture import FEW_EPOCHS, MANY_EPOCHS
from deberta_ds.data.rows import Batch, Row, RowDataset, eval_sequences
from deberta_ds.engine.ds_config import CompleteConfig
from deberta_ds.engine.state import CheckpointError
from deberta_ds.files.remote import Cache
from deberta_ds.objectives.build import objective_of, parameter_sizes
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.held_out import open_pairs
from deberta_ds.training.pairs import Pairs, undecided

_JUMP = 1.5  # of the learning rate, of which a resumed run warns
_MEASURED = ("held-out ", "minimal pairs")  # names of inputs that decide scores, not weights
EVAL_SEED = 20_260_101  # of the held-out masks: the same for every run, so scores compare


@dataclass(frozen=True)
class Input:
    """A tokenizer, corpora, minimal pairs, code of one's own, a table, a model.

    `identity` is what the ranks of a job compare, what a resumed run compares, and what records and
    checkpoints name: a path says nothing.
    """

    name: str
    value: Any  # what is computed with
    identity: dict[str, Any]  # digests of the bytes that were read; a short thing is its own
    problems: list[str] = field(default_factory=list)  # why a run cannot use it
    lines: list[str] = field(default_factory=list)  # what the log says of it


Known = dict[str, Input]  # those that are open, by their names


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run, and what DeepSpeed gets."""

    tokenizer: Tokenizer
    pairs: tuple[Pairs, list[str]]
    dataset: RowDataset
    held_out: dict[str, list[Row]]  # sequences, by the names of data.heldout
    identity: dict[str, str]  # of all inputs, whose digests share no name
    lines: list[str]  # what the log says of them
    ds: CompleteConfig
    sizes: dict[str, int]  # of the model's parameters, in elements


def open_inputs(run: RunConfig, ds: CompleteConfig, place: str, step: int = 0) -> Inputs:
    """Open all inputs in one phase of all ranks, and check them, for a run that goes on at `step`.
    UserError on every rank.
    """
    def opened() -> Known:
        known: Known = {}  # in the order of the fields of Inputs
        for open_one in INPUTS:
            one = open_one(run, known)
            known[one.name] = one
        if more := getattr(objective_of(run), "inputs", None):
            known |= {one.name: one for one in more(run, known)}
        raise_problems(place, [
            *batch_schedule.problems_with_ranks(run.train, dist.world_size(), step),
            *(text for one in known.values() for text in one.problems)])
        return known

    known = dist.together(opened)
    identity = {name: one for each in known.values() for name, one in each.identity.items()}
    dist.check_alike({f"content hash of {name}": digest for name, digest in identity.items()})
    tokenizer, pairs, dataset, held_out, *_ = (one.value for one in known.values())
    return Inputs(tokenizer, pairs, dataset, held_out, identity,
                  [line for one in known.values() for line in one.lines], ds,
                  parameter_sizes(run))


def _tokenizer(run: RunConfig, _: Known) -> Input:
    found, rows = Tokenizer(run.data.tokenizer), run.model.vocab_size
    problems = [] if rows >= found.size else [
        f"model.vocab_size = {rows}: smaller than the {found.size} ids of {run.data.tokenizer}; "
        "raise it (a multiple of 64 is fast)"]
    fitting = padded_rows(found.size)
    lines = [] if rows - fitting <= fitting // 10 else [
        f"WARNING: {rows - fitting:,} of {rows:,} token embeddings are never used "
        f"({format_count((rows - fitting) * run.model.hidden_size)} parameters): the tokenizer has "
        f"{found.size:,} ids; a new run without model.vocab_size would have {fitting:,} embeddings"]
    return Input("tokenizer", found, {"tokenizer": found.sha256}, problems, lines)


def _minimal_pairs(run: RunConfig, known: Known) -> Input:
    tokenizer = known["tokenizer"].value
    if not run.evaluate.minimal_pairs:
        return Input("minimal pairs", ([], []), {})
    pairs = open_pairs(run, tokenizer)
    half = undecided(pairs[0], tokenizer.unk_id).sum()
    return Input(
        "minimal pairs", pairs,
        {"minimal pairs": hashlib.sha256(repr(pairs).encode()).hexdigest()},
        lines=[f"{half:,} of {len(pairs[0]):,} minimal pairs count one half: their sentences "
               "are equal, or a word of one is unknown to the tokenizer"] if half else [])


def _corpora(run: RunConfig, known: Known) -> Input:
    """Open the corpora, with their stored replacements; each rank verifies its share of shards."""
    found = RowDataset(run.data.sources, known["tokenizer"].value, **reading_options(run),
                       seed=run.data.seed, sample_by=run.objective.sample_by,
                       rows_of_run=(rows := batch_schedule.rows_of_run(run.train)))
    available, digests = sum(found.num_rows.values()), found.content_hashes
    epochs = found.epochs(rows)
    lines = [f"data: {rows:,} sequences of {run.data.seq_len} tokens = "
             f"{format_count(rows * run.data.seq_len)} tokens; epochs: "
             + ", ".join(f"{path} {share:.2f}" for path, share in epochs.items())]
    for path, seen in epochs.items():
        if seen > MANY_EPOCHS:
            fewer = bisect(range(run.train.steps), rows * FEW_EPOCHS / seen,
                           key=lambda step: batch_schedule.rows_before(run.train, step + 1)) or 1
            warmup = max(run.optim.warmup_steps, run.train.batch_warmup_steps)
            shorter = " with a shorter warm-up" if fewer < warmup else ""
            lines.append(f"WARNING: {path} is seen {seen:,.0f} times; after a few epochs new "
                         f"text helps more than repeated text (train.steps = {fewer:,}{shorter}:"
                         f" {FEW_EPOCHS} times)")
    if run.train.global_batch_size > available:
        lines.append(f"WARNING: train.global_batch_size = {run.train.global_batch_size:,} is more "
                     f"than the {available:,} sequences of the data: one step repeats some")
    return Input("corpora", found, digests, lines=lines)


def _held_out(run: RunConfig, known: Known) -> Input:
    data = run.data
    found = held_out_sequences(run, known["tokenizer"].value, data.heldout_corpora,
                               data.heldout_replacements, run.train.eval_sequences)
    trained = {os.path.realpath(source.path) for source in data.sources}
    return Input(
        "held-out", found,
        {f"held-out {name}": hashlib.sha256(b"".join(row.input_ids.tobytes() + row.labels.tobytes()
                                                     for row in rows)).hexdigest()
         for name, rows in found.items()},
        lines=[f"WARNING: {path} is held out and trained on as well: its scores are of sequences "
               "that the model has seen" for path in data.heldout_corpora.values()
               if os.path.realpath(path) in trained])


def held_out_sequences(run: RunConfig, tokenizer: Tokenizer, corpora: dict[str, str],
                       replaced: dict[str, str], num_rows: int) -> dict[str, list[Row]]:
    """Return `num_rows` sequences of each of `corpora` {name: path}, as a run is evaluated on."""
    return {name: eval_sequences(path, tokenizer, **reading_options(run), eval_seed=EVAL_SEED,
                                 num_rows=num_rows, replaced=replaced.get(name, ""))
            for name, path in corpora.items()}


def reading_options(run: RunConfig) -> dict[str, Any]:
    """Return the options of data/rows.py that a run has for all of its corpora."""
    data = run.data
    return {"seq_len": data.seq_len, "mask": run.objective.mask, "verify": data.verify,
            "verify_rank": dist.rank(), "verify_world_size": dist.world_size(),
            "attend_across_documents": data.attend_across_documents,
            "cache": Cache(data.cache, data.cache_gigabytes)}


INPUTS: tuple[Callable[[RunConfig, Known], Input], ...] = (
    _tokenizer, _minimal_pairs, _corpora, _held_out,
    lambda run, _: Input("own code", None, user_code.digests(run)))


def batches_of(run: RunConfig, inputs: Inputs, *, start: int, end: int) -> Iterator[list[Batch]]:
    """Return an iterator over this rank's micro-batches of each of the steps `start` .. `end` - 1.
    """
    phases = batch_schedule.phases(run.train, start, end)
    counts = [batch_schedule.micro_batches(one.rows, dist.world_size(),
                                           run.train.micro_batch_size) for one in phases]
    loader = build_loader(
        inputs.dataset, phases=phases, micro_batch_size=run.train.micro_batch_size,
        rank=dist.rank(), world_size=dist.world_size(), num_workers=run.data.workers)
    for one, count in zip(phases, counts, strict=True):
        for _ in range(one.steps):
            yield [next(loader) for _ in range(count)]


def check_identity(run: RunConfig, identity: dict[str, str], record: RunRecord, place: str
                   ) -> list[str]:
    """Raise CheckpointError with a diff if a checkpoint's run.json is of another run; return lines
    on what is measured with other data now, and on values that may change and did.

    Inputs are what is in their files, wherever these lie: `identity` is compared with the saved
    one, the paths are not. A key that did not exist when the run was saved had its default.
    """
    before = record.run("run.json")
    then, now = (flatten(run_config.to_dict(one)) for one in (before, run))
    saved = {"tokenizer": record.tokenizer_sha256} | record.content_hashes
    differing = [key for key in sorted(now.keys() | then.keys()) if now.get(key) != then.get(key)]
    lines = [_difference(key, *(json.dumps(values.get(key), ensure_ascii=False)
                               for values in (then, now)))
             for key in differing if _decides_weights(key)]
    sources = itertools.zip_longest(
        _described_sources(then["data.sources"], saved),
        _described_sources(now["data.sources"], identity), fillvalue=("none", "none"))
    lines += [_difference(f"data.sources[{number}]", *map(": ".join, pair))
              for number, pair in enumerate(sources) if pair[0][1] != pair[1][1]]
    others = {name: (saved[name], digest) for name, digest in identity.items()
              if name in saved and saved[name] != digest
              and name not in [source.path for source in run.data.sources]}
    measured = [name for name in others if name.startswith(_MEASURED)
                or name in run.evaluate.metrics]
    lines += [_difference(*_named(name, then, now, *others[name]))
              for name in others if name not in measured]
    if lines:
        raise CheckpointError(
            f"{place} is of another run (- saved, + now):\n  " + "\n  ".join(lines)
            + "\n  change these back, or use another out_dir: for a new run, or to go on from here "
            f'with other data, with [init] from = "{place}" and moments = true')
    changed = [f"{key}: {then.get(key)} -> {now.get(key)}" for key in differing
               if not _decides_weights(key)]
    if any(line.startswith(("optim.", "train.steps:")) for line in changed):
        changed += _jump_of_the_rate(run, before, record.step)
    return [*(f"WARNING: {name}: other content, {others[name][0][:12]} -> {others[name][1][:12]}: "
              "its scores are not those of before" for name in measured),
            *(f"changed since the checkpoint: {line}" for line in changed)]


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


def _jump_of_the_rate(run: RunConfig, saved: RunConfig, step: int) -> list[str]:
    """Return a warning if the learning rate of a resumed run's first step is far above the last."""
    before = learning_rate(saved.optim, max(0, step - 1), saved.train.steps)
    rate = learning_rate(run.optim, step, run.train.steps)
    if step <= run.optim.warmup_steps or rate <= _JUMP * before:
        return []
    return [f"WARNING: the learning rate of step {step:,} is {rate:.2g}; the one before "
            f"was {before:.2g}. To go on at low rates, set train.steps back and start "
            "another run from this one, with [init] moments = true and an "
            "optim.learning_rate of your choice (docs/how-to/resume.md)"]


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
