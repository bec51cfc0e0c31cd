"""Small shapes of every family with random weights, and transformers' models of them."""

import dataclasses

import torch
import transformers

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.backbone import init_parameters
from deberta_ds.release import foreign

BASE = ModelConfig(vocab_size=300, hidden_size=48, num_layers=3, num_heads=4, intermediate_size=96,
                   max_position=512, hidden_dropout=0.0, attention_dropout=0.0,
                   attention="reference")
FAMILIES = {
    "v3": BASE,
    "v2_conv": dataclasses.replace(BASE, conv_kernel=3),
    "v1": dataclasses.replace(BASE, position_buckets=0, share_position_projections=False,
                              relative_norm=False, key_bias=False),
    "v1_key_bias": dataclasses.replace(BASE, position_buckets=0, relative_norm=False,
                                       share_position_projections=False),
    "bert": dataclasses.replace(BASE, position_buckets=0, relative_norm=False, absolute_input=True,
                                relative_attention=False, position_terms=(),
                                share_position_projections=False),
    "p2c_only": dataclasses.replace(BASE, position_terms=("p2c",)),
}
SCALE = 0.1  # larger than the trained init, so attention is far from uniform


def random_values(module):
    """Give every parameter, biases and norms too, a random value."""
    init_parameters(module, SCALE, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


def hugging_face(config, tensors):
    """Return the transformers model of `config` with our `tensors` of a backbone."""
    is_v1 = foreign.is_v1_shape(config) and not config.key_bias
    values = foreign.to_hugging_face(config, kind=foreign.V1 if is_v1 else foreign.V2, rest={})
    theirs = foreign.to_theirs(tensors, config)
    if is_v1:
        theirs = foreign.pack_v1(theirs, config.num_heads)
        model = transformers.DebertaModel(transformers.DebertaConfig(**values))
    else:
        model = transformers.DebertaV2Model(transformers.DebertaV2Config(**values))
    missing, unexpected = model.load_state_dict(theirs, strict=False)
    assert set(missing) <= {"embeddings.position_ids"} and not unexpected
    return model.eval()


def decoded_by_transformers(theirs, position_table, ids, mask=None):
    """Return the enhanced mask decoder's states [B, L, C], from the layers of a DebertaV2Model."""
    mask = torch.ones_like(ids) if mask is None else mask
    states = theirs(ids, attention_mask=mask, output_hidden_states=True)
    encoder, memory = theirs.encoder, states.hidden_states[-2]
    query = position_table[: memory.size(1)] + memory
    for _ in range(2):
        query, _ = encoder.layer[-1](
            memory, encoder.get_attention_mask(mask), query_states=query,
            relative_pos=encoder.get_rel_pos(memory), rel_embeddings=encoder.get_rel_embedding())
    return query
