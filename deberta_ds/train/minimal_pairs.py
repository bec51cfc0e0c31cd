"""Minimal pairs scored while a run trains: the same pairs at every evaluation of every run."""

import math

import numpy as np
import torch

from deberta_ds import dist
from deberta_ds.config import RunConfig
from deberta_ds.data.minimal_pairs import encode_sentences, outcomes, read_pairs, sample_pairs
from deberta_ds.objectives.base import Objective
from deberta_ds.tokenizer import Tokenizer

_SEED = 0  # of the sample: the same for every run, so scores compare

Pairs = list[tuple[list[int], list[int]]]  # ids of the good and of the bad sentence


def open_pairs(run: RunConfig, tokenizer: Tokenizer) -> tuple[Pairs, list[str]]:
    """Return the encoded pairs that `[evaluate]` names, and the paradigm of each."""
    if not run.evaluate.minimal_pairs:
        return [], []
    pairs = sample_pairs(read_pairs(run.evaluate.minimal_pairs), run.evaluate.pairs_per_paradigm,
                         _SEED)
    longest = run.model.max_position
    good = encode_sentences([pair.good for pair in pairs], tokenizer, longest)
    bad = encode_sentences([pair.bad for pair in pairs], tokenizer, longest)
    return list(zip(good, bad, strict=True)), [pair.paradigm for pair in pairs]


@torch.no_grad()
def score_minimal_pairs(model, objective: Objective, device: torch.device, pairs: Pairs,
                        paradigms: list[str], tokenizer: Tokenizer) -> dict[str, float]:
    """Return {"minimal_pairs": mean over paradigms of the share won}; call on every rank.

    Rank r takes sentences r, r + W, ...; ranks that have fewer repeat one, so that all make the
    same number of forwards.
    """
    sentences = [ids for pair in pairs for ids in pair]
    ranks = dist.world_size()
    turns = math.ceil(len(sentences) / ranks)
    mine = [sentences[min(turn * ranks + dist.rank(), len(sentences) - 1)]
            for turn in range(turns)]
    divisors = {name: torch.ones((), device=device) for name in ("targets", "tokens")}
    model.eval()
    scores = objective.sentence_scores(lambda batch: model(batch.to(device), divisors)[1:], mine,
                                       tokenizer)
    model.train()
    by_rank = dist.gather_objects(scores)
    scores = [by_rank[number % ranks][number // ranks] for number in range(len(sentences))]
    won = outcomes(np.array(scores).reshape(-1, 2))
    names = np.array(paradigms)
    means = [float(won[names == name].mean()) for name in dict.fromkeys(paradigms)]
    return {"minimal_pairs": sum(means) / len(means)}
