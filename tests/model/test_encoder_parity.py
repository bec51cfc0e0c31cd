"""The encoder and both pretraining heads against transformers, with random weights in fp32.

Oracle: transformers' DebertaV2Model (v2 with convolution, v3) and DebertaModel (v1), loaded through
the export table of names. The enhanced mask decoder and the replaced-token head have no class
there, so they are rebuilt from transformers' layers and the formulas of the official code
(masked_language_model.py, replaced_token_detection_model.py). Only real tokens are compared: for
padding, transformers attends uniformly and the official code to nothing.
"""


import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from hugging_face_models import (
    BASE,
    FAMILIES,
    decoded_by_transformers,
    hugging_face,
    random_values,
)

from deberta_ds.data.rows import Batch
from deberta_ds.model import encoder
from deberta_ds.model.backbone import Backbone, init_parameters
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.release import foreign

LENGTHS = (33, 128, 512)
ROUNDING = 1e-5  # of gradients whose true value is zero; the others are above 0.1
def padded_batch(length):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, BASE.vocab_size, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length // 2:] = 0
    mask[2, 5:] = 0
    return ids * mask, mask


def relative_error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_equal_transformers(family, length):
    config = FAMILIES[family]
    backbone = random_values(Backbone(config)).eval()
    theirs = hugging_face(config, backbone.state_dict())
    ids, mask = padded_batch(length)
    direction = torch.randn(3, length, config.hidden_size, generator=torch.manual_seed(4))
    direction = direction * mask[..., None]
    hidden = backbone(ids, mask)
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    assert relative_error(hidden[real], expected[real]) <= 1e-5

    (hidden * direction).sum().backward()
    (expected * direction).sum().backward()
    compare_gradients(config, {name: p.grad for name, p in backbone.named_parameters()}, theirs)


def compare_gradients(config, gradients, theirs):
    """Compare those of a backbone with those that transformers' model has."""
    gradients = foreign.to_theirs(gradients, config)
    if foreign.is_v1_shape(config) and not config.key_bias:
        gradients = foreign.pack_v1(gradients, config.num_heads)
    expected_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        expected = expected_gradients[name]
        if "word_embeddings" in name:  # transformers gives [PAD] no gradient
            gradient[0], expected[0] = 0, 0
        if expected.abs().max() < ROUNDING:  # inert by algebra: a key bias under softmax
            assert gradient.abs().max() < ROUNDING, name
        else:
            assert relative_error(gradient, expected) <= 1e-4, name


def masked_batch(length):
    ids, mask = padded_batch(length)
    labels = torch.full_like(ids, -100)
    columns = [sorted({1, 7, length // 2, length - 2}), [2, 9], [3]]
    slots = max(map(len, columns))
    target_positions = torch.zeros(3, slots, dtype=torch.long)
    for row, chosen in enumerate(columns):
        for slot, column in enumerate(chosen):
            labels[row, column] = ids[row, column]
            ids[row, column] = 4
            target_positions[row, slot] = column
    positions = torch.arange(length).expand(3, length)
    return Batch(rows=torch.arange(3), input_ids=ids, labels=labels, segments=mask.int(),
                 positions=positions, target_positions=target_positions,
                 num_targets=sum(map(len, columns)),
                 num_tokens=int(mask.sum()))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", ["v3", "v2_conv", "v1_key_bias"])
def test_masked_lm_with_enhanced_decoder_equals_rebuild(family, length):
    config = FAMILIES[family]
    words = random_values(TokenEmbedding(config.vocab_size, config.hidden_size))
    masked_lm = random_values(MaskedLm(config)).eval()
    tensors = {"words.weight": words.weight.detach()} | {
        name: tensor for name, tensor in masked_lm.state_dict().items() if name.startswith("trunk")}
    theirs = hugging_face(config, tensors)
    batch = masked_batch(length)
    head = masked_lm.head
    decoded = decoded_by_transformers(theirs, masked_lm.positions.weight, batch.input_ids,
                                      batch.segments.long())
    states = decoded[batch.labels >= 0]
    expected = head.norm(F.gelu(head.dense(states))) @ words.weight.T + head.bias
    labels = batch.labels[batch.labels >= 0]
    expected_loss = F.cross_entropy(expected, labels, reduction="sum")
    own = [words.weight, masked_lm.positions.weight, *head.parameters()]
    expected_own = torch.autograd.grad(expected_loss, own, retain_graph=True)
    expected_loss.backward(inputs=list(theirs.parameters()))
    with torch.no_grad():
        used = batch.labels.gather(1, batch.target_positions).flatten() >= 0
        read = masked_lm.target_states(words, batch)[used]
        logits = head.norm(F.gelu(head.dense(read))) @ words.weight.T + head.bias
    loss_sum, correct, _ = masked_lm(words, batch)
    assert relative_error(logits, expected) <= 1e-5
    torch.testing.assert_close(loss_sum, expected_loss, rtol=1e-5, atol=0)
    assert correct == (expected.argmax(-1) == labels).sum()
    loss_sum.backward()
    for ours, right in zip(own[1:], expected_own[1:], strict=True):
        assert relative_error(ours.grad, right) <= 1e-4
    # The table that predicts is the one that is looked up; transformers' has the look-up alone.
    gradients = {name: p.grad for name, p in masked_lm.named_parameters() if "trunk" in name}
    compare_gradients(config, {"words.weight": words.weight.grad - expected_own[0]} | gradients,
                      theirs)


def rows_of_pieces(ids, apart):
    """Return (ids, segments, positions) of pieces in a row each, or in two packed rows."""
    packing = [[one] for one in ids] if apart else [ids, ids[::-1]]
    length = max(sum(map(len, row)) for row in packing) + 3
    found = torch.zeros(3, len(packing), length, dtype=torch.long)
    for row, pieces in enumerate(packing):
        real = torch.stack([torch.cat(parts) for parts in (
            pieces, [torch.full_like(x, number) for number, x in enumerate(pieces, 1)],
            [torch.arange(len(x)) for x in pieces])])
        found[:, row, :real.size(1)] = real
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_detector_learns_from_packed_pieces_as_transformers_from_each_alone(family):
    """Many tokens of a row read one [CLS] state, and no piece sees its neighbors."""
    config = FAMILIES[family]
    backbone = random_values(Backbone(config)).eval()
    head = random_values(ReplacedTokenHead(config)).eval()
    theirs = hugging_face(config, backbone.state_dict())
    generator = torch.Generator().manual_seed(5)
    sizes = (5, 1, 9, 3, 40)
    ids = [torch.randint(4, config.vocab_size, (size,), generator=generator) for size in sizes]
    weights = [torch.randn(size, generator=generator) for size in sizes]
    packed, segments, positions = rows_of_pieces(ids, apart=False)
    vectors = backbone.words(packed)
    logits = head(backbone.trunk(vectors, segments, positions), positions)[segments > 0]
    alone, mask, _ = rows_of_pieces(ids, apart=True)
    states = theirs(alone, attention_mask=mask).last_hidden_state
    mixed = F.layer_norm(states[:, :1] + states, (config.hidden_size,), head.norm.weight,
                         head.norm.bias, config.norm_eps)
    mixed = F.gelu(F.linear(mixed, head.dense.weight, head.dense.bias))
    scores = F.linear(mixed, head.classifier.weight, head.classifier.bias).squeeze(-1)
    expected = [row[:size] for row, size in zip(scores, sizes, strict=True)]
    assert relative_error(logits, torch.cat(expected + expected[::-1])) <= 1e-5
    right = (torch.cat(expected) * torch.cat(weights)).sum() * 2  # each piece is in both rows
    expected_own = torch.autograd.grad(right, list(head.parameters()), retain_graph=True)
    right.backward(inputs=list(theirs.parameters()))
    (logits * torch.cat(weights + weights[::-1])).sum().backward()
    for parameter, wanted in zip(head.parameters(), expected_own, strict=True):
        assert relative_error(parameter.grad, wanted) <= 1e-4
    compare_gradients(config, {name: p.grad for name, p in backbone.named_parameters()}, theirs)


def test_masked_lm_without_decoder_equals_transformers_head():
    """BERT form: absolute positions in the input, no decoder; oracle: the legacy=False head."""
    config = FAMILIES["bert"]
    words = random_values(TokenEmbedding(config.vocab_size, config.hidden_size))
    masked_lm = random_values(MaskedLm(config)).eval()
    tensors = {"words.weight": words.weight.detach()} | {
        name.replace("head.", "mlm_head."): tensor
        for name, tensor in masked_lm.state_dict().items()}
    theirs = foreign.to_theirs(tensors, config)
    theirs = {("" if name.startswith("lm_pred") else foreign.PREFIX) + name: tensor
              for name, tensor in theirs.items()}
    values = foreign.to_hugging_face(config, kind=foreign.V2, rest={"legacy": False})
    model = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**values)).eval()
    model.load_state_dict(theirs, strict=False)
    batch = masked_batch(33)
    with torch.no_grad():
        expected = model(batch.input_ids, attention_mask=batch.segments.long()).logits
        expected = expected[batch.labels >= 0]
        used = batch.labels.gather(1, batch.target_positions).flatten() >= 0
        states = masked_lm.target_states(words, batch)[used]
        head = masked_lm.head
        logits = head.norm(F.gelu(head.dense(states))) @ words.weight.T + head.bias
    assert relative_error(logits, expected) <= 1e-5


CONFIG = dataclasses.replace(FAMILIES["v2_conv"], hidden_dropout=0.25,
                             attention_dropout=0.125)


def test_padding_leaves_the_input_block_as_zeros():
    block = random_values(Backbone(CONFIG)).trunk.input.eval()
    segments = torch.tensor([[1, 1, 2, 0]])
    found = block(torch.randn(1, 4, 48), segments, None)
    assert found[0].any(-1).tolist() == [True, True, True, False]


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
