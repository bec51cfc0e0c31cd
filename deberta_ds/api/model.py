"""A model of any format in Python: sentence vectors, masked words, sentence scores.

Legend: N texts, B batch, L length, C hidden size.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from deberta_ds.base.errors import UserError
from deberta_ds.evaluate.fill_mask import Filling, check_fills_masks, fill_mask
from deberta_ds.evaluate.pair_scores import original_scores, score_pairs
from deberta_ds.model.backbone import Backbone
from deberta_ds.release.reader import load_backbone
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.pairs import MinimalPair, encode_sentences

POOLINGS = ("mean", "cls")


def load(path: str | Path, tokenizer: str | Path | None = None) -> "Model":
    """Return the model at `path`, in fp32 on the CPU, in evaluation mode.

    `path` is a run's out_dir (its newest checkpoint), a checkpoint, an export, a fine-tuned model,
    or a Hugging Face or microsoft/DeBERTa directory. `tokenizer` is the path of its tokenizer,
    where the model has none. Raises UserError for a missing, damaged or unknown model.

    Examples:
        >>> model = load(MODEL)
        >>> model.encode(["A text.", "Another one."]).shape == (2, model.module.config.hidden_size)
        True
    """
    return Model(path, tokenizer)


class Model:
    """A loaded model; see `load`.

    Attributes: module, the encoder, a torch module: `module(input_ids, attention_mask)` are the
    hidden states [B, L, C]; tokenizer.
    """

    def __init__(self, path: str | Path, tokenizer: str | Path | None = None):
        self._path = path
        self._loaded = load_backbone(path, tokenizer, for_text=True)
        assert self._loaded.tokenizer is not None  # for_text
        self.module: Backbone = self._loaded.backbone
        self.tokenizer: Tokenizer = self._loaded.tokenizer

    def __repr__(self) -> str:
        config = self._loaded.model_config
        return (f"Model({str(self._path)!r}: {config.num_layers} layers of {config.hidden_size}, "
                f"{self.tokenizer.size:,} tokens)")

    @torch.no_grad()
    def encode(self, texts: str | Sequence[str], batch_size: int = 32, pooling: str = "mean",
               truncate: bool = False) -> np.ndarray:
        """Return the vectors of texts, fp32 [N, C], or [C] of one text.

        pooling: "mean" of the hidden states of all tokens, with [CLS] and [SEP], as
        sentence-transformers has it, or "cls", the state of [CLS]. batch_size: texts per forward
        pass. Texts beyond the model's positions are an error, unless `truncate` cuts their ends.

        Examples:
            >>> load(MODEL).encode("A text.", pooling="cls").dtype
            dtype('float32')
        """
        if pooling not in POOLINGS:
            raise UserError(f"pooling = {pooling!r}: is none of {', '.join(POOLINGS)}")
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}: must be at least 1")
        if isinstance(texts, str):
            return self.encode([texts], batch_size, pooling, truncate)[0]
        config, sep_id = self._loaded.model_config, self.tokenizer.sep_id
        most = config.max_position
        rows = encode_sentences(list(texts), self.tokenizer, 1 << 40)
        for number, row in enumerate(rows):
            if len(row) > most:
                if not truncate:
                    raise UserError(f"text {number} has {len(row)} tokens, but the model has "
                                    f"{most} positions; truncate=True cuts such texts")
                rows[number] = [*row[:most - 1], sep_id]
        device = self.module.words.weight.device
        vectors_NC = np.empty((len(rows), config.hidden_size), np.float32)
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        for start in range(0, len(order), batch_size):
            chosen = order[start:start + batch_size]
            tokens = [torch.tensor(rows[number]) for number in chosen]
            ids_BL = pad_sequence(tokens, batch_first=True, padding_value=self.tokenizer.pad_id)
            mask_BL = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True)
            states_BLC = self.module(ids_BL.to(device), mask_BL.to(device)).float().cpu()
            if pooling == "cls":
                pooled_BC = states_BLC[:, 0]
            else:
                pooled_BC = (states_BLC * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdim=True)
            vectors_NC[chosen] = pooled_BC.numpy()
        return vectors_NC

    def fill_mask(self, text: str, top: int = 5) -> list[list[Filling]]:
        """Return for each [MASK] of `text`, in order, the `top` most probable tokens.

        By the enhanced mask decoder; of a discriminator, by the generator next to it. UserError if
        there is none, if the text has no [MASK], or is too long.

        Examples:
            >>> [filling] = load(MODEL).fill_mask("It is a [MASK] day.", top=1)[0]
            >>> 0 < filling.probability < 1
            True
        """
        check_fills_masks(self._loaded, self._path)
        return fill_mask(self._loaded, text, top)

    def score(self, pairs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
        """Return {scorer: fp64 [pairs, 2]} of pairs of sentences; higher is better.

        Pseudo-log-likelihoods ("pll_word", "pll_token") of a masked LM or a generator, sums and
        means of log p(original) ("discriminator_sum", ...) of a discriminator
        (docs/how-to/evaluate.md).

        Examples:
            >>> scores = load(MODEL).score([("She sings.", "She sing.")])
            >>> scores["pll_word"].shape
            (1, 2)
        """
        return score_pairs(self._loaded, [MinimalPair(*pair, "pairs", "") for pair in pairs]).scores

    def replaced(self, text: str) -> list[tuple[str, float]]:
        """Return (token, probability that it was replaced) of each token of a text.

        UserError if the model is no discriminator.

        Examples:
            >>> [token for token, _ in load(MODEL).replaced("A day.")] == list(
            ...     load(MODEL).tokenizer.subwords(load(MODEL).tokenizer.encode("A day.")))
            True
        """
        head = self._loaded.replaced_token_head
        if head is None:
            raise UserError(f"{self._path}: has no head of a discriminator; give a run of "
                            "replaced-token detection, or its export")
        rows = encode_sentences([text], self.tokenizer, self._loaded.model_config.max_position)
        scores_BL = original_scores(self.module, head, rows, np.array([0]))
        ids = rows[0][1:-1]
        return list(zip(self.tokenizer.subwords(ids), (1 - np.exp(scores_BL[0, 1:-1])).tolist(),
                        strict=True))
