"""Sentences as batches of a pretraining model, for scores that a run takes while it trains.

analysis.sentence_scores does the same for finished models, faster and with more readings.
"""

import numpy as np

from deberta_ds.data.batch import IGNORE, Batch, Row, collate
from deberta_ds.data.masking import word_spans
from deberta_ds.tokenizer import Tokenizer

SENTENCES_AT_ONCE = 32


def masked_copies(sentence: list[int], tokenizer: Tokenizer) -> Batch:
    """Return the sentence once for every piece: it and what follows in its word are masked.

    The piece is the copy's only target, so the batch's loss is the sentence's negative
    pseudo-log-likelihood by word (Kauf and Ivanova 2023).
    """
    ids = np.array(sentence)
    spans = word_spans(ids, tokenizer.word_starts(), tokenizer.is_special()[ids])
    rows = []
    for start, length in zip(*spans, strict=True):
        for target in range(int(start), int(start + length)):
            inputs, labels = ids.copy(), np.full_like(ids, IGNORE)
            inputs[target:start + length] = tokenizer.mask_id
            labels[target] = ids[target]
            rows.append(_row(inputs, labels, len(ids)))
    return collate(rows or [_row(ids, np.full_like(ids, IGNORE), len(ids))])


def padded(sentences: list[list[int]], tokenizer: Tokenizer) -> Batch:
    """Return the sentences as rows without targets, padded to the longest."""
    longest = max(map(len, sentences))
    rows = []
    for sentence in sentences:
        ids = np.full(longest, tokenizer.pad_id, dtype=np.int64)
        ids[:len(sentence)] = sentence
        rows.append(_row(ids, np.full_like(ids, IGNORE), len(sentence)))
    return collate(rows)


def _row(ids: np.ndarray, labels: np.ndarray, tokens: int) -> Row:
    columns = np.arange(len(ids), dtype=np.int32)
    return Row(0, ids, labels, (columns < tokens).astype(np.int32), columns * (columns < tokens))
