"""A choice of masked words: those of rare pieces are taken more often.

    [objective.mask]
    selection = "examples/rare_words.py:rare_words"

Called for every row with its ids [L], the starts and lengths of its words in tokens [W], how many
tokens are to be chosen, and the row's own generator, which depends on data.seed and on the row
alone: draw from nothing else. Returns indexes of words, at least one. max_ngram is not read;
mask_share and random_share say what stands in place of the tokens.
"""

import numpy as np


def rare_words(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, budget: int,
               rng: np.random.Generator) -> np.ndarray:
    # SentencePiece and BPE number pieces by frequency: a high id is rare. A word's weight is that
    # of its first piece; the smallest of -log(uniform) / weight is a draw by weight.
    weights = np.log1p(ids[starts])
    order = np.argsort(-np.log1p(-rng.random(len(starts))) / weights)
    count = int(np.searchsorted(np.cumsum(lengths[order]), budget, side="right"))
    return order[:max(1, count)]
