"""Relative position tables as official code and transformers read them at every distance.

With log buckets, the official code clamps a distance to max_relative - 1 before it takes the
logarithm (DeBERTa/deberta/da_utils.py, make_log_bucket_position), so the rows outside the outermost
buckets (row 0, for an even number of buckets) are never read or trained. transformers takes the
logarithm of any distance and clamps the row, so beyond max_relative tokens it reads just those. An
exported table repeats the outermost trained row there, which makes both the same function at every
length; the rows that were there are kept next to it and come back on the way in. A model that
transformers trained beyond max_relative tokens has trained them, and is another function here.

Where the buckets have a row for every distance already (256 of them for 128 tokens), transformers
divides by the logarithm of one or less, and the official code takes none. For transformers such a
table is written with a row a distance and without buckets, which is the same function.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.release.networks import Network

_OURS = "trunk.encoder.relative"  # in a Network
TABLE, UNREAD_ROWS = "encoder.rel_embeddings.weight", "encoder.rel_embeddings.unread_rows"


def a_row_a_distance(config: ModelConfig) -> ModelConfig:
    """Return a configuration without buckets where transformers would misread them."""
    limit = config.largest_distance
    if not config.relative_attention or config.position_buckets // 2 < limit - 1:
        return config
    return replace(config, position_buckets=0, max_relative=limit)


def with_a_row_a_distance(network: Network, name: str = "main") -> tuple[Network, list[str]]:
    """Return the network of `a_row_a_distance`, and a note on it."""
    config, plain = network.config, a_row_a_distance(network.config)
    if plain == config:
        return network, []
    limit = config.largest_distance
    rows = Geometry(limit, config.position_buckets).slots(torch.arange(-limit, limit))
    note = (f"mapped: {name}: relative table of {config.position_buckets} buckets a side for "
            f"distances up to {limit}: written with a row a distance, as transformers cannot read "
            "it")
    return replace(network, config=plain,
                   tensors=network.tensors | {_OURS: network.tensors[_OURS][rows]}), [note]


def without_unread_rows(tensors: dict[str, Tensor], config: ModelConfig
                        ) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors whose table transformers reads as we do at every length, and a note on it."""
    unread, stand_ins = _unread_rows(config)
    if not unread or TABLE not in tensors:
        return tensors, []
    table = tensors[TABLE].clone()
    table[unread] = table[stand_ins]
    note = (f"mapped: relative rows {unread}, which only transformers reads (beyond "
            f"{config.largest_distance} tokens), repeat the outermost trained ones")
    return tensors | {TABLE: table, UNREAD_ROWS: tensors[TABLE][unread]}, [note]


def with_unread_rows(tensors: dict[str, Tensor], config: ModelConfig, place: str
                     ) -> dict[str, Tensor]:
    """Return tensors with the rows that `without_unread_rows` kept next to the table put back."""
    if UNREAD_ROWS not in tensors:
        return tensors
    tensors = dict(tensors)
    rows, table = tensors.pop(UNREAD_ROWS), tensors.get(TABLE)
    unread, _ = _unread_rows(config)
    if table is None or table.ndim != 2:
        return tensors  # which is said of every table
    if tuple(rows.shape) != (len(unread), table.size(1)) or not rows.is_floating_point():
        raise UserError(f"{place}: {UNREAD_ROWS} has shape {tuple(rows.shape)} and type "
                        f"{rows.dtype}, but the configuration asks for numbers of "
                        f"{(len(unread), table.size(1))}")
    # transformers saves the table in another precision, and leaves these rows as they are.
    table = table.to(torch.promote_types(table.dtype, rows.dtype), copy=True)
    table[unread] = rows.to(table.dtype)
    return tensors | {TABLE: table}


def as_transformers_reads(network: Network, length: int) -> Network:
    """Return what transformers computes from the file's table in texts of up to `length` tokens,
    as a network with a row a distance (`build_relative_position` there).
    """
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    config, span, table = network.config, network.config.position_buckets, network.source_table
    assert table is not None and span
    rows = make_log_bucket_position(torch.arange(-length, length), span, config.largest_distance)
    table = table[(rows + span).clamp(0, 2 * span - 1).long()]
    return replace(network, config=replace(config, position_buckets=0, max_relative=length),
                   tensors=network.tensors | {_OURS: table})


def _unread_rows(config: ModelConfig) -> tuple[list[int], list[int]]:
    """Return (rows outside the outermost buckets, the row that serves instead of each)."""
    if not config.relative_attention:
        return [], []
    geometry = Geometry(config.largest_distance, config.position_buckets)
    first, last = geometry.slots(torch.tensor([-geometry.max_relative, geometry.max_relative])
                                 ).tolist()
    below, above = list(range(first)), list(range(last + 1, geometry.num_slots))
    return below + above, [first] * len(below) + [last] * len(above)
