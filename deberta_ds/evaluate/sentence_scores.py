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

import numpy as np
import torch
import torch.nn.functional as F

from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.objectives.sentences import Queries, masked_batch
from deberta_ds.tokenizer import Tokenizer

BATCH_TOKENS = 4096
_LOGITS_AT_ONCE = 1 << 22


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
    states_BC = head.norm(F.gelu(head.dense(masked_lm.target_states(words, inputs))))
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
