"""DeBERTa v1 from files laid out as the public ones: read, decoded, exported.

Oracle: transformers, loading the same files; for the enhanced mask decoder its v2 layers over q, k
and v taken out of `in_proj` here (its v1 layer cannot take other queries).
"""

import json

import deberta_v1_files as public
import pytest
import torch
import torch.nn.functional as F
from export_cases import same_networks
from safetensors.torch import load_file

from deberta_ds.data.batch import IGNORE, Batch
from deberta_ds.formats.convert import convert
from deberta_ds.formats.pretrained import load_backbone
from deberta_ds.formats.release_reader import read_release

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return public.hub_directory(tmp_path_factory.mktemp("v1") / "deberta-base")


def test_hub_directory_and_first_release_hold_the_same_model(hub, tmp_path):
    unpacked = public.zip_directory(tmp_path / "base")
    release = read_release(hub)
    assert release.main.has_masked_lm and not release.main.config.key_bias
    assert release.main.config.vocab_size == public.VOCABULARY
    same_networks(release, read_release(unpacked))
    same_networks(release, read_release(unpacked / "pytorch.model.bin"))


def decoded_by_transformers(state, ids_L, masked_M):
    """Return logits [M, V] of the masked LM, from a public state dict and transformers' layers."""
    heads, hidden = public.SHAPE["num_attention_heads"], public.SHAPE["hidden_size"]
    theirs = {}
    for name, tensor in state.items():
        name = name.removeprefix("deberta.")
        stem = name.partition("self.")[0] + "self."
        if name.endswith("in_proj.weight"):  # per head: query, key, value
            for number, part in enumerate(("query", "key", "value")):
                weight = torch.cat([head.chunk(3)[number] for head in tensor.chunk(heads)])
                theirs[f"{stem}{part}_proj.weight"] = weight
            theirs[f"{stem}key_proj.bias"] = torch.zeros(hidden)
            theirs[f"{stem}pos_key_proj.bias"] = torch.zeros(hidden)
        else:
            for ours, other in (("q_bias", "query_proj.bias"), ("v_bias", "value_proj.bias"),
                                ("pos_proj", "pos_key_proj"), ("pos_q_proj", "pos_query_proj")):
                name = name.replace(f"self.{ours}", f"self.{other}")
            theirs[name] = tensor
    head = {name.removeprefix("lm_predictions.lm_head."): theirs.pop(name)
            for name in list(theirs) if name.startswith("lm_predictions.")}
    positions = theirs.pop("embeddings.position_embeddings.weight")
    values = public.CONFIG | {"model_type": "deberta-v2", "share_att_key": False}
    model = transformers.DebertaV2Model(transformers.DebertaV2Config(**values)).eval()
    model.load_state_dict(theirs)
    ids_BL = ids_L[None]
    memory = model(ids_BL, output_hidden_states=True).hidden_states[-2]
    query, encoder = positions[: ids_BL.size(1)] + memory, model.encoder
    for _ in range(2):
        query, _ = encoder.layer[-1](
            memory, encoder.get_attention_mask(torch.ones_like(ids_BL)), query_states=query,
            relative_pos=encoder.get_rel_pos(memory), rel_embeddings=encoder.get_rel_embedding())
    dense = F.gelu(F.linear(query[0, masked_M], head["dense.weight"], head["dense.bias"]))
    normed = F.layer_norm(dense, (hidden,), head["LayerNorm.weight"], head["LayerNorm.bias"], 1e-7)
    return normed @ theirs["embeddings.word_embeddings.weight"].T + head["bias"]


def single_batch(ids_L, masked_M):
    labels_BL = torch.full((1, len(ids_L)), IGNORE)
    labels_BL[0, masked_M] = 4
    return Batch(rows=torch.zeros(1, dtype=torch.long), input_ids=ids_L[None], labels=labels_BL,
                 segments=torch.ones(1, len(ids_L), dtype=torch.int),
                 positions=torch.arange(len(ids_L))[None], target_positions=masked_M[None],
                 target_index=torch.arange(len(masked_M)), num_targets=len(masked_M),
                 num_tokens=len(ids_L))


@torch.no_grad()
def test_masked_words_are_decoded_as_the_official_code_does(hub):
    ids_L = torch.randint(4, public.VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
    masked_M = torch.tensor([1, 17, 38])
    expected = decoded_by_transformers(public.state_dict(), ids_L, masked_M)
    words, masked_lm = load_backbone(hub).masked_lm
    states = masked_lm.target_states(words, single_batch(ids_L, masked_M))
    head = masked_lm.head
    found = head.norm(F.gelu(head.dense(states))) @ words.weight.T + head.bias
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_exported_directory_gives_transformers_the_logits_of_the_public_file(hub, tmp_path):
    before = transformers.DebertaForMaskedLM.from_pretrained(hub, legacy=False).eval()
    convert(hub, tmp_path / "hf", "hf")
    after = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    assert type(after) is transformers.DebertaForMaskedLM
    ids, mask = torch.randint(4, public.VOCABULARY, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    assert torch.equal(before(ids, attention_mask=mask).logits, after(ids, attention_mask=mask
                                                                      ).logits)
    side = load_file(tmp_path / "hf/pretraining_heads.safetensors")
    table = "deberta.embeddings.position_embeddings.weight"  # which transformers has no place for
    assert torch.equal(side[table], public.state_dict()[table])
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == public.VOCABULARY
