"""What the attention scores of a text are made of: content, and where the tokens stand.

score[i, j] = content to content + content to position + position to content, each divided by the
root of (head size x number of terms) as in the model (DeBERTa, arXiv 2006.03654, equation 4). All
is computed in float64 from the queries, keys and position tables that the model itself projects;
the probabilities of the sum must give the model's own attention output, or nothing is returned.

Shape legend: B batch (one text), L length, H heads, D head size, S rows of the relative table.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import TERMS
from deberta_ds.model.attention.reference import score_parts, score_scale
from deberta_ds.model.encoder import Attention
from deberta_ds.release.reader import LoadedModel

TOLERANCE = 1e-6  # of the attention output; in float64 the difference is about 1e-14
MAX_TOKENS = 128  # a picture of more has cells that nobody can point at


@dataclass(frozen=True)
class HeadParts:
    """One head on one text; every array is [L, L], rows are queries, columns are keys."""

    layer: int  # from 0, as in the names of the weights
    head: int
    parts: dict[str, np.ndarray]  # "content", and the position terms that the model has
    scores: np.ndarray  # the sum of the parts
    probabilities: np.ndarray


@dataclass(frozen=True)
class Similarity:
    """Cosine of a position table's row for each distance with its row for distance 0."""

    name: str
    distances: np.ndarray  # query column minus key column, from -M to M
    cosines: np.ndarray


PART_NAMES = {"content": "content to content", "c2p": "content to position",
              "p2c": "position to content"}


@torch.no_grad()
def attention_parts(model: LoadedModel, text: str, layers: list[int], heads: list[int]
                    ) -> tuple[list[str], list[HeadParts]]:
    """Return the text of every token, and the parts of every chosen head, layer by layer.

    `model` was loaded for text. Raises UserError for a text that is too long for a picture and for
    layers that are not there.
    """
    config, tokenizer = model.model_config, model.tokenizer
    assert tokenizer is not None
    for name, chosen, count in (("layer", layers, config.num_layers),
                                ("head", heads, config.num_heads)):
        if wrong := [number for number in chosen if not 0 <= number < count]:
            raise UserError(f"{name} {wrong[0]}: the model has {name}s 0 to {count - 1}")
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    limit = min(MAX_TOKENS, config.max_position) if config.absolute_input else MAX_TOKENS
    if not 2 < len(ids) <= limit:
        raise UserError(f"the text has {len(ids) - 2} tokens; a picture shows 1 to {limit - 2}")
    backbone, ids_BL = model.backbone.double(), torch.tensor([ids])
    seen: list[dict[str, Any]] = [{} for _ in layers]  # what each layer was given
    parts = [backbone.trunk.encoder.layers[layer].attention for layer in layers]
    with ExitStack() as stack:
        stack.callback(backbone.float)
        for attention, found in zip(parts, seen, strict=True):
            stack.enter_context(attention.register_forward_pre_hook(
                lambda _, inputs, found=found: found.update(queries=inputs[0], keys=inputs[1])))
            stack.enter_context(attention.output.register_forward_pre_hook(
                lambda _, inputs, found=found: found.update(context=inputs[0])))
        backbone(ids_BL, torch.ones_like(ids_BL))
        maps = [one for layer, attention, found in zip(layers, parts, seen, strict=True)
                for one in _heads_of(attention, layer, heads, found["queries"], found["keys"],
                                     found["context"])]
    return [text.strip() or "\u2423" for text in tokenizer.readable(ids)], maps


def _heads_of(attention: Attention, layer: int, heads: list[int], queries_BHLD: Tensor,
              keys_values: tuple, context_BLC: Tensor) -> list[HeadParts]:
    config = attention.config
    keys_BHLD, values_BHLD, *tables = keys_values
    q_HLD, k_HLD, v_HLD = queries_BHLD[0], keys_BHLD[0], values_BHLD[0]
    length = q_HLD.size(1)
    columns = torch.arange(length)
    slots_LL = attention.geometry.slots(columns[:, None] - columns)
    parts_HLL = score_parts(q_HLD, k_HLD, slots_LL.expand(config.num_heads, -1, -1), *tables)
    scale = score_scale(config.head_size, *tables)
    parts_HLL = {name: part * scale for name, part in parts_HLL.items()}
    scores_HLL = sum(parts_HLL.values())
    probabilities_HLL = scores_HLL.softmax(-1)
    found_LC = (probabilities_HLL @ v_HLD).transpose(0, 1).flatten(1)
    gap = (found_LC - context_BLC[0]).abs().max().item()
    assert gap <= TOLERANCE * max(1.0, context_BLC.abs().max().item()), (
        f"layer {layer}: the parts do not give the model's attention ({gap:.1e})")
    return [HeadParts(layer, head, {name: part[head].numpy() for name, part in parts_HLL.items()},
                      scores_HLL[head].numpy(), probabilities_HLL[head].numpy())
            for head in heads]


@torch.no_grad()
def position_similarity(model: LoadedModel, layers: list[int]) -> dict[str, list[Similarity]]:
    """Return by table ("table", "c2p", "p2c") how alike the rows of near and far distances are.

    "table" is the one that all layers share, "c2p" and "p2c" its projections in the chosen layers,
    the mean over their heads. Empty for a model without relative positions.
    """
    config, encoder = model.model_config, model.backbone.trunk.encoder
    relative_SC = encoder.relative_table()
    if relative_SC is None:
        return {}
    limit = config.largest_distance - 1  # what is farther shares its row
    distances = torch.arange(-limit, limit + 1)
    slots = encoder.layers[0].attention.geometry.slots(distances)

    def similarity(name: str, table_HSD: Tensor) -> Similarity:
        rows_HND = torch.nn.functional.normalize(table_HSD.double()[:, slots], dim=-1)
        cosines_HN = (rows_HND * rows_HND[:, limit: limit + 1]).sum(-1)
        return Similarity(name, distances.numpy(), cosines_HN.mean(0).numpy())

    found = {"table": [similarity("all layers", relative_SC[None])]}
    nothing_BLC = torch.zeros(1, 1, config.hidden_size)
    for layer in layers:
        keys_values = encoder.layers[layer].attention.project_keys_values(nothing_BLC, relative_SC)
        for name, table_HSD in zip(TERMS, keys_values[2:], strict=True):
            if table_HSD is not None:
                found.setdefault(name, []).append(similarity(f"layer {layer}", table_HSD))
    return found
