"""Round trips between Hugging Face, microsoft and our format.

Sources are made by transformers itself, or by hand from the names in microsoft's files, so a
mistake that our reader and our writer share still shows.
"""

import dataclasses
import json
import re

import pytest
import torch
import transformers
from convert_cases import (
    MS_FILES,
    edit_json,
    json_of,
    microsoft_directory,
    state_of,
    transformers_model,
)
from export_cases import (
    FAMILIES,
    make_release,
    run_config,
    same_networks,
    same_states,
    started,
)
from safetensors.torch import load_file

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.publish.convert import convert, microsoft_tensors, write_microsoft, write_release
from deberta_ds.release import foreign
from deberta_ds.release.model_files import write_ours
from deberta_ds.release.networks import build_backbone, sample_batches
from deberta_ds.release.reader import SIDE_FILE, load_backbone, read_release

SAID = "transformers reads other rows of the source's relative table"


def same_tensors(first, second):
    for name in first.keys() | second.keys():
        assert torch.equal(first[name], second[name]), name


class MaskedLMOf517(transformers.DebertaV2ForMaskedLM):
    """As transformers 5.0 to 5.19 have it: a weight that does not exist is tied to the words."""

    def post_init(self):
        self._tied_weights_keys = {
            "lm_predictions.lm_head.weight": "deberta.embeddings.word_embeddings.weight"}
        super().post_init()


def test_older_transformers_load_an_exported_masked_lm(tmp_path):
    write_release(make_release("v3", "mlm"), "test", tmp_path / "hf", "hf")
    now, then = (cls.from_pretrained(tmp_path / "hf").eval()
                 for cls in (transformers.DebertaV2ForMaskedLM, MaskedLMOf517))
    ids = torch.randint(4, 600, (2, 20))
    with torch.no_grad():
        assert torch.equal(now(ids).logits, then(ids).logits)


def test_a_state_with_the_tie_of_older_transformers_is_read(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    release, state = read_release(source), state_of(source)
    words = state["deberta.embeddings.word_embeddings.weight"]
    torch.save(state | {"lm_predictions.lm_head.weight": words}, source / MS_FILES[0])
    same_networks(release, read_release(source))
    torch.save(state | {"lm_predictions.lm_head.weight": words + 1}, source / MS_FILES[0])
    with pytest.raises(UserError, match="lm_head.weight differs from embeddings.word_embeddings"):
        read_release(source)


HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
         "ForQuestionAnswering")


@pytest.mark.parametrize(("family", "head"), [
    *(("v1", head) for head in HEADS), *(("v3", head) for head in HEADS),
    *(("v2", head) for head in HEADS[:2]), ("mdeberta", "Model")])
def test_hugging_face_round_trip_is_bit_identical(tmp_path, family, head):
    model = transformers_model(family, head)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors")
                     for name in ("source", "back"))
    for name in before:
        if name.endswith("rel_embeddings.weight") and family != "v1":
            before[name][0] = before[name][1]  # the one row that only transformers reads
    same_tensors(before, after)
    again = type(model).from_pretrained(tmp_path / "back").eval()
    ids, mask = torch.randint(4, 600, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask)[0], again(ids, attention_mask=mask)[0])
    assert again.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("max_relative, buckets", [(32, 15), (-1, 16), (16, 40)])
def test_a_model_that_transformers_trained_beyond_the_reach_is_said_to_change(
        tmp_path, max_relative, buckets, monkeypatch):
    """Import and export compared with ourselves only: 5e-2 of the source at 1,000 tokens, in
    silence."""
    changes = {"max_relative": max_relative, "position_buckets": buckets}
    monkeypatch.setitem(FAMILIES, "v3", FAMILIES["v3"] | changes)
    model = transformers_model("v3")
    model.save_pretrained(tmp_path / "source")
    ours = read_release(tmp_path / "source").main
    ids, mask = sample_batches(ours.config)[-1]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        gap = (build_backbone(ours)(ids, mask) - expected).abs().max() / expected.abs().max()
    assert ids.size(1) == 1.5 * ours.config.largest_distance and gap > 1e-3
    for to in ("ours", "hf"):
        summary = convert(tmp_path / "source", tmp_path / to, to)
        line, = (line for line in summary.warnings if SAID in line)
        assert float(re.search(r"differ by (\S+)", line)[1]) == pytest.approx(float(gap), rel=0.06)
    assert SAID not in str(convert(tmp_path / "hf", tmp_path / "again", "ours"))


def test_only_what_transformers_reads_otherwise_is_said_to_change(tmp_path, monkeypatch):
    """An export that is trained on in its own directory has the rows kept beside it, too."""
    monkeypatch.setitem(FAMILIES, "v3", FAMILIES["v3"] | {"max_relative": 32})
    source = microsoft_directory(tmp_path / "ms", "v3")
    assert SAID not in str(convert(source, tmp_path / "hf", "hf"))
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        model.deberta.encoder.rel_embeddings.weight[0].neg_()
    model.save_pretrained(tmp_path / "hf")
    assert SAID in str(convert(tmp_path / "hf", tmp_path / "again", "hf").warnings)
    _, notes = started(run_config("v3", "mlm"), tmp_path / "hf")
    assert any("WARNING" in note and SAID in note for note in notes)


@pytest.mark.parametrize(("family", "through"), [
    *((family, "ours") for family in ("v1", "v2", "v3", "mdeberta")), ("v2", "hf"), ("v3", "hf")])
def test_microsoft_round_trip_keeps_every_bit_and_what_transformers_drops(tmp_path, family,
                                                                           through):
    source = microsoft_directory(tmp_path / "source", family)
    summary = convert(source, tmp_path / through, through)
    convert(tmp_path / through, tmp_path / "back", "ms")
    same_tensors(state_of(source), state_of(tmp_path / "back"))
    if through == "ours":
        assert json_of(source / MS_FILES[1]) == json_of(tmp_path / "back" / MS_FILES[1])
        return
    assert any("position_embeddings" in note and SIDE_FILE in note for note in summary.notes)
    values = json_of(tmp_path / "hf/config.json")
    assert values["pooler_dropout"] == 0.2 and values["cls_dropout"] == 0.3


def test_v1_without_key_bias_becomes_the_v1_class(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v1", key_bias=0.0)
    state = {name: tensor * 0 if name.endswith("pos_key_proj.bias") else tensor
             for name, tensor in state_of(source).items()}
    torch.save(state, source / MS_FILES[0])
    convert(source, tmp_path / "hf", "hf")
    assert json_of(tmp_path / "hf/config.json")["model_type"] == "deberta"


def test_v1_with_key_bias_becomes_debertav2_with_the_same_logits(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v1", key_bias=0.5)
    summary = convert(source, tmp_path / "hf", "hf")
    values = json_of(tmp_path / "hf/config.json")
    assert values["model_type"] == "deberta-v2" and not values["share_att_key"]
    assert any("key biases" in note for note in summary.notes)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    same_states(model.deberta, build_backbone(read_release(source).main))


def test_the_table_of_a_discriminator_is_the_generator_s_plus_delta_where_there_is_one(tmp_path):
    release, place = make_release("v3"), tmp_path / "ms"
    write_microsoft(release, place)
    same_networks(release, read_release(place))
    state, table = state_of(place), "deberta.embeddings.word_embeddings.weight"
    torch.save({name: value for name, value in state.items() if not name.endswith("_weight")},
               place / MS_FILES[0])
    found = read_release(place).main.tensors
    assert "words.delta" not in found
    assert torch.equal(found["words.weight"], release.main.tensors["words.weight"])
    delta_only = {name: value for name, value in state.items() if name != table}
    for changed, said in ((state | {table: state[table] + 0.01}, "1.0e-02"),
                          (delta_only, "token embedding = generator's + delta")):
        torch.save(changed, place / MS_FILES[0])
        found = read_release(place)
        same_networks(release, found)
        assert any(said in note for note in found.notes)
    convert(place, tmp_path / "hf", "hf")
    same_networks(release, read_release(tmp_path / "hf"))
    (place / "pytorch_model.generator.bin").unlink()
    with pytest.raises(UserError, match="_weight.*generator"):
        read_release(place)


def test_old_prefix_config_entry_and_buffer(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    old = {name.replace("deberta.", "bert."): tensor for name, tensor in state_of(source).items()}
    old |= {"config": {"hidden_size": 32}, "bert.embeddings.position_ids": torch.arange(64)[None]}
    (tmp_path / "old").mkdir()
    torch.save(old, tmp_path / "old" / MS_FILES[0])
    (tmp_path / "old" / MS_FILES[1]).write_text((source / MS_FILES[1]).read_text())
    found = read_release(tmp_path / "old")
    same_networks(read_release(source), found)
    assert sum(note.startswith("dropped") for note in found.notes) == 2


def test_official_training_output_takes_the_newest_common_step(tmp_path):
    release = make_release("v3")
    for folder, network in (("discriminator", release.main), ("generator", release.generator)):
        (tmp_path / folder).mkdir()
        values = foreign.to_microsoft(network.config, {})
        (tmp_path / folder / "model_config.json").write_text(json.dumps(values))
        for step in ("000003", "000006"):
            tensors = microsoft_tensors(network, [])
            if step == "000003":
                tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            torch.save(tensors, tmp_path / folder / f"pytorch.model-{step}.bin")
    torch.save({}, tmp_path / "generator" / "pytorch.model-000007.bin")  # the generator's last
    same_networks(release, read_release(tmp_path))


def test_sharded_and_legacy_hugging_face_files(tmp_path):
    config = foreign.to_hugging_face(ModelConfig(**FAMILIES["v3"]), kind=foreign.V2,
                                     rest={"legacy": True})
    model = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**config))
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    whole = read_release(tmp_path / "whole")
    same_networks(whole, read_release(tmp_path / "parts"))
    assert torch.equal(whole.main.tensors["mlm_head.dense.weight"],
                       model.cls.predictions.transform.dense.weight)


def test_a_microsoft_file_without_position_terms_has_those_of_its_code(tmp_path):
    """deberta/disentangled_attention.py: `getattr(config, 'pos_att_type', 'c2p')`."""
    source = microsoft_directory(tmp_path / "source", "v3")
    edit_json(source / MS_FILES[1], pos_att_type=...)
    assert read_release(source).main.config.position_terms == ("c2p",)
    edit_json(source / MS_FILES[1], relative_attention=False)  # c2p still counts in the scale there
    with pytest.raises(UserError, match="microsoft's default, without relative_attention"):
        read_release(source)


def test_zero_key_biases_of_a_v2_class_become_microsoft_files(tmp_path):
    """Without them it is a v1 model; it was "read back with key.bias lost"."""
    source = tmp_path / "source"
    model = transformers_model("v1_key_bias")
    for name, parameter in model.named_parameters():
        if name.endswith("key_proj.bias"):
            parameter.data.zero_()
    model.save_pretrained(source)
    convert(source, tmp_path / "out", "ms")


def test_the_pad_id_of_a_source_is_kept(tmp_path):
    source = tmp_path / "source"
    transformers_model("v3").save_pretrained(source)
    edit_json(source / "config.json", pad_token_id=7)
    convert(source, tmp_path / "ms", "ms")
    assert json_of(tmp_path / "ms" / MS_FILES[1])["padding_idx"] == 7
    convert(tmp_path / "ms", tmp_path / "hf", "hf")
    assert json_of(tmp_path / "hf/config.json")["pad_token_id"] == 7


def test_what_a_run_leaves_is_computed_as_its_reader_can(tmp_path):
    """Models of a run with attention = "fused" could not be used where that cannot run."""
    release = make_release("v3")
    pinned = dataclasses.replace(release.main.config, attention="fused", keep_position_terms=True,
                                 cross_entropy="fused")
    write_ours(dataclasses.replace(
        release, main=dataclasses.replace(release.main, config=pinned)), tmp_path)
    loaded = load_backbone(tmp_path)
    assert loaded.model_config == release.main.config and release.main.config.attention == "auto"
    ids = torch.randint(4, 600, (2, 12))
    assert loaded.backbone(ids, torch.ones_like(ids)).isfinite().all()
