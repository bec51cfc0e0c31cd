"""Masked language modeling with the enhanced mask decoder (DeBERTa v1/v2), and batches of
masked sentences, from which pseudo-log-likelihoods are computed.

See `objectives.base` for what the functions of this module are for.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from deberta_ds.config import objective
from deberta_ds.config.model import decoder_problems
from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.data.masking import IGNORE, word_spans
from deberta_ds.data.rows import Batch, Row, collate
from deberta_ds.model import flops
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm
from deberta_ds.objectives import base
from deberta_ds.objectives.base import Forward, Numbers, Tensors
from deberta_ds.tokenizer import Tokenizer

SENTENCES_AT_ONCE = 32
METRICS = base.masked_metrics("masked", "Masked-token", on_console="loss")
HEADS = {"main": "mlm_head."}
MASK_DEFAULTS = objective.MASK_DEFAULTS["mlm"]


def encoders(run: RunConfig) -> dict[str, ModelConfig]:
    return {"main": run.model}


def problems(run: RunConfig) -> list[str]:
    return decoder_problems(run.model.num_layers, run.model, "model.num_layers")


class MlmModel(nn.Module):
    """A token embedding and the masked LM above it."""

    def __init__(self, config: ModelConfig, valid_vocab: int | None = None):
        super().__init__()
        self.valid_vocab = valid_vocab
        self.words = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.masked_lm = MaskedLm(config)

    def forward(self, batch, normalizers: Tensors) -> tuple[Tensor, Tensors, Tensors]:
        """Return (sum of losses / normalizers["targets"], sums over this batch, {})."""
        loss_sum, num_correct, _ = self.masked_lm(self.words, batch, valid_vocab=self.valid_vocab)
        sums = {"masked_loss": loss_sum, "masked_correct": num_correct}
        loss = loss_sum / normalizers["targets"]
        return loss, {name: value.detach() for name, value in sums.items()}, {}


def build(run: RunConfig, valid_vocab: int | None) -> MlmModel:
    return MlmModel(run.model, valid_vocab)


def clip_groups(run: RunConfig) -> tuple[str, ...]:
    return ()


def flops_per_token(run: RunConfig) -> float:
    return 3 * flops.masked_lm(run.model, run.data.seq_len, run.objective.mask.rate_at(0.5))


def means(run: RunConfig, total: Numbers) -> Numbers:
    loss = total["masked_loss"] / total["targets"]
    return {"loss": loss, "masked_loss": loss}


def scores(total: Numbers, per_token: Tensors) -> Numbers:
    return base.masked_scores(total, "masked")


def sentence_scores(forward: Forward, sentences: list[list[int]], tokenizer: Tokenizer
                    ) -> list[float]:
    """Pseudo-log-likelihood by word: the loss of a batch that holds a sentence's masked copies."""
    return [-float(forward(masked_copies(ids, tokenizer))[0]["masked_loss"]) for ids in sentences]


def headline(scores: Numbers) -> str:
    return base.masked_headline(scores, "masked", "model")


def networks(run: RunConfig, state: Tensors) -> tuple[dict[str, Tensors], list[str]]:
    return {"main": base.masked_lm_tensors(state, "masked_lm.")}, []


def parameters(run: RunConfig, networks: dict[str, Tensors]) -> tuple[Tensors, list[str]]:
    return base.masked_lm_parameters(networks["main"], "masked_lm."), []


@dataclass(frozen=True)
class Queries:
    """Sequences for pseudo-log-likelihoods: log p(token at `target`) with [target, end) masked.

    Both definitions (by token, by word) share a sequence where they agree: words of one token, and
    last tokens of words. An unknown token is masked with its word, and never a target.
    """

    sentence: np.ndarray
    target: np.ndarray
    end: np.ndarray
    by_token: np.ndarray
    by_word: np.ndarray


def queries_of(sentences: list[list[int]], tokenizer: Tokenizer,
               word_ids: list[list[int]] | None = None) -> Queries:
    """Return the sequences that both definitions need for all sentences, each once.

    `word_ids` numbers the word of each token between [CLS] and [SEP]; None: whole-word masking's.
    """
    word_start, special = tokenizer.word_starts(), tokenizer.is_special()
    rows = []
    for number, sentence in enumerate(sentences):
        ids = np.array(sentence)
        if word_ids is None:
            starts, lengths = word_spans(word_start[ids], special[ids])
        else:
            edges = np.flatnonzero(np.diff(word_ids[number], prepend=-1, append=-1)) + 1
            starts, lengths = edges[:-1], np.diff(edges)
        for start, end in zip(starts, starts + lengths, strict=True):
            targets = start + np.flatnonzero(~special[ids[start:end]])
            rows += [(number, target, end, target + 1 == end, True) for target in targets]
            rows += [(number, target, target + 1, True, False) for target in targets
                     if target + 1 < end]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Queries(*columns[:3], *columns[3:].astype(bool))


def masked_copies(sentence: list[int], tokenizer: Tokenizer) -> Batch:
    """Return the sentence once for every token: it and what follows in its word are masked.

    The loss of this batch is the sentence's negative pseudo-log-likelihood by word.
    """
    queries = queries_of([sentence], tokenizer)
    spans = zip(queries.target[queries.by_word], queries.end[queries.by_word], strict=True)
    return masked_batch([(sentence, *span) for span in spans] or [(sentence, 0, 0)], tokenizer)


def masked_batch(queries: Iterable[tuple[list[int], int, int]], tokenizer: Tokenizer) -> Batch:
    """Return a batch of sentences of one length, [target, end) masked, `target` to be predicted."""
    rows = []
    for sentence, target, end in queries:
        ids = np.array(sentence)
        inputs, labels = ids.copy(), np.full_like(ids, IGNORE)
        inputs[target:end] = tokenizer.mask_id
        labels[target:min(target + 1, end)] = ids[target]
        rows.append(_row(inputs, labels, len(ids)))
    return collate(rows)


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
