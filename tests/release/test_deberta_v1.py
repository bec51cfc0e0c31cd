"""DeBERTa v1 from files laid out as the public ones: read, masks filled, exported, gone on from.

Oracle: transformers, loading the same files; for the enhanced mask decoder its v2 layers over q, k
and v taken out of `in_proj` here (its v1 layer cannot take other queries).
"""

import json
import shutil
import unicodedata

import deberta_v1_files as public
import hugging_face_models
import numpy as np
import pytest
import rank_helpers
import torch
import torch.nn.functional as F
import transformers
from data_helpers import SENTENCES, make_corpus, random_documents
from export_cases import same_networks
from launching import deepspeed_json, losses, make_run, options_of
from safetensors.torch import load_file

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import padded_rows
from deberta_ds.data.masking import IGNORE
from deberta_ds.data.rows import Row, collate
from deberta_ds.evaluate.fill_mask import encode_with_masks, fill_mask, load_masked_lm
from deberta_ds.finetuning.models import open_start
from deberta_ds.publish.convert import convert
from deberta_ds.release.reader import load_backbone, read_release
from deberta_ds.tokenizer import Tokenizer


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
    states_BLC = hugging_face_models.decoded_by_transformers(model, positions, ids_L[None])
    dense = F.gelu(F.linear(states_BLC[0, masked_M], head["dense.weight"], head["dense.bias"]))
    normed = F.layer_norm(dense, (hidden,), head["LayerNorm.weight"], head["LayerNorm.bias"], 1e-7)
    return normed @ theirs["embeddings.word_embeddings.weight"].T + head["bias"]


@torch.no_grad()
def test_masked_words_are_decoded_as_the_official_code_does(hub):
    ids_L = torch.randint(4, public.VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
    masked_M = torch.tensor([1, 17, 38])
    expected = decoded_by_transformers(public.state_dict(), ids_L, masked_M)
    words, masked_lm = load_backbone(hub).masked_lm
    labels = np.full(40, IGNORE)
    labels[masked_M] = 4
    row = Row(0, ids_L.numpy(), labels, segments=np.ones(40, np.int32), positions=np.arange(40))
    found = masked_lm.head.logits(masked_lm.target_states(words, collate([row])), words)
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


@torch.no_grad()
def test_masks_of_a_text_are_filled_by_the_decoder(hub):
    model = load_masked_lm(hub)
    text = "The quick brown [MASK], again and [MASK]."
    found = fill_mask(model, text, top=3)
    ids_L = torch.tensor(encode_with_masks(model.tokenizer, text))
    masked_M = (ids_L == public.VOCABULARY - 1).nonzero().flatten()
    assert len(found) == len(masked_M) == 2
    expected = decoded_by_transformers(public.state_dict(), ids_L, masked_M).softmax(-1).topk(3)
    assert [[one.token for one in mask] for mask in found] == expected.indices.tolist()
    values = torch.tensor([[one.probability for one in mask] for mask in found])
    torch.testing.assert_close(values, expected.values, rtol=1e-4, atol=0)


@pytest.mark.parametrize("text", ["The quick brown fox, again.", "again and again",
                                  "Pretraining a model needs text."])
def test_what_stands_around_a_mask_has_the_ids_of_the_whole_text(hub, text):
    """A word takes the space before it along; what follows keeps its own."""
    tokenizer = Tokenizer(hub)
    whole, offsets = tokenizer.encode_with_offsets(text)
    for word in ("fox", "and", "model", text.split()[0]):
        start = text.find(word)
        inside = [start <= begin < start + len(word) for begin, _ in offsets]
        if start < 0 or not any(inside):
            continue
        first, last = inside.index(True), len(inside) - inside[::-1].index(True)
        if tokenizer.readable(whole[first - 1:first]) == [" "]:  # the space is a piece of its own
            first -= 1
        wanted = [*whole[:first], tokenizer.mask_id, *whole[last:]]
        masked = text[:start] + "[MASK]" + text[start + len(word):]
        assert encode_with_masks(tokenizer, masked)[1:-1] == wanted, masked


def test_official_words_are_those_of_the_gpt2_tokenizer(hub):
    """Oracle: `part_of_whole_word` of microsoft/DeBERTa gpt2_tokenizer.py, from its definition."""
    from tokenizers import decoders

    decode = decoders.ByteLevel().decode
    tokenizer = Tokenizer(hub)
    starts, special = tokenizer.official_word_starts(), tokenizer.is_special()
    for piece, number in public.vocabulary().items():
        if special[number]:
            continue
        text = decode([piece])
        alone = len(text) == 1 and (
            text.isspace() or unicodedata.category(text)[0] in "PC"
            or (text.isascii() and text.isprintable() and not text.isalnum()))
        assert starts[number] == (alone or text.startswith(" ")), piece


def test_a_first_release_needs_the_vocabulary_of_the_hub_and_its_pickle_is_not_read(hub, tmp_path):
    unpacked = public.zip_directory(tmp_path / "base")
    for use in (load_masked_lm, open_start, lambda path: Tokenizer(path / "bpe_encoder.bin")):
        with pytest.raises(UserError, match="bpe_encoder.bin: is a pickle.*vocab.json and merges"):
            use(unpacked if use is not open_start else str(unpacked))
    text = "The quick [MASK]."
    assert fill_mask(load_masked_lm(unpacked, hub), text) == fill_mask(load_masked_lm(hub), text)
    assert open_start(str(unpacked), hub).tokenizer.sha256 == Tokenizer(hub).sha256
    convert(unpacked, tmp_path / "hf", "hf", tokenizer=hub / "vocab.json")
    names = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert names("naïve Straße")["input_ids"] == [1, *Tokenizer(hub).encode("naïve Straße"), 2]
    for masked in ("Straße [MASK]", "The quick [MASK], again [MASK] again."):  # in a pipeline
        assert names(masked)["input_ids"] == encode_with_masks(Tokenizer(hub), masked)
    pair = names("Straße", "again")["input_ids"]
    assert pair.count(2) == 2, "transformers' own v1 class puts two [SEP] between the parts"
    for name in ("vocab.json", "merges.txt"):  # or beside the weights
        shutil.copy(hub / name, unpacked / name)
    assert load_masked_lm(unpacked).tokenizer.sha256 == Tokenizer(hub).sha256
    assert not list(tmp_path.rglob("UNPICKLED")) and not (hub / "UNPICKLED").exists()


def test_another_tokenizer_or_one_without_rows_is_refused(hub, tmp_path):
    other = shutil.copytree(hub, tmp_path / "other")
    values = json.loads((other / "vocab.json").read_text())
    values["[MASK]"] = public.VOCABULARY + 7
    (other / "vocab.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="has a tokenizer of its own"):
        load_masked_lm(hub, other)
    with pytest.raises(UserError, match="has a tokenizer of its own"):
        open_start(str(hub), other)
    size = f"{public.VOCABULARY + 8} ids.*only {public.VOCABULARY} rows"
    with pytest.raises(UserError, match=size):  # the vocabulary beside the weights is too large
        load_masked_lm(other)
    with pytest.raises(UserError, match=size):
        convert(other, tmp_path / "out", "hf")
    with pytest.raises(UserError, match=size):
        convert(public.zip_directory(tmp_path / "base"), tmp_path / "out", "hf", tokenizer=other)
    assert not (tmp_path / "out").exists()
    (other / "merges.txt").unlink()
    with pytest.raises(UserError, match="merges.txt: is missing"):
        convert(public.zip_directory(tmp_path / "base"), tmp_path / "out", "hf",
                tokenizer=other / "vocab.json")
    del values["[MASK]"]
    (hub_less := tmp_path / "maskless").mkdir()
    (hub_less / "vocab.json").write_text(json.dumps(values))
    shutil.copy(hub / "merges.txt", hub_less)
    with pytest.raises(UserError, match=r"no token for mask.*add_mask"):
        Tokenizer(hub_less)


@pytest.mark.multi
def test_a_run_goes_on_from_public_files_and_is_exported_with_their_tokenizer(hub, tmp_path):
    tokenizer = Tokenizer(hub)
    run = make_run(tmp_path, kind='"mlm"', steps="2", warmup_steps="0", preset=None,
                   vocab_size=None)
    for name, seed in (("v1_train", 0), ("v1_heldout", 9)):
        make_corpus(tmp_path / name, [tokenizer.encode(one) for one in random_documents(60, seed)],
                    tokenizer)
    rank_helpers.run(1, [*options_of(run, deepspeed_json(tmp_path / "ds", 1)),
                         f"--init.from={hub}", f"--model.vocab_size={padded_rows(tokenizer.size)}",
                         f'--data.sources=[{{path = "{tmp_path}/v1_train"}}]',
                         f"--data.heldout={tmp_path}/v1_heldout", f"--data.tokenizer={hub}"],
                     tmp_path / "log")
    assert list(losses(tmp_path / "out")) == [1, 2]
    convert(tmp_path / "out", tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == ["DebertaForMaskedLM"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for one in (*SENTENCES, *random_documents(20, seed=3)):
        assert theirs(one)["input_ids"] == [tokenizer.cls_id, *tokenizer.encode(one),
                                            tokenizer.sep_id]
    convert(tmp_path / "hf", tmp_path / "ms", "ms")
    convert(tmp_path / "ms", tmp_path / "back", "hf")
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert there.keys() == back.keys() and all(torch.equal(there[k], back[k]) for k in there)
    assert Tokenizer(tmp_path / "back").sha256 == Tokenizer(tmp_path / "hf").sha256
