"""The audited FLOP count against torch's own counter on the real models."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.data.rows import Row, collate
from deberta_ds.model import flops
from deberta_ds.model.backbone import Backbone, init_parameters
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead

ROWS, LENGTH, TARGETS = 2, 64, 8


def config(**changes):
    values = dict(vocab_size=300, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48)
    values |= dict(max_position=64, position_buckets=16, attention="reference")
    return ModelConfig(**values | changes)


CONFIGS = {
    "v3": config(),
    "v2": config(conv_kernel=3),
    "v1": config(position_buckets=0, max_relative=32, share_position_projections=False),
    "one term": config(position_terms=("c2p",)),
    "bert": config(relative_attention=False, position_terms=(), absolute_input=True),
}


def batch():
    generator = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        ids = generator.integers(4, 300, LENGTH)
        labels = np.full(LENGTH, -100)
        labels[generator.choice(LENGTH, TARGETS, replace=False)] = 7
        ones, positions = np.ones(LENGTH, np.int32), np.arange(LENGTH, dtype=np.int32)
        rows.append(Row(number, ids, labels, ones, positions))
    return collate(rows)


def relative_projections(model: ModelConfig) -> float:
    """Return forward FLOPs per step (not per token) of projecting the relative table."""
    if not model.relative_attention:
        return 0.0
    terms = len(model.position_terms)
    return model.num_layers * terms * 2 * 2 * model.relative_span * model.hidden_size**2


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_have_the_flops_that_torch_counts(name):
    model, inputs = CONFIGS[name], batch()
    words, masked_lm = TokenEmbedding(model.vocab_size, model.hidden_size), MaskedLm(model)
    backbone, head = Backbone(model), ReplacedTokenHead(model)
    for module in (words, masked_lm, backbone, head):
        init_parameters(module, 0.02, 0)
    masked = counted(lambda: masked_lm(words, inputs))
    detected = counted(
        lambda: head(backbone(inputs.input_ids, inputs.segments), inputs.positions))
    for found, per_token in ((masked, flops.masked_lm(model, LENGTH, TARGETS / LENGTH)),
                             (detected, flops.detector(model, LENGTH))):
        expected = ROWS * LENGTH * per_token + relative_projections(model)
        assert found == pytest.approx(expected, rel=1e-12)


def test_published_model():
    """v3-base at 512: the roofline's figures in MFLOP per token (backbone without decoder)."""
    model = ModelConfig(vocab_size=128100, hidden_size=768, num_layers=12, num_heads=12,
                        intermediate_size=3072)
    assert flops.encoder(model, 512) / 1e6 == pytest.approx(170 + 19 + 9 + 9, rel=0.01)
