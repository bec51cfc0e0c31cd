"""Which sentence of a minimal pair a model prefers, over all pairs, with intervals.

Pseudo-log-likelihood (Salazar et al. 2020): the sum over the tokens of log p(token | the others),
each by a forward of its own through the enhanced mask decoder. With one token masked at a time the
tokens of a word give each other away, so "by word" also hides those that follow in the same word
(Kauf and Ivanova 2023, within-word left to right): a word of whole-word masking, or, as they have
it, one of the tokenizer's `word_ids()`. A discriminator needs one forward for all tokens:
log p(original) = log sigmoid(-logit). [CLS] and [SEP] carry no words and are not counted.

Sentences are cut into batches of one length: nothing is padded, and a batch does not depend on the
number of ranks, so neither do the scores.

An equal score counts one half, so a model that answers the same to everything gets 50 %. The
overall score is the mean over paradigms, as BLiMP's is; an interval is the middle 95 % of bootstrap
means over pairs, resampled in each paradigm. Nothing here is tuned: temperature 1, no threshold.

Legend: B batch, L length, C hidden, V vocabulary.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from deberta_ds.base.errors import UserError, still_at_work
from deberta_ds.base.numbers import counted
from deberta_ds.cluster import dist
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.objectives.mlm import Queries, masked_batch, queries_of
from deberta_ds.release.model_files import exported_word_ids
from deberta_ds.release.reader import LoadedModel
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.pairs import MinimalPair, encode_sentences, outcomes, undecided

PUBLISHED = Path(__file__).with_name("blimp_published.json")  # of BLiMP
_DRAWS, _LEVEL = 10_000, 0.95
BATCH_TOKENS = 4096
_LOGITS_AT_ONCE = 1 << 22
_FEW_PAIRS = 5  # of a paradigm, whose pairs are resampled by themselves

SCORERS = {"pll_word": "PLL by word (of whole-word masking)",
           "pll_word_ids": "PLL by word (published: word_ids)", "pll_token": "PLL by token",
           "discriminator_sum": "discriminator, sum", "discriminator_mean": "discriminator, mean",
           "discriminator_differing": "discriminator, differing tokens"}
# By reasoning, not by score: these are log-probabilities of the whole sentence.
HEADLINES = ("pll_word", "pll_word_ids", "discriminator_sum")


@dataclass(frozen=True)
class PairScores:
    """scores: {scorer: fp64 [pairs, 2]}, good sentences first; and what it took.

    Likelihoods of `undecided` pairs are equal, and count one half (training/pairs.py).
    """

    scores: dict[str, np.ndarray]
    unknown_tokens: int
    undecided: int
    seconds: float


def score_pairs(model: LoadedModel, pairs: list[MinimalPair], scoring: str = "word") -> PairScores:
    """Return what every head of `model` says of every pair; call on every rank, all get it.

    scoring: the words, "word" of whole-word masking, "word_ids" of the exported tokenizer.
    """
    assert model.tokenizer is not None  # the model was loaded for text
    if model.masked_lm is None and model.replaced_token_head is None:
        raise UserError("the model has neither a masked-LM head with a position table nor a "
                        "discriminator's head, so it cannot score sentences; give a pretraining "
                        "checkpoint, or a directory exported with its heads")
    if model.masked_lm is None and scoring != "word":
        raise UserError(f"the model has no masked LM to score by {scoring}; leave --scoring out")
    started = time.monotonic()
    texts = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    encoded = [tuple(ids) for ids in encode_sentences(texts, model.tokenizer,
                                                      model.model_config.max_position)]
    text_of = dict(zip(encoded, texts, strict=True))
    numbers = {ids: number for number, ids in enumerate(text_of)}
    place = np.array([numbers[ids] for ids in encoded], int).reshape(-1, 2)  # of each sentence
    sentences = [list(ids) for ids in numbers]
    unknown_id = model.tokenizer.unk_id
    both = [list(ids) for ids in encoded]
    half = undecided(list(zip(both[0::2], both[1::2], strict=True)), unknown_id)
    scores: dict[str, np.ndarray] = {}
    if model.masked_lm is not None:
        word_ids = (None if scoring == "word"
                    else exported_word_ids(model.tokenizer, list(text_of.values())))
        scores |= {name: np.where(half[:, None], 0.0, values[place])
                   for name, values in _likelihoods(model, sentences, word_ids).items()}
    if model.replaced_token_head is not None:
        scores |= _originality(model, sentences, place)
    for name, values in scores.items():
        if len(wrong := np.flatnonzero(~np.isfinite(values).all(axis=1))):
            raise UserError(f"{SCORERS[name]}: the score of {texts[2 * wrong[0]]!r} or of its pair "
                            f"is no number ({len(wrong):,} pairs of {len(pairs):,}); the model "
                            "diverged, or its files are damaged")
    unknown = sum(ids.count(unknown_id) for ids in encoded)
    return PairScores(scores, unknown, int(half.sum()), time.monotonic() - started)


def _likelihoods(model: LoadedModel, sentences: list[list[int]],
                 word_ids: list[list[int]] | None) -> dict[str, np.ndarray]:
    """Return {scorer: [sentences]} of the masked LM."""
    assert model.masked_lm is not None and model.tokenizer is not None
    (words, masked_lm), tokenizer = model.masked_lm, model.tokenizer
    queries = queries_of(sentences, tokenizer, word_ids)
    lengths = np.array([len(ids) for ids in sentences])[queries.sentence]
    scored = over_ranks(
        lambda items: masked_scores(words, masked_lm, tokenizer, sentences, queries, items),
        cut_work(lengths), "masked LM")
    values = np.empty(len(lengths))
    for items, part in scored:
        values[items] = part
    return {name: np.bincount(queries.sentence, weights=values * chosen, minlength=len(sentences))
            for name, chosen in (("pll_word_ids" if word_ids else "pll_word", queries.by_word),
                                 ("pll_token", queries.by_token))}


def _originality(model: LoadedModel, sentences: list[list[int]], place: np.ndarray
                 ) -> dict[str, np.ndarray]:
    """Return {scorer: [pairs, 2]} of the discriminator."""
    head = model.replaced_token_head
    assert head is not None
    scored = over_ranks(
        lambda items: original_scores(model.backbone, head, sentences, items),
        cut_work(np.array([len(ids) for ids in sentences])), "discriminator")
    pieces: list[np.ndarray] = [np.empty(0)] * len(sentences)
    for items, rows in scored:
        for item, row in zip(items, rows, strict=True):
            pieces[item] = row[1:-1]  # [CLS] and [SEP] are no words
    sums = np.array([row.sum() for row in pieces])
    counts = np.array([max(1, len(row)) for row in pieces])
    differing = np.array([_differing(sentences, pieces, *pair) for pair in place])
    return {"discriminator_sum": sums[place], "discriminator_mean": (sums / counts)[place],
            "discriminator_differing": differing.reshape(-1, 2)}


def _differing(sentences: list[list[int]], pieces: list[np.ndarray], good: int, bad: int
               ) -> tuple[float, float]:
    """Return both sums over what lies between the longest common beginning and end."""
    one, other = sentences[good][1:-1], sentences[bad][1:-1]
    before = len(commonprefix((one, other)))
    after = len(commonprefix((one[before:][::-1], other[before:][::-1])))
    return (pieces[good][before:len(one) - after].sum(),
            pieces[bad][before:len(other) - after].sum())


def over_ranks(score: Callable[[np.ndarray], np.ndarray], batches: list[np.ndarray],
               title: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (items, their scores) of every batch, each computed by one rank."""
    mine = batches[dist.rank()::dist.world_size()]
    done: list = []
    with still_at_work(lambda: f"{title}: {len(done):,} of {len(mine):,} batches") \
            if dist.is_main() else nullcontext():
        for items in mine:
            done.append((items, score(items)))
    return [part for parts in dist.gather_objects(done) for part in parts]


def cut_work(lengths: np.ndarray, batch_tokens: int = BATCH_TOKENS) -> list[np.ndarray]:
    """Return batches of items (of `lengths`) that share one length, long ones first.

    They hold every item once, and at most `batch_tokens`.
    """
    batches: list[np.ndarray] = []
    for length in np.unique(lengths)[::-1]:
        items = np.flatnonzero(lengths == length)
        rows = max(1, batch_tokens // int(length))
        batches += [items[start:start + rows] for start in range(0, len(items), rows)]
    return batches


@torch.no_grad()
def masked_scores(words: TokenEmbedding, masked_lm: MaskedLm, tokenizer: Tokenizer,
                  sentences: list[list[int]], queries: Queries, items: np.ndarray) -> np.ndarray:
    """Return fp64 [B]: log p of the tokens of a batch of queries, over the tokenizer's ids."""
    asked = zip(queries.sentence[items], queries.target[items], queries.end[items], strict=True)
    inputs = masked_batch([(sentences[number], target, end) for number, target, end in asked],
                          tokenizer).to(words.weight.device)
    label_B = inputs.labels.gather(1, inputs.target_positions)[:, 0]
    head, size = masked_lm.head, tokenizer.size
    states_BC = head.transformed(masked_lm.target_states(words, inputs))
    rows = max(1, _LOGITS_AT_ONCE // size)
    parts = []
    for some_BC, some_B in zip(states_BC.split(rows), label_B.split(rows), strict=True):
        logits_BV = F.linear(some_BC, words.weight[:size], head.bias[:size])
        chosen_B = logits_BV.gather(1, some_B[:, None])[:, 0]
        parts.append((chosen_B - logits_BV.logsumexp(-1)).double())
    return torch.cat(parts).cpu().numpy()


@torch.no_grad()
def original_scores(backbone: Backbone, head: ReplacedTokenHead, sentences: list[list[int]],
                    items: np.ndarray) -> np.ndarray:
    """Return fp64 [B, L]: log p(original) of the tokens of a batch of sentences."""
    ids_BL = torch.tensor([sentences[number] for number in items],
                          device=backbone.words.weight.device)
    positions_BL = torch.arange(ids_BL.size(1), device=ids_BL.device).expand_as(ids_BL)
    segments_BL = torch.ones_like(ids_BL, dtype=torch.int32)
    logits_BL = head(backbone(ids_BL, segments_BL, positions_BL), positions_BL)
    return F.logsigmoid(-logits_BL).double().cpu().numpy()


def summarize(scored: PairScores, pairs: list[MinimalPair]) -> dict:
    """Return {scorer: accuracy, interval, ties, and the same by phenomenon and paradigm}."""
    return {name: _summary(outcomes(scores), pairs) for name, scores in scored.scores.items()}


def _summary(outcome: np.ndarray, pairs: list[MinimalPair]) -> dict:
    phenomenon_of = dict(sorted((pair.paradigm, pair.phenomenon) for pair in pairs))
    names = np.array([pair.paradigm for pair in pairs])
    by_paradigm = {name: outcome[names == name] for name in phenomenon_of}
    means, draws = resampled_means(list(by_paradigm.values()))
    phenomena = np.array(list(phenomenon_of.values()))
    paradigms = {name: {"phenomenon": phenomenon_of[name], "pairs": len(values)}
                 | _score(means[[k]], draws[:, [k]])
                 for k, (name, values) in enumerate(by_paradigm.items())}
    return _score(means, draws) | {
        "ties": int((outcome == 0.5).sum()),
        "phenomena": {str(name): {"paradigms": int((phenomena == name).sum())}
                      | _score(means[phenomena == name], draws[:, phenomena == name])
                      for name in np.unique(phenomena)},
        "paradigms": paradigms}


def resampled_means(by_paradigm: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the means [paradigms] and bootstrap means [draws, paradigms] of outcomes.

    An outcome is 0, 0.5 or 1, so sampling its pairs again is sampling the three counts.
    """
    generator = np.random.default_rng(0)
    levels = np.array([0.0, 0.5, 1.0])
    columns = []
    for outcome in by_paradigm:
        shares = np.array([(outcome == level).sum() for level in levels]) / len(outcome)
        columns.append(generator.multinomial(len(outcome), shares, size=_DRAWS) @ levels
                       / len(outcome))
    return np.array([outcome.mean() for outcome in by_paradigm]), np.stack(columns, axis=1)


def _score(means: np.ndarray, draws: np.ndarray) -> dict:
    tails = 100 * (1 - _LEVEL) / 2
    low, high = np.percentile(draws.mean(axis=1), [tails, 100 - tails])
    return {"accuracy": math.fsum(means) / len(means), "interval": [float(low), float(high)]}


def describe(scored: PairScores, pairs: list[MinimalPair], model: str, data: str) -> dict:
    """Return minimal_pairs.json: what was asked, of what, and every score."""
    return {"model": model, "data": data, "pairs": len(pairs), "sentences": 2 * len(pairs),
            "unknown_tokens": scored.unknown_tokens, "undecided": scored.undecided,
            "ranks": dist.world_size(),
            "seconds": round(scored.seconds, 2),
            "headlines": [name for name in HEADLINES if name in scored.scores],
            "interval": f"{_LEVEL:.0%} bootstrap over pairs, {_DRAWS:,} samples",
            "scorers": summarize(scored, pairs)}


def table(result: dict, published: dict[str, dict[str, float]]) -> str:
    """Return the scores by phenomenon as text, next to those of `published` models."""
    scorers = result["scorers"]
    titles = ["pairs of phenomenon", *(SCORERS[name] for name in scorers), *published]
    groups = {"overall": scorers} | {
        phenomenon: {name: values["phenomena"][phenomenon] for name, values in scorers.items()}
        for phenomenon in next(iter(scorers.values()))["phenomena"]}
    lines = [titles]
    for group, values in groups.items():
        cells = [f"{100 * value['accuracy']:.1f} ({100 * value['interval'][0]:.1f}-"
                 f"{100 * value['interval'][1]:.1f})" for value in values.values()]
        lines.append([group.replace("_", " "), *cells,
                      *(f"{100 * column[group]:.1f}" for column in published.values())])
    widths = [max(len(line[k]) for line in lines) for k in range(len(titles))]
    text = "\n".join(f"{line[0]:<{widths[0]}}" + "".join(
        f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines)
    rate = result["sentences"] / max(result["seconds"], 1e-9)
    notes = [f"{result['pairs']:,} pairs, {result['sentences']:,} sentences in "
             f"{result['seconds']:.1f} s ({rate:,.0f} per second); chance is 50; in brackets: "
             f"{result['interval']}"]
    few = [name for name, values in next(iter(scorers.values()))["paradigms"].items()
           if values["pairs"] < _FEW_PAIRS]
    if few:
        notes.append(f"WARNING: {counted(len(few), 'paradigm')} of fewer than {_FEW_PAIRS} pairs "
                     f"({few[0]}{', ...' if few[1:] else ''}): resampling so few varies too "
                     "little, and intervals are too narrow")
    if result["unknown_tokens"]:
        notes.append(f"WARNING: {result['unknown_tokens']:,} tokens are unknown to the tokenizer: "
                     "likelihoods leave them out, a discriminator judges them as they are")
    if result["undecided"]:
        notes.append(f"{result['undecided']:,} pairs count one half in likelihoods: their "
                     "sentences are equal, or have unlike numbers of unknown tokens")
    return "\n".join([text, *notes])


def published_scores(result: dict) -> dict[str, dict[str, float]]:
    """Return {model: {"overall" or phenomenon: accuracy}}, n-gram to GPT-2 and people, for the
    phenomena of a minimal_pairs.json.

    Empty unless its paradigms are all 67 of BLiMP. Filtered versions of BLiMP have the same names
    and fewer pairs, so their scores differ by a few points.
    """
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    scores = published["paradigms"]
    paradigms = next(iter(result["scorers"].values()))["paradigms"]
    if paradigms.keys() != scores.keys():
        return {}
    groups = {"overall": list(scores)}
    for paradigm, values in sorted(paradigms.items()):
        groups.setdefault(values["phenomenon"], []).append(paradigm)
    return {model: {group: sum(scores[name][number] for name in names) / len(names)
                    for group, names in groups.items()}
            for number, model in enumerate(published["columns"])}
