"""How probable a sentence is to a masked LM, and how original to a discriminator.

Pseudo-log-likelihood (Salazar et al. 2020): the sum over the pieces of log p(piece | the others),
each by a forward of its own through the enhanced mask decoder. With one piece masked at a time the
pieces of a word give each other away, so "by word" also hides the pieces that follow in the same
word (Kauf and Ivanova 2023, within-word left to right). A discriminator needs one forward for all
pieces: log p(original) = log sigmoid(-logit). [CLS] and [SEP] carry no words and are not counted.

Sentences are cut into batches of one length: nothing is padded, and a batch does not depend on the
number of ranks, so neither do the scores.

Legend: N sentences of one length, B batch, L length, C hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.data.batch import IGNORE, Batch
from deberta_ds.data.masking import word_spans
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import WordEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.tokenizer import Tokenizer

BATCH_TOKENS = 4096
_LOGITS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Queries:
    """Forward rows of pseudo-log-likelihoods: log p(piece at `target`) with [target, end) masked.

    A row serves both readings where they agree: words of one piece, and last pieces of words.
    """

    sentence: np.ndarray
    target: np.ndarray
    end: np.ndarray
    by_piece: np.ndarray
    by_word: np.ndarray


def queries_of(sentences: list[list[int]], tokenizer: Tokenizer) -> Queries:
    """Return the rows that both readings of all sentences need, each once."""
    word_start, special = tokenizer.word_starts(), tokenizer.is_special()
    rows = []
    for number, sentence in enumerate(sentences):
        ids = np.array(sentence)
        for start, length in zip(*word_spans(ids, word_start, special[ids]), strict=True):
            end = int(start + length)
            rows += [(number, target, end, target + 1 == end, True)
                     for target in range(int(start), end)]
            rows += [(number, target, target + 1, True, False)
                     for target in range(int(start), end - 1)]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Queries(*columns[:3], *columns[3:].astype(bool))


@dataclass(frozen=True)
class Work:
    """A batch: items (of a list of queries or sentences) that share one length."""

    items: np.ndarray
    length: int


def cut_work(lengths: np.ndarray, batch_tokens: int = BATCH_TOKENS) -> list[Work]:
    """Return batches of at most `batch_tokens` that hold every item once, long ones first."""
    batches = []
    for length in np.unique(lengths)[::-1]:
        items = np.flatnonzero(lengths == length)
        rows = max(1, batch_tokens // int(length))
        batches += [Work(items[start:start + rows], int(length))
                    for start in range(0, len(items), rows)]
    return batches


@torch.no_grad()
def masked_scores(words: WordEmbedding, masked_lm: MaskedLm, tokenizer: Tokenizer,
                  sentences: list[list[int]], queries: Queries, work: list[Work],
                  ) -> Iterator[tuple[Work, np.ndarray]]:
    """Yield (batch, log p of its queries' pieces, fp64 [B]) for each batch of `work`."""
    device = words.weight.device
    for batch in work:
        sentence_B, target_B, end_B = (part[batch.items] for part in (
            queries.sentence, queries.target, queries.end))
        ids_BL = np.array([sentences[number] for number in sentence_B])
        columns_L = np.arange(batch.length)
        hidden_BL = (columns_L >= target_B[:, None]) & (columns_L < end_B[:, None])
        label_B = torch.from_numpy(ids_BL[np.arange(len(ids_BL)), target_B]).to(device)
        inputs = _batch(np.where(hidden_BL, tokenizer.mask_id, ids_BL), target_B).to(device)
        states_BC = masked_lm.target_states(words, inputs)
        yield batch, log_probabilities(words, masked_lm, states_BC, label_B, tokenizer.size)


def log_probabilities(words: WordEmbedding, masked_lm: MaskedLm, states_BC: Tensor,
                      label_B: Tensor, valid_vocab: int) -> np.ndarray:
    """Return fp64 [B]: log softmax at the labels over the ids below `valid_vocab`."""
    head = masked_lm.head
    states_BC = head.norm(F.gelu(head.dense(states_BC)))
    weight_VC, bias_V = words.weight[:valid_vocab], head.bias[:valid_vocab]
    rows = max(1, _LOGITS_AT_ONCE // valid_vocab)
    parts = []
    for some_BC, some_B in zip(states_BC.split(rows), label_B.split(rows), strict=True):
        logits_BV = F.linear(some_BC, weight_VC, bias_V)
        chosen_B = logits_BV.gather(1, some_B[:, None])[:, 0]
        parts.append((chosen_B - logits_BV.logsumexp(-1)).double())
    return torch.cat(parts).cpu().numpy()


@torch.no_grad()
def original_scores(backbone: Backbone, head: ReplacedTokenHead, sentences: list[list[int]],
                    work: list[Work]) -> Iterator[tuple[Work, np.ndarray]]:
    """Yield (batch, log p(original) [B, L] of its sentences' tokens) for each batch of `work`."""
    device = backbone.words.weight.device
    for batch in work:
        ids_BL = torch.tensor([sentences[number] for number in batch.items], device=device)
        positions_BL = torch.arange(batch.length, device=device).expand_as(ids_BL)
        segments_BL = torch.ones_like(ids_BL, dtype=torch.int32)
        logits_BL = head(backbone(ids_BL, segments_BL, positions_BL), positions_BL)
        yield batch, F.logsigmoid(-logits_BL).double().cpu().numpy()


def _batch(input_ids_BL: np.ndarray, target_B: np.ndarray) -> Batch:
    """Return a training batch whose only targets are the columns `target_B`."""
    ids_BL = torch.from_numpy(input_ids_BL)
    rows, length = ids_BL.shape
    return Batch(rows=torch.zeros(rows, dtype=torch.int64), input_ids=ids_BL,
                 labels=torch.full_like(ids_BL, IGNORE),
                 segments=torch.ones_like(ids_BL, dtype=torch.int32),
                 positions=torch.arange(length).expand(rows, length).contiguous(),
                 target_positions=torch.from_numpy(target_B)[:, None],
                 target_index=torch.arange(rows), num_targets=rows, num_tokens=rows * length)
