"""How probable a sentence is to a masked LM, and how original to a discriminator.

Pseudo-log-likelihood (Salazar et al. 2020): the sum over the pieces of log p(piece | the others),
each by a forward of its own through the enhanced mask decoder. With one piece masked at a time the
pieces of a word give each other away, so "by word" also hides the pieces that follow in the same
word (Kauf and Ivanova 2023, within-word left to right): a word of whole-word masking, or, as they
have it, one of the tokenizer's `word_ids()`. A discriminator needs one forward for all
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

from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.objectives.sentences import Queries, masked_batch
from deberta_ds.tokenizer import Tokenizer

BATCH_TOKENS = 4096
_LOGITS_AT_ONCE = 1 << 22


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
def masked_scores(words: TokenEmbedding, masked_lm: MaskedLm, tokenizer: Tokenizer,
                  sentences: list[list[int]], queries: Queries, work: list[Work],
                  ) -> Iterator[tuple[Work, np.ndarray]]:
    """Yield (batch, log p of its queries' pieces, fp64 [B]) for each batch of `work`."""
    device = words.weight.device
    for batch in work:
        asked = zip(queries.sentence[batch.items], queries.target[batch.items],
                    queries.end[batch.items], strict=True)
        inputs = masked_batch([(sentences[number], target, end) for number, target, end in asked],
                              tokenizer).to(device)
        states_BC = masked_lm.target_states(words, inputs)
        label_B = inputs.labels.gather(1, inputs.target_positions)[:, 0]
        yield batch, log_probabilities(words, masked_lm, states_BC, label_B, tokenizer.size)


def log_probabilities(words: TokenEmbedding, masked_lm: MaskedLm, states_BC: Tensor,
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
