"""What changed numbers of the model without a test noticing (docs/evidence/reliability.md)."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from hugging_face_models import FAMILIES, random_values

from deberta_ds.model import dropout, encoder
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.dropout import DropoutMask
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.encoder import ACTIVATIONS, Convolution
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.model.init import init_parameters

HIDDEN, PAIRS = 0.25, 0.125
CONFIG = dataclasses.replace(FAMILIES["v2_conv"], hidden_dropout=HIDDEN, attention_dropout=PAIRS)


def test_every_place_of_dropout_has_its_rate_in_training_and_none_in_evaluation(monkeypatch):
    rates, mask_of = [], dropout.mask_of
    monkeypatch.setattr(dropout, "mask_of", lambda rate, key: (
        rates.append(rate) if rate else None, mask_of(rate, key))[1])
    for name, function in (("attend", encoder.attend), ("attend_cls", encoder.attend_cls)):
        monkeypatch.setattr(encoder, name, lambda *tensors, function=function, **options: (
            rates.append(("pairs", options["dropout"])) or function(*tensors, **options)))
    model, ids = random_values(Backbone(CONFIG)), torch.arange(40).view(2, 20)
    model.train()(ids, torch.ones_like(ids))
    # The input and the convolution; in each layer the relative table and behind both sublayers.
    assert Counter(rates) == {HIDDEN: 2 + 3 * CONFIG.num_layers, ("pairs", PAIRS): 3}
    rates.clear()
    model.trunk.encode(torch.randn(2, 20, 48), torch.ones_like(ids), cls_only=True)
    assert Counter(rates) == {HIDDEN: 2 + 3 * CONFIG.num_layers, ("pairs", PAIRS): 3}
    plain = Backbone(FAMILIES["v2_conv"]).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, torch.ones_like(ids)),
                           plain(ids, torch.ones_like(ids)))


def test_the_convolution_drops_before_its_activation():
    layer, hidden = random_values(Convolution(CONFIG)).train(), torch.randn(2, 9, 48)
    key = torch.tensor([3, 4])
    found = layer(hidden, hidden + 1, torch.ones(2, 9), key)
    convolved = F.conv1d(hidden.mT, layer.weight, layer.bias, padding=1).mT.contiguous()
    dropped = dropout.mask_of(HIDDEN, key).apply(convolved)
    wanted = layer.norm(hidden + 1 + ACTIVATIONS[CONFIG.conv_activation](dropped))
    torch.testing.assert_close(found, wanted)
    padded = layer.eval()(hidden, hidden + 1, torch.tensor([[1] * 7 + [0] * 2] * 2), None)
    assert padded.any(-1).tolist() == [[True] * 7 + [False] * 2] * 2


def test_padding_leaves_the_input_block_as_zeros():
    block = random_values(Backbone(CONFIG)).trunk.input.eval()
    segments = torch.tensor([[1, 1, 2, 0]])
    found = block(torch.randn(1, 4, 48), segments, None)
    assert found[0].any(-1).tolist() == [True, True, True, False]


def test_random_bits_at_the_threshold_are_kept():
    zeros = torch.zeros(2, dtype=torch.int64)
    assert DropoutMask(zeros, 0).mask(torch.empty(1)).tolist() == [1.0]  # whose bits are all 0


def test_the_input_norm_of_16_bit_weights_is_computed_in_fp32():
    norm = random_values(Backbone(CONFIG)).trunk.input.norm.bfloat16()
    sums = 1e-3 * torch.randn(3, 48)  # so small that eps decides
    wanted = F.layer_norm(sums.double(), (48,), norm.weight.double(), norm.bias.double(),
                          CONFIG.norm_eps)
    assert torch.equal(norm(sums), wanted.float().bfloat16())


def test_first_values_are_samples_of_the_runs_seed():
    model, generator = Backbone(CONFIG), torch.Generator().manual_seed(5)
    init_parameters(model, 0.3, 5)
    for name, values in model.named_parameters():
        wanted = torch.full_like(values, not name.endswith("bias"))  # biases and norms
        if values.ndim > 1:
            wanted.normal_(0.0, 0.3, generator=generator)
        assert torch.equal(values, wanted), name


def test_a_detectors_logits_are_fp32_of_16_bit_states():
    head = random_values(ReplacedTokenHead(CONFIG)).bfloat16()
    logits = head(torch.randn(1, 5, 48).bfloat16(), torch.arange(5)[None])
    assert logits.dtype == torch.float32 and logits.shape == (1, 5)


def test_the_convolution_s_output_is_the_residual_of_the_next_layer(monkeypatch):
    """A fused norm returns its output twice; behind a convolution the second one is old."""
    model = random_values(Backbone(FAMILIES["v2_conv"])).eval()
    ids = torch.arange(40).view(2, 20)
    wanted = model(ids, torch.ones_like(ids))
    plain = encoder.ResidualNorm.forward
    monkeypatch.setattr(encoder.ResidualNorm, "forward",
                        lambda *inputs: plain(*inputs)[:1] * 2)
    assert torch.equal(model(ids, torch.ones_like(ids)), wanted)


def test_masked_tokens_of_packed_documents_are_decoded_as_in_each_alone():
    config, ids = FAMILIES["v3"], torch.arange(5, 25)
    model = random_values(MaskedLm(config)).eval()
    words = random_values(TokenEmbedding(config.vocab_size, config.hidden_size))

    def states(ids, lengths, columns):
        positions = torch.cat([torch.arange(length) for length in lengths])
        segments = torch.arange(1, 3)[:len(lengths)].repeat_interleave(torch.tensor(lengths))
        batch = SimpleNamespace(
            input_ids=ids[None], segments=segments[None], positions=positions[None],
            target_positions=torch.tensor([columns]))
        return model.target_states(words, batch)

    alone = torch.cat([states(ids[:9], [9], [2, 8]), states(ids[9:], [11], [0, 6])])
    torch.testing.assert_close(states(ids, [9, 11], [2, 8, 9, 15]), alone)


def test_every_norm_has_the_eps_of_the_model():
    config = dataclasses.replace(CONFIG, norm_eps=0.25)
    norms = [module for network in (MaskedLm(config), ReplacedTokenHead(config))
             for module in network.modules() if isinstance(module, torch.nn.LayerNorm)]
    # Input, relative table, convolution, two per layer; of each head one.
    assert len(norms) == 3 + 2 * config.num_layers + 2
    assert {norm.eps for norm in norms} == {0.25}
