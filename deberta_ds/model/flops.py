"""Model FLOPs per token of each part of a network, for MFU.

What the method needs, not what an implementation happens to do: a multiply-add is 2, backward is
2 x forward, recomputation counts nothing, and neither do look-ups, norms and activations. Pairs of
different documents of a packed sequence count as computed, padding too: figures are for full
sequences. tests/model/test_flops.py compares every part with torch.utils.flop_counter.

Projections of the relative table are per step, not per token: in a batch of thousands
of tokens they vanish, and they are left out.
"""

from deberta_ds.config.run_config import ModelConfig

DECODER_PASSES = 2


def masked_lm(model: ModelConfig, length: int, mask_rate: float) -> float:
    """Return forward FLOPs per token of an encoder with its decoder and masked LM head."""
    hidden = model.hidden_size
    head = mask_rate * (2 * hidden**2 + 2 * hidden * model.vocab_size)
    if model.absolute_input:  # no decoder: the last layer's states are read
        return encoder(model, length) + head
    below = (model.num_layers - 1) * _layer(model, length) + _convolution(model)
    return below + _decoder(model, length, mask_rate) + head


def detector(model: ModelConfig, length: int) -> float:
    """Return forward FLOPs per token of an encoder with the replaced-token head."""
    hidden = model.hidden_size
    return encoder(model, length) + 2 * hidden**2 + 2 * hidden


def encoder(model: ModelConfig, length: int) -> float:
    """Return forward FLOPs per token of all layers."""
    return model.num_layers * _layer(model, length) + _convolution(model)


def _layer(model: ModelConfig, length: int) -> float:
    hidden = model.hidden_size
    projections = 4 * 2 * hidden**2
    feed_forward = 2 * 2 * hidden * model.intermediate_size
    content = 2 * 2 * hidden * length  # queries x keys, probabilities x values
    return projections + feed_forward + content + _position_terms(model, length, 1.0)


def _decoder(model: ModelConfig, length: int, query_fraction: float) -> float:
    """The last layer: keys and values once, everything else for the masked queries, twice."""
    hidden = model.hidden_size
    keys_values = 2 * 2 * hidden**2
    queries = 2 * 2 * hidden**2 + 2 * 2 * hidden * model.intermediate_size
    content = 2 * 2 * hidden * length
    one_pass = query_fraction * (queries + content) + _position_terms(model, length, query_fraction)
    return keys_values + DECODER_PASSES * one_pass


def _position_terms(model: ModelConfig, length: int, query_fraction: float) -> float:
    """c2p: each query against each slot. p2c: each key against each slot, however few queries."""
    if not model.relative_attention:
        return 0.0
    slots = min(length, 2 * model.relative_span)
    fractions = {"c2p": query_fraction, "p2c": 1.0}  # a term of the distance alone is per step
    return sum(2 * model.hidden_size * slots * fractions.get(term, 0.0)
               for term in model.position_terms)


def _convolution(model: ModelConfig) -> float:
    return 2 * model.conv_kernel * model.hidden_size**2
