"""Fill masked words with the enhanced mask decoder, as the model was trained to.

transformers' masked-LM class for DeBERTa lacks the decoder and the absolute positions it adds, so
its fill-mask prints nonsense on public models. This one runs the decoder on masked LMs (v1, v2)
and on generators (v3, mDeBERTa); the text is one sequence, as long as the position table allows.

Legend: B batch (one text), L length, M masked slots, T targets (the masks), V vocabulary.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.data.masking import IGNORE
from deberta_ds.data.rows import Row, collate
from deberta_ds.release.reader import LoadedModel, load_backbone
from deberta_ds.tokenizer import MASK_TOKEN, Tokenizer


@dataclass(frozen=True)
class Filling:
    """One proposal for one mask: the subword, how it reads ("_" for a space), and its id."""

    subword: str
    text: str
    token: int
    probability: float

    @property
    def piece(self) -> str:
        """The name of `subword` in 0.2.0."""
        return self.subword


def load_masked_lm(path: str | Path, tokenizer: str | Path | None = None) -> LoadedModel:
    """Return the model at `path`; UserError if it cannot predict masked words from text."""
    model = load_backbone(path, tokenizer, for_text=True)
    check_fills_masks(model, path)
    return model


def check_fills_masks(model: LoadedModel, path: str | Path) -> None:
    """Raise UserError if the model at `path` cannot predict masked words."""
    if model.masked_lm is None:
        raise UserError(
            f"{path}: no masked-LM head with an absolute position table; the enhanced mask decoder "
            "needs both. Give a masked LM, a generator, or a directory exported with its generator "
            "(transformers saves a model without the table; the published .bin files have it)")


@torch.no_grad()
def fill_mask(model: LoadedModel, text: str, top: int = 5) -> list[list[Filling]]:
    """Return for each [MASK] of `text`, in order, the `top` most probable subwords.

    Raises UserError if the text has no mask or is too long for the model, or for such a `top`.
    """
    assert model.tokenizer is not None and model.masked_lm is not None  # `load_masked_lm`
    tokenizer, (words, masked_lm) = model.tokenizer, model.masked_lm
    if not 1 <= top <= tokenizer.size:
        raise UserError(f"top = {top}: must be from 1 to the tokenizer's {tokenizer.size:,} ids")
    ids = encode_with_masks(tokenizer, text)
    limit = masked_lm.trunk.encoder.layers[0].attention.config.max_position
    if len(ids) > limit:
        raise UserError(f"the text has {len(ids)} tokens, but the model has {limit} positions")
    ids_L = np.array(ids)
    row = Row(0, ids_L, np.where(ids_L == tokenizer.mask_id, 0, IGNORE),
              segments=np.ones_like(ids_L), positions=np.arange(len(ids)))
    logits_TV = masked_lm.head.logits(masked_lm.target_states(words, collate([row])), words)
    # Rows above the tokenizer's size were never inside a training softmax.
    probabilities_TV = logits_TV[:, : tokenizer.size].softmax(-1)
    best = probabilities_TV.topk(top)
    return [[Filling(tokenizer.subwords([token])[0], tokenizer.readable([token])[0].strip() or "_",
                     token, probability)
             for token, probability in zip(tokens, values, strict=True)]
            for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def encode_with_masks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return [CLS] text [SEP] as ids, with "[MASK]" (or the tokenizer's own name for it) standing
    for one masked token.
    """
    names = {MASK_TOKEN, tokenizer.mask_token}
    parts = re.split("|".join(map(re.escape, names)), text.strip())
    if len(parts) == 1:
        raise UserError(f"no {' or '.join(sorted(names))} in the text: {text!r}")
    return [tokenizer.cls_id, *tokenizer.encode_around_masks(parts), tokenizer.sep_id]
