"""Export, loading, fill-mask and starting from a published model."""

import dataclasses
import json
import types
from pathlib import Path

import export_cases as cases
import pytest
import torch
import transformers
from data_helpers import SENTENCES, tiny_tokenizer, tokenizer_path
from hugging_face_models import decoded_by_transformers
from tokenizer_cases import ODD

from deberta_ds.base.errors import UserError
from deberta_ds.evaluate.fill_mask import encode_with_masks, fill_mask, load_masked_lm
from deberta_ds.objectives.build import build_model, objective_of
from deberta_ds.objectives.mlm import padded
from deberta_ds.publish import convert
from deberta_ds.publish.average import average
from deberta_ds.publish.convert import write_microsoft
from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.release import foreign, read_back
from deberta_ds.release.model_files import release_of_state, write_ours
from deberta_ds.release.networks import build_backbone
from deberta_ds.release.reader import load_backbone, read_release


@pytest.mark.parametrize("sharing", ["gdes", "es", "nes"])
def test_discriminator_is_merged(sharing):
    run = cases.run_config("v3", embedding_sharing=sharing)
    state = cases.random_state(build_model(run))
    release = release_of_state(state, run)
    words, own = state["words.weight"], state.get("discriminator.words.weight")
    expected = words + own if sharing == "gdes" else own if sharing == "nes" else words
    assert torch.equal(release.main.tensors["words.weight"], expected)
    assert torch.equal(release.generator.tensors["words.weight"], state["words.weight"])


def test_exported_model_computes_the_detection_logits_of_training(tmp_path):
    """The oracle is RtdModel.forward itself: its logits from the exported encoder and side file."""
    run = cases.run_config("v3")
    model = build_model(run).eval()
    state = cases.random_state(model)
    model.load_state_dict(state)
    release = release_of_state(state, run)
    write_hugging_face(release, tmp_path)
    ids = torch.randint(4, 600, (2, 24))
    batch = padded(ids.tolist(), tiny_tokenizer())
    with torch.no_grad():
        wanted = model.discriminator(model.words, batch.input_ids, batch)
        loaded = load_backbone(tmp_path)
        found = model.discriminator.head(loaded.backbone(ids, torch.ones_like(ids)),
                                         batch.positions)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_export_reports_its_checks_which_notice_another_model(tmp_path):
    release = cases.make_release("v3")
    summary = convert.write_release(release, "test", tmp_path / "hf", "hf")
    for said in ("AutoModel -> DebertaV2Model: no missing", "DebertaV2ForMaskedLM: no missing",
                 "AutoTokenizer gives the ids"):
        assert any(said in line for line in summary.checks)
    assert not summary.warnings
    record = json.loads((tmp_path / "hf" / "conversion.json").read_text())
    assert record["notes"] == list(summary.notes)
    release.main.tensors["trunk.encoder.layers.1.ffn_in.bias"] += 0.5
    with pytest.raises(UserError, match="other hidden states"):
        read_back.check_hugging_face(release, tmp_path / "hf")
    with pytest.raises(UserError, match="read back with other values"):
        read_back.check_tensors(release, tmp_path / "hf")


@pytest.mark.parametrize(("family", "buckets"), [("v1", 0), ("v1_key_bias", 0), ("v2", 16),
                                                 ("v3", 16), ("v3", 15)])
def test_exported_model_agrees_beyond_the_reach_of_the_relative_table(
        tmp_path, family, buckets, monkeypatch):
    """transformers reads other rows than the official code there; 1e-2 apart without the mending.

    An odd number of buckets leaves two rows on one side, and one on the other, that nobody trains.
    """
    shape = cases.FAMILIES[family] | {"position_buckets": buckets}
    monkeypatch.setitem(cases.FAMILIES, family, shape)
    release = cases.make_release(family)
    write_hugging_face(release, tmp_path)
    cases.same_states(transformers.AutoModel.from_pretrained(tmp_path).eval(),
                      load_backbone(tmp_path).backbone, lengths=(63, 64, 65, 100, 256, 300))
    cases.same_networks(release, read_release(tmp_path))  # what was in those rows is still there
    (tmp_path / "ms").mkdir()
    write_microsoft(read_release(tmp_path), tmp_path / "ms")
    cases.same_networks(release, read_release(tmp_path / "ms"))


def test_an_export_in_16_bits_holds_the_rounded_weights(tmp_path):
    write_ours(cases.make_release("v3"), tmp_path / "ours")
    convert.convert(tmp_path / "ours", tmp_path / "hf", "hf", precision="bf16")
    found, source = read_release(tmp_path / "hf"), read_release(tmp_path / "ours")
    found.main.tensors["words.weight"] -= source.main.tensors.pop("words.weight").to(torch.bfloat16)
    assert found.main.tensors.pop("words.weight").abs().max() < 4e-3  # a sum of two rounded ones
    for name, network in found.networks().items():
        for key, tensor in network.tensors.items():
            assert torch.equal(tensor, source.networks()[name].tensors[key].to(torch.bfloat16)), key
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["dtype"] == "float32"  # transformers 5 would train in 16 bits
    assert transformers.AutoModel.from_pretrained(tmp_path / "hf").dtype == torch.float32
    again = convert.convert(tmp_path / "hf", tmp_path / "again", "hf", precision="bf16")
    assert not any("beyond" in line for line in again.warnings)
    cases.same_networks(read_release(tmp_path / "hf"), read_release(tmp_path / "again"))


def test_a_weight_that_fp16_cannot_hold_is_named(tmp_path):
    release = cases.make_release("v3", "mlm")
    release.main.tensors["words.weight"][3, 5] = -7e4
    with pytest.raises(UserError, match="main words.weight has weights that fp16 cannot hold, up to"
                                        " 7e.04; store it in bf16 or fp32"):
        release.store_in("fp16")


@pytest.mark.parametrize("longest", [3, 64, 129, 130])
def test_more_buckets_than_distances_are_written_as_a_row_a_distance(
        tmp_path, longest, monkeypatch):
    """transformers divides by log((max - 1) / (buckets / 2)): at 64 to 128 of 256 buckets the
    export failed its check, or passed it and computed another model in longer rows."""
    shape = cases.BASE | {"max_position": 160, "max_relative": longest, "position_buckets": 256}
    monkeypatch.setitem(cases.FAMILIES, "v3", shape)
    release = cases.make_release("v3")
    summary = convert.write_release(release, "test", tmp_path / "out", "hf")
    said = [note.split(":")[1].strip() for note in summary.notes if "a row a distance" in note]
    assert said == (["main", "generator"] if longest < 130 else [])
    cases.same_states(build_backbone(release.main), load_backbone(tmp_path / "out").backbone,
                      transformers.AutoModel.from_pretrained(tmp_path / "out").eval(),
                      lengths=(longest, 129, 300))
    convert.write_release(release, "test", tmp_path / "ms", "ms")  # which reads them rightly
    cases.same_networks(release, read_release(tmp_path / "ms"))


@pytest.mark.parametrize("to", ["hf", "ms"])
def test_a_model_of_the_form_of_bert_is_written(tmp_path, to, monkeypatch):
    """Only relative_attention and absolute_input said, as in docs/evidence/orderings.md; the terms
    and the norm that nothing uses keep their defaults, which official code would heed."""
    shape = cases.BASE | {"relative_attention": False, "absolute_input": True}
    monkeypatch.setitem(cases.FAMILIES, "v3", shape)
    release = cases.make_release("v3", "mlm")
    convert.write_release(release, "test", tmp_path / "out", to)
    cases.same_states(build_backbone(release.main), load_backbone(tmp_path / "out").backbone)
    write_ours(release, tmp_path / "ours")
    average([tmp_path / "ours", tmp_path / "out"])  # one shape
    assert cases.started(cases.run_config("v3", "mlm"), tmp_path / "out")[0]


def test_auto_tokenizer_gives_our_ids(tmp_path):
    write_hugging_face(cases.make_release("v3"), tmp_path)
    for directory in (tmp_path, tmp_path / "generator"):
        assert (directory / "spm.model").read_bytes() == Path(tokenizer_path()).read_bytes()
    ours = tiny_tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    framed = {text: [ours.cls_id, *ours.encode(text), ours.sep_id] for text in ODD}
    for text, wanted in framed.items():
        assert theirs(text)["input_ids"] == wanted, repr(text)
    first, second = SENTENCES[:2]
    assert theirs(first, second)["input_ids"] == framed[first] + framed[second][1:]
    assert theirs.decode(ours.encode(first)) == first
    # The one wanted difference: names of special tokens count in transformers, never here.
    assert theirs("[MASK]")["input_ids"][1:-1] == [ours.mask_id] != ours.encode("[MASK]")
    assert read_back.check_tokenizer(tmp_path, ["a [SEP] b"])


# ------------------------------------------------------------------------------------ loading, use

def test_load_backbone_of_every_format_gives_the_same_model(tmp_path):
    release = cases.make_release("v3")
    ids = torch.randint(4, 600, (2, 12))
    hidden = []
    for to, write in convert.WRITERS.items():
        write(release, tmp_path / to)
        loaded = load_backbone(tmp_path / to)
        assert loaded.tokenizer.size == tiny_tokenizer().size
        assert loaded.model_config == release.main.config and loaded.masked_lm is not None
        with torch.no_grad():
            hidden.append(loaded.backbone(ids, torch.ones_like(ids)))
        assert all(p.requires_grad and p.dtype == torch.float32
                   for p in loaded.backbone.parameters())
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0], hidden[2])


def test_fill_mask_runs_the_enhanced_decoder(tmp_path):
    """Oracle: the decoder's logits from transformers' layers, as the parity test rebuilds them."""
    release = cases.make_release("v3", "mlm")
    write_ours(release, tmp_path)
    model = load_masked_lm(tmp_path)
    tokenizer = tiny_tokenizer()
    text = "The quick [MASK] fox jumps over the [MASK]."
    found = fill_mask(model, text, top=3)
    ids = torch.tensor([encode_with_masks(tokenizer, text)])
    assert (ids == tokenizer.mask_id).sum() == 2 and len(found) == 2

    write_hugging_face(release, tmp_path / "hf")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        states = decoded_by_transformers(theirs.deberta, release.main.tensors["positions.weight"],
                                         ids)
        logits = theirs.lm_predictions(states, theirs.deberta.embeddings.word_embeddings)
    wanted = logits[ids == tokenizer.mask_id][:, : tokenizer.size].softmax(-1).topk(3)
    assert [[f.token for f in mask] for mask in found] == wanted.indices.tolist()
    values = torch.tensor([[f.probability for f in mask] for mask in found])
    torch.testing.assert_close(values, wanted.values, rtol=1e-4, atol=0)

    for text, message in (("nothing to fill", "no \\[MASK\\]"), ("[MASK] " * 70, "positions")):
        with pytest.raises(UserError, match=message):
            fill_mask(model, text)
    write_ours(dataclasses.replace(cases.make_release("v3"), generator=None), tmp_path / "headless")
    with pytest.raises(UserError, match="masked-LM head"):
        load_masked_lm(tmp_path / "headless")


# ------------------------------------------------------------------------------- continued training

def test_run_continues_from_its_own_export_with_or_without_the_delta(tmp_path):
    """The official code would start from delta = 0, that is, with the generator's words."""
    run = cases.run_config("v3")
    state = cases.random_state(build_model(run))
    release = release_of_state(state, run)
    write_hugging_face(release, tmp_path / "whole")
    tensors, notes = cases.started(run, tmp_path / "whole")
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    assert "init: GDES delta taken from the file" in notes
    merged = release.main.tensors["words.weight"]
    del release.main.tensors["words.delta"]
    write_hugging_face(release, tmp_path / "without")
    tensors, notes = cases.started(run, tmp_path / "without")
    delta = tensors["discriminator.words.weight"]
    torch.testing.assert_close(delta, state["discriminator.words.weight"], rtol=0, atol=1e-6)
    torch.testing.assert_close(tensors["words.weight"] + delta, merged, rtol=0, atol=1e-7)
    assert any("WARNING" in note and "derived" in note for note in notes)


def test_two_stages_make_a_generator_where_none_was_released(tmp_path):
    run = cases.run_config("v3")
    release = dataclasses.replace(cases.make_release("v3"), generator=None)
    del release.main.tensors["words.delta"]
    write_hugging_face(release, tmp_path / "public")
    with pytest.raises(UserError, match="has no generator.*docs/how-to/adapt-a-public-model.md"):
        cases.started(run, tmp_path / "public")

    generator = objective_of(run).encoders(run)["generator"]
    first = dataclasses.replace(cases.run_config("v3", "mlm"), model=generator)
    tensors, notes = cases.started(first, tmp_path / "public", embeddings_only=True)
    assert tensors.keys() == {"words.weight"} and ", fixed;" in notes[0]
    state = cases.random_state(build_model(first)) | tensors  # as if that stage had been trained
    write_ours(release_of_state(state, first), tmp_path / "generator")

    tensors, _ = cases.started(run, tmp_path / "public", generator=str(tmp_path / "generator"))
    assert torch.equal(tensors["words.weight"], release.main.tensors["words.weight"])
    assert not tensors["discriminator.words.weight"].any()  # here zero is the true difference
    assert tensors.keys() == dict(build_model(run).named_parameters()).keys()


def test_heads_that_the_source_lacks_start_at_random_and_another_shape_is_refused(tmp_path):
    run = cases.run_config("v3", "mlm")
    release = cases.make_release("v3", "mlm")
    for name in [name for name in release.main.tensors if name.startswith(("mlm_", "positions"))]:
        del release.main.tensors[name]
    write_hugging_face(release, tmp_path)
    tensors, notes = cases.started(run, tmp_path)
    assert "generator.positions.weight" not in tensors
    assert sum("starts at random" in note for note in notes) == 2
    write_hugging_face(cases.make_release("v2"), tmp_path / "other")
    with pytest.raises(UserError, match="conv_kernel = 0 \\(source: 3\\)"):
        cases.started(cases.run_config("v3"), tmp_path / "other")


def test_a_position_term_without_a_place_in_the_format_is_refused():
    values = dataclasses.asdict(cases.run_config("v3", "mlm").model)
    config = types.SimpleNamespace(**values | {"position_terms": ("c2p", "p2p")})
    with pytest.raises(UserError, match="p2p: neither"):
        foreign.to_hugging_face(config, kind=foreign.V2, rest={})
    with pytest.raises(UserError, match="p2p: neither"):
        foreign.to_microsoft(config, {})
