"""Give a source the layers and the reach of a run that starts from it (`[init]`).

A row of a longer relative table begins as the row which the source read at the middle of the
distances that now read it. Absolute positions are repeated from the first one on (as in Longformer,
arXiv 2004.05150, section 5).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import ModelConfig
from deberta_ds.model.attention import Geometry
from deberta_ds.release.release import Network

_LAYERS, _RELATIVE = "trunk.encoder.layers.", "trunk.encoder.relative"
_POSITIONS = ("positions.weight", "positions.delta", "trunk.input.positions.weight")
_REACH = ("max_position", "max_relative", "position_buckets")


def reshape(network: Network, wanted: ModelConfig, layers: Sequence[int], place: str,
            notes: list[str]) -> Network:
    """Return a network with these layers (none: all) and the reach of `wanted`, if that is larger.

    `notes` gets what was done. Raises UserError, which begins with `place`, for layers that do not
    fit.
    """
    network = _with_layers(network, wanted, layers, place, notes) if layers else network
    config = network.config
    longer = replace(config, **{key: getattr(wanted, key) for key in _REACH})
    if any(getattr(longer, key) < getattr(config, key)
           for key in ("max_position", "largest_distance", "relative_span")):
        return network
    tensors = dict(network.tensors)
    old, new = (Geometry(one.largest_distance, one.position_buckets) for one in (config, longer))
    if _RELATIVE in tensors and old != new:
        rows, same = _source_rows(old, new)
        tensors[_RELATIVE] = tensors[_RELATIVE][rows]
        notes.append(f"relative table: {old.num_slots:,} rows for distances up to "
                     f"{old.max_relative:,} -> {new.num_slots:,} for {new.max_relative:,}; hidden "
                     f"states are the source's in texts of {same}")
    for name in _POSITIONS if longer.max_position > config.max_position else ():
        if name in tensors:
            repeats = -(-longer.max_position // config.max_position)
            tensors[name] = tensors[name].repeat(repeats, 1)[:longer.max_position]
            notes.append(f"{name}: rows from {config.max_position:,} on begin as copies from row 0")
    return replace(network, config=longer, tensors=tensors)


def _with_layers(network: Network, wanted: ModelConfig, layers: Sequence[int], place: str,
                 notes: list[str]) -> Network:
    config, last = network.config, network.config.num_layers - 1
    if max(layers) >= config.num_layers:
        raise UserError(f"{place} has no layer {max(layers)}; its layers are 0 to {last}")
    if len(layers) != wanted.num_layers:
        raise UserError(f"{place}: {len(layers)} layers for the {wanted.num_layers} of the run; "
                        "list as many, or leave the run's number of layers out")
    if config.conv_kernel and layers[0]:
        raise UserError(f"{place} has a convolution next to its layer 0; begin the list with 0")
    if network.has_masked_lm and not config.absolute_input and layers[-1] != last:
        notes.append(f"WARNING: the enhanced mask decoder, trained with layer {last}, now applies "
                     f"layer {layers[-1]} twice; end the list with {last} to keep it")
    tensors = {name: tensor for name, tensor in network.tensors.items()
               if not name.startswith(_LAYERS)}
    for new, old in enumerate(layers):
        stem = f"{_LAYERS}{old}."
        tensors |= {f"{_LAYERS}{new}.{name.removeprefix(stem)}": tensor
                    for name, tensor in network.tensors.items() if name.startswith(stem)}
    notes.append(f"layers {', '.join(map(str, layers))} of the {config.num_layers} of the source")
    return replace(network, config=replace(config, num_layers=len(layers)), tensors=tensors)


def _source_rows(old: Geometry, new: Geometry) -> tuple[Tensor, str]:
    """Return (the old row of each new row, length of texts in which all distances read theirs)."""
    distances = torch.arange(-new.max_relative, new.max_relative + 1)
    before, after = old.slots(distances), new.slots(distances)  # both rise with the distance
    rows = torch.arange(new.num_slots)
    first = torch.searchsorted(after, rows)
    last = torch.searchsorted(after, rows, right=True) - 1
    middle = (first + last + (rows < new.span)) // 2  # of two, the shorter distance
    found = before[middle.clamp(0, len(distances) - 1)]  # unread rows: as the nearest read one
    others = distances[found[after] != before].abs()
    return found, f"up to {int(others.min()):,} tokens" if len(others) else "any length"
