"""A choice of masked words: rare words are masked more often.

    [objective.mask]
    selection = "examples/rare_words.py:rare_words"

Called for every sequence with its ids [L], the starts and lengths of its words in tokens [W], the
number of tokens to choose, and a random generator that depends on data.seed and the sequence
alone: sample from no other. Returns indexes of words, at least one. max_ngram is not read.
mask_share and random_share say what replaces the chosen tokens.
"""

import numpy as np


def rare_words(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, budget: int,
               rng: np.random.Generator) -> np.ndarray:
    # SentencePiece and BPE number subwords by frequency: a high id is rare. The weight of a word
    # is that of its first subword. The smallest -log(uniform) / weight is a sample by weight.
    weights = np.log1p(ids[starts])
    order = np.argsort(-np.log1p(-rng.random(len(starts))) / weights)
    count = int(np.searchsorted(np.cumsum(lengths[order]), budget, side="right"))
    return order[:max(1, count)]
