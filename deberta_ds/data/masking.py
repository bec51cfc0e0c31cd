"""Which tokens of a row are hidden, and what stands in their place.

"uniform" (default): whole words in random order until exactly round(rate * real tokens) tokens are
chosen; n-grams extend over the following words of the segment with P(n) ~ 1/n. Words that would
overshoot are skipped, so long words are chosen a little less often, and with n-grams the first
words of a segment too (docs/evidence/data.md has the figures); tenths of a row are alike.

What has no word starts (hexadecimal, base64, DNA, digits, scripts spelled in bytes) would be one
word of a whole row: beyond 16 tokens, or beyond the budget, each character of a word stands for
itself (a token, or the tokens that hold its bytes: one byte would give the others away).

"deberta_window" reproduces the official NGramMaskGenerator (microsoft/DeBERTa,
`apps/tasks/mlm_task.py`), which consumes its budget from the left: at 512 tokens the last tenth of
a row is never masked. With max_ngram 1 it chooses tokens, else words by the official rule.

FILE.py:NAME is a function of one's own that chooses among the words of "uniform".
"""

import math
import random
from bisect import bisect_left
from functools import cache

import numpy as np

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig

IGNORE = -100
LONGEST_WORD = 16  # tokens


def mask_row(ids: np.ndarray, word_start: np.ndarray, character_start: np.ndarray,
             special: np.ndarray, mask: MaskConfig, mask_id: int, rng: np.random.Generator,
             pad_id: int = 0, rate: float | None = None, flipped_L: np.ndarray | None = None,
             rare: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return (input_ids i64[L], labels i64[L]) for the framed and padded row `ids` i64[L].

    `word_start`, `character_start` (ids that begin a character) and `special` (pad, cls, sep, unk
    and mask) are bool tables over the tokenizer's ids. Of the chosen tokens `mask_share` become
    [MASK], `random_share` a random ordinary id, the rest stay. Labels are the original ids there
    and -100 elsewhere. A row with any word gets at least one target. `rate` is the row's; without
    it `mask.rate`. `flipped_L`: where a word starts though the table says not, or the other way.
    `rare`: special ids and those of bytes; a byte is drawn only in a row that has it.
    """
    special_L, begins_L = special[ids], word_start[ids]
    if flipped_L is not None:
        begins_L ^= flipped_L
    rate = mask.rate if rate is None else rate
    budget = max(1, round(rate * int(np.count_nonzero(ids != pad_id))))
    if mask.selection == "deberta_window":
        return _deberta_window(ids, begins_L, special_L, mask, rate, budget, mask_id, len(special),
                               random.Random(int(rng.integers(1 << 63))))
    starts, lengths = word_spans(begins_L, special_L)
    starts, lengths = cut_long_words(starts, lengths, budget, character_start[ids])
    if mask.selection != "uniform":
        words = _choose_by(mask.selection, ids, starts, lengths, budget, rng)
    elif mask.max_ngram == 1:
        words = choose_words(lengths, budget, rng)
    else:
        words = choose_ngrams(starts, lengths, budget, mask.max_ngram, rng)
    chosen = _expand(starts[words], lengths[words])
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[chosen] = ids[chosen]
    output = ids.copy()
    if mask.mask_share >= 1.0:
        output[chosen] = mask_id
        return output, labels
    draw = rng.random(len(chosen))
    output[chosen[draw < mask.mask_share]] = mask_id
    shown_as_another = (draw >= mask.mask_share) & (draw < mask.mask_share + mask.random_share)
    replaced = chosen[shown_as_another]
    drawn = ~(special if rare is None else rare)
    drawn[ids[~special_L]] = True
    ordinary = np.flatnonzero(drawn)
    output[replaced] = ordinary[(rng.random(len(replaced)) * len(ordinary)).astype(np.int64)]
    return output, labels


def word_spans(begins_L: np.ndarray, special_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, lengths) of the words of a row; special tokens belong to no word.

    A token after a special one starts a word even if its id would continue one.
    """
    begins = begins_L | special_L
    begins[1:] |= special_L[:-1]
    begins[0] = True
    edges = begins.nonzero()[0]  # of words and of special tokens
    lengths = np.empty_like(edges)
    np.subtract(edges[1:], edges[:-1], out=lengths[:-1])
    lengths[-1] = len(begins) - edges[-1]
    ordinary = ~special_L[edges]
    return edges[ordinary], lengths[ordinary]


def cut_long_words(starts: np.ndarray, lengths: np.ndarray, budget: int, begins_L: np.ndarray
                  ) -> tuple[np.ndarray, np.ndarray]:
    """Return the words, with each character of one that is too long as a word of its own.

    `begins_L` says which tokens begin a character; the others go on inside it.

    Too long is above LONGEST_WORD or above `budget`, which could never hold it; but where no word
    is within the budget, the shortest stays whole and overshoots.
    """
    if not len(lengths) or lengths.max() <= min(LONGEST_WORD, budget):
        return starts, lengths
    long = lengths > min(LONGEST_WORD, max(budget, int(lengths.min())))
    parts = np.where(long, lengths, 1)
    word = np.arange(len(lengths)).repeat(parts)
    offset = np.arange(len(word)) - (parts.cumsum() - parts)[word]
    starts, lengths = starts[word] + offset, np.where(long, 1, lengths)[word]
    first = (begins_L[starts] | (offset == 0)).nonzero()[0]
    return starts[first], np.add.reduceat(lengths, first)


def _choose_by(selection: str, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray,
               budget: int, rng: np.random.Generator) -> np.ndarray:
    """Return the words that a function of one's own chooses, in order, each once."""
    if not len(starts):
        return starts
    choose = user_code.function("objective.mask.selection", selection)
    words = np.unique(choose(ids, starts, lengths, budget, rng))
    if not len(words) or words.dtype.kind not in "iu" or words[0] < 0 or words[-1] >= len(starts):
        raise UserError(f"objective.mask.selection: {selection} returned {words!r:.80} for a "
                        f"sequence of {len(starts)} words; it must return one or more indexes")
    return words


def choose_words(lengths: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Return words in random order that fill `budget` tokens; words that overshoot are passed."""
    order = rng.random(len(lengths)).argsort()
    filled = lengths[order].cumsum()
    count = int(filled.searchsorted(budget, side="right"))
    left = budget - (int(filled[count - 1]) if count else 0)
    taken = np.zeros(len(lengths), dtype=bool)
    taken[order[:count]] = True
    while left and count < len(order):
        fitting = (lengths[order[count:]] <= left).nonzero()[0]
        if not len(fitting):
            break
        count += int(fitting[0])
        taken[order[count]] = True
        left -= int(lengths[order[count]])
        count += 1
    if not taken.any() and len(order):
        taken[lengths.argmin()] = True
    return taken.nonzero()[0]


def choose_ngrams(starts: np.ndarray, lengths: np.ndarray, budget: int, max_ngram: int,
                   rng: np.random.Generator) -> np.ndarray:
    """Return chosen words: n-grams start at words in random order, n drawn with P(n) ~ 1/n.

    An n-gram ends early at the end of its segment, at a word already chosen, or when the budget has
    no room for its next word.
    """
    order, draws = rng.random(len(lengths)).argsort(), rng.random(len(lengths))
    grams = _ngram_cumulative(max_ngram).searchsorted(draws[order])
    begin, size = starts.tolist(), lengths.tolist()
    last = len(size) - 1
    taken = bytearray(len(size))
    left = budget
    for word, gram in zip(order.data, grams.data, strict=True):  # ends early
        if left == 0:
            break
        for _ in range(gram + 1):
            if taken[word] or size[word] > left:
                break
            taken[word] = True
            left -= size[word]
            if word == last or begin[word] + size[word] != begin[word + 1]:
                break
            word += 1
    if left == budget and size:
        taken[size.index(min(size))] = True
    return np.frombuffer(taken, dtype=bool).nonzero()[0]


@cache
def _ngram_cumulative(max_ngram: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, max_ngram + 1)
    cumulative = np.cumsum(weights / weights.sum())
    cumulative[-1] = 1.0
    return cumulative


def _expand(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of all tokens of the given spans, in order."""
    shift = (starts - lengths.cumsum() + lengths).repeat(lengths)
    return shift + np.arange(len(shift))


def _deberta_window(ids: np.ndarray, begins_L: np.ndarray, special_L: np.ndarray,
                    mask: MaskConfig, rate: float, budget: int, mask_id: int, num_ids: int,
                    rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """The official sampler, draw for draw."""
    units: list[list[int]] = []
    for position in np.flatnonzero(~special_L).tolist():
        if mask.max_ngram > 1 and units and not begins_L[position]:
            units[-1].append(position)
        else:
            units.append([position])
    budget = min(math.ceil(len(ids) * rate / 10) * 10, budget)
    window, cumulative = int(1 / rate), _ngram_cumulative(mask.max_ngram).tolist()
    marked = [False] * len(units)
    offset = 0
    while offset < len(units):
        gram = bisect_left(cumulative, rng.random()) + 1
        context = min(gram * window, len(units) - offset)
        first = offset + rng.randint(0, context - 1)
        end = min(first + gram, len(units))
        marked[first:end] = [True] * (end - first)
        offset = max(offset + context, end)
    output, labels = ids.copy(), np.full(len(ids), IGNORE, dtype=np.int64)
    # The official sum; 1 - random_share may round to another number, and change a row of a run.
    shown = mask.mask_share + (1.0 - mask.mask_share - mask.random_share)
    pool = range(num_ids)  # special ids too
    count = 0
    for unit, is_marked in zip(units, marked, strict=True):
        if not is_marked:
            continue
        for position in unit:
            labels[position] = ids[position]
            draw = rng.random()
            if draw < mask.mask_share:
                output[position] = mask_id
            elif draw >= shown:
                output[position] = rng.choice(pool)
            count += 1
        if count >= budget:
            break
    return output, labels
