"""Scores of a run's networks on fixed held-out rows with fixed masks and fixed samples.

The same rows, masks and samples for every checkpoint and world size, dropout off.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.base.user_code import short_name
from deberta_ds.cluster import dist
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.rows import Batch, Row, collate
from deberta_ds.objectives import rtd
from deberta_ds.objectives.base import Objective
from deberta_ds.release.reader import LoadedModel, load_backbone
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.pairs import (
    Pairs,
    encode_sentences,
    outcomes,
    read_pairs,
    sample_pairs,
    undecided,
)

_SEED = 0  # of samples: the same for every run and discriminator, so scores compare
_ROWS_AT_ONCE = 16  # of `score_rows`


@torch.no_grad()
def evaluate(model, objective: Objective, device: torch.device, rows: dict[str, list[Row]],
             micro_batch_size: int, metrics: tuple[str, ...] = (),
             look: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return the scores over `rows`, {name of a held-out corpus: its rows}; of several corpora
    also each one's, as "SCORE/NAME". Call on every rank with the same rows, all get the result.
    `metrics` are functions of one's own, as evaluate.metrics names them; `look` is called before
    each micro-batch, and every second while scores are computed, and may raise.

    `model` is the objective's model on `device`, or the DeepSpeed engine around one. Rank r takes
    micro-batches r, r + W, ...; a rank that has run out repeats one without counting it, because
    under ZeRO-3 every rank must take part in every forward. Raises UserError, on every rank, where
    no token is masked.
    """
    batches = list(_batches(rows, micro_batch_size))
    turns = math.ceil(len(batches) / dist.world_size())
    normalizers = dict.fromkeys(("targets", "tokens"), torch.ones((), device=device))
    parts: dict[str, _Part] = {name: _Part() for name in rows}
    with _evaluating(model):
        for turn in range(turns):
            look()
            number = turn * dist.world_size() + dist.rank()
            name, batch = batches[min(number, len(batches) - 1)]
            _, sums, per_token = model(batch.to(device), normalizers)
            if number < len(batches):
                parts[name].add(batch, sums, per_token)
    gathered = dist.gather_to_main({name: part.as_arrays() for name, part in parts.items()})
    return dist.attended(
        lambda: gathered and _scores(objective, gathered, rows, metrics), look)


@contextmanager
def _evaluating(model) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _batches(rows: dict[str, list[Row]], size: int) -> Iterator[tuple[str, Batch]]:
    for name, found in rows.items():
        for start in range(0, len(found), size):
            yield name, collate(found[start:start + size])


@dataclass
class _Part:
    """What one rank has counted of one held-out corpus."""

    totals: dict[str, float] = field(default_factory=lambda: {"targets": 0.0, "tokens": 0.0})
    per_token: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, batch: Batch, sums: dict[str, Tensor], per_token: dict[str, Tensor]) -> None:
        self.totals["targets"] += batch.num_targets
        self.totals["tokens"] += batch.num_tokens
        for name, value in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value)
        for name, value in per_token.items():
            self.per_token.setdefault(name, []).append(value.cpu())

    def as_arrays(self) -> tuple[dict, dict]:
        return self.totals, {
            name: torch.cat(parts).numpy() for name, parts in self.per_token.items()}


@torch.no_grad()  # a thread has its own
def _scores(objective: Objective, gathered: list[dict[str, tuple]], rows: dict[str, list[Row]],
            metrics: tuple[str, ...]) -> dict[str, float]:
    """Return the scores over all corpora, and of each; `gathered`: what every rank has counted."""
    scores = _scores_over(objective, gathered, rows, metrics)
    for name in rows if len(rows) > 1 else ():
        of_corpus = _scores_over(objective, gathered, {name: rows[name]}, metrics)
        scores |= {f"{key}/{name}": value for key, value in of_corpus.items()}
    return scores


def _scores_over(objective: Objective, gathered: list[dict[str, tuple]],
                 rows_of: dict[str, list[Row]], metrics: tuple[str, ...]) -> dict[str, float]:
    parts = [found[name] for found in gathered for name in rows_of]
    rows = [row for found in rows_of.values() for row in found]
    names = dict.fromkeys(name for totals, _ in parts for name in totals)
    total = {name: sum(totals.get(name, 0.0) for totals, _ in parts) for name in names}
    if not total["targets"]:
        raise UserError(f"the {len(rows)} held-out sequences have no masked token; "
                        "raise objective.mask.rate or train.eval_sequences, or name another "
                        "corpus as data.heldout")
    names = dict.fromkeys(name for _, per_token in parts for name in per_token)
    per_token = {name: torch.cat([torch.from_numpy(one[name]) for _, one in parts if name in one])
            for name in names}
    scores = objective.scores(total, per_token) | {"unigram_accuracy": unigram_accuracy(rows)}
    return scores | {short_name(value): own_score(value, total, per_token) for value in metrics}


def own_score(value: str, total: dict[str, float], per_token: dict[str, Tensor]) -> float:
    """Return the score of a user's function; UserError if it fails or is no number."""
    try:
        score = user_code.function("evaluate.metrics", value)(total, per_token)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise UserError(f"evaluate.metrics: {value} failed ({type(error).__name__}: {error}); "
                        "correct it, or leave it out") from error
    if not isinstance(score, int | float):
        raise UserError(f"evaluate.metrics: {value} returned {type(score).__name__}; it must "
                        "return a number")
    return float(score)


def unigram_accuracy(rows: list[Row]) -> float:
    """Return the accuracy of always predicting these rows' most frequent target: the baseline."""
    labels = torch.cat([torch.from_numpy(row.labels[row.labels >= 0]) for row in rows])
    return float(labels.bincount().max() / labels.numel())


def open_pairs(run: RunConfig, tokenizer: Tokenizer) -> tuple[Pairs, list[str]]:
    """Return the encoded pairs that `[evaluate]` names, and the paradigm of each."""
    pairs = sample_pairs(read_pairs(run.evaluate.minimal_pairs), run.evaluate.pairs_per_paradigm,
                         _SEED)
    longest = run.model.max_position
    good = encode_sentences([pair.good for pair in pairs], tokenizer, longest)
    bad = encode_sentences([pair.bad for pair in pairs], tokenizer, longest)
    return list(zip(good, bad, strict=True)), [pair.paradigm for pair in pairs]


@torch.no_grad()
def score_minimal_pairs(model, objective: Objective, device: torch.device, pairs: Pairs,
                        paradigms: list[str], tokenizer: Tokenizer,
                        look: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return {"minimal_pairs": mean over paradigms of the share won}; call on every rank.

    Rank r takes sentences r, r + W, ...; ranks that have fewer repeat one, so that all make the
    same number of forwards.
    """
    sentences = [ids for pair in pairs for ids in pair]
    ranks = dist.world_size()
    turns = math.ceil(len(sentences) / ranks)
    mine = [sentences[min(turn * ranks + dist.rank(), len(sentences) - 1)] for turn in range(turns)]
    normalizers = dict.fromkeys(("targets", "tokens"), torch.ones((), device=device))

    def forward(batch: Batch):
        look()
        return model(batch.to(device), normalizers)[1:]

    with _evaluating(model):
        scores = objective.sentence_scores(forward, mine, tokenizer)
    by_rank = dist.gather_objects(scores)
    scores = [by_rank[number % ranks][number // ranks] for number in range(len(sentences))]
    won = outcomes(np.array(scores).reshape(-1, 2))
    names = np.array(paradigms)
    won[undecided(pairs, tokenizer.unk_id)] = 0.5
    means = [float(won[names == name].mean()) for name in dict.fromkeys(paradigms)]
    return {"minimal_pairs": sum(means) / len(means)}


def score_discriminator(discriminator: str | Path, generator: str | Path,
                        rows: dict[str, list[Row]]) -> dict[str, float]:
    """Return the scores of `objectives.rtd` over `rows`, as `evaluate` has them, whose targets
    `generator` replaces.

    A better generator sets its discriminator a harder task; one common frozen generator gives
    several discriminators the same task.
    """
    judge, writer = load_backbone(discriminator), load_backbone(generator)
    if judge.replaced_token_head is None:
        raise UserError(f"{discriminator}: has no discriminator's head; give a run of "
                        "replaced-token detection")
    if writer.masked_lm is None:
        raise UserError(f"{generator}: has no masked LM with an absolute position table; give a "
                        "masked-LM run, or one of replaced-token detection with its generator")
    if not (judge.tokenizer and writer.tokenizer
            and judge.tokenizer.sha256 == writer.tokenizer.sha256):
        raise UserError(f"{generator}: its tokenizer is not that of {discriminator}, so its "
                        "replacements mean nothing to it")
    longest = max(len(row.input_ids) for found in rows.values() for row in found)
    judge.check_length(longest, discriminator)
    writer.check_length(longest, generator)
    return score_rows(judge, writer, rows)


@torch.no_grad()
def score_rows(judge: LoadedModel, writer: LoadedModel, rows: dict[str, list[Row]]
               ) -> dict[str, float]:
    """Return the scores of `judge` on `rows` with `writer`'s samples at their targets."""
    assert writer.masked_lm is not None and writer.tokenizer is not None
    assert judge.replaced_token_head is not None
    parts: dict[str, _Part] = {name: _Part() for name in rows}
    for name, batch in _batches(rows, _ROWS_AT_ONCE):
        loss_sum, correct, ids_BL = rtd.replace_targets(
            *writer.masked_lm, batch, seed=_SEED, temperature=1.0,
            valid_vocab=writer.tokenizer.size)
        original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
        replaced_BL, real_BL = ids_BL != original_BL, batch.segments > 0
        logits_BL = judge.replaced_token_head(
            judge.backbone(ids_BL, batch.segments, batch.positions), batch.positions)
        sums, per_token = rtd.detection(logits_BL, replaced_BL, real_BL, training=False)
        parts[name].add(
            batch, {"generator_loss": loss_sum, "generator_correct": correct, **sums}, per_token)
    return _scores(rtd, [{name: part.as_arrays() for name, part in parts.items()}], rows, ())
