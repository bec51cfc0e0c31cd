"""SentencePiece models of others: raw text, any special ids, missing ones added, exported."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizer_cases as cases
import tokenizers
import transformers
from data_helpers import SENTENCES, random_documents, tokenize

from deberta_ds.base.errors import UserError
from deberta_ds.corpus import encode
from deberta_ds.corpus.documents import ReadOptions
from deberta_ds.evaluate.fill_mask import encode_with_masks
from deberta_ds.release.model_files import (
    find_tokenizer_files,
    open_tokenizer,
    write_tokenizer_files,
)
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.publish import add_special_tokens
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json
from deberta_ds.tokenizer.spm import model_proto

ADDED = {"albert": [], "v3": [], "t5": ["<s>", "<mask>"], "llama_spm": ["<pad>", "<mask>"]}
RAW = (*SENTENCES, "", " ", "\r\n\u2028\x85 x \u2028", "ﬁ ½ Ａ x\u200by",
       "  two  spaces\u00a0and a soft\u00adhyphen\r\n",
       "tab\tthere 😀 नमस्ते", "   leading, <extra>the quick brown<tool> fox",
       "def f(x):\n    return x", "\ufeff\u200bThe fox", "\x01\x02 The fox",
       "tab\x1cfile\x1fsep", "x" * 500)


@pytest.fixture(scope="module", params=list(cases.SENTENCEPIECE))
def made(request, tmp_path_factory):
    """(name, the model as its authors have it, the tokenizer with all roles)."""
    place = tmp_path_factory.mktemp(request.param)
    model = cases.SENTENCEPIECE[request.param](place / "their.model")
    tokenizer, names = add_special_tokens(model, place / "whole")
    assert names == ADDED[request.param]
    return request.param, model, tokenizer


def test_ids_are_those_of_the_library_on_the_text_as_it_stands(made):
    _, model, tokenizer = made
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    wanted = [library.encode(text) for text in RAW]
    assert tokenizer.normalizes_itself
    assert tokenizer.encode_batch(list(RAW)) == [tokenizer.encode(text) for text in RAW] == wanted
    assert [tokenizer.encode_array(text).tolist() for text in RAW] == wanted
    assert len(set(tokenizer.special_ids.values())) == 5
    special = tokenizer.is_special()
    special[tokenizer.unk_id] = False
    assert not special[tokenizer.encode("a [MASK] b<mask>, <s>c</s> [CLS]")].any()


def test_what_it_lacks_is_one_error_whose_remedy_works(made):
    name, model, tokenizer = made
    missing = ADDED[name]
    if not missing:
        assert Tokenizer(model).sha256 == tokenizer.sha256
        return
    with pytest.raises(UserError, match=f"their.model: no token for .*--add_mask {model}"):
        Tokenizer(model)
    assert tokenizer.subwords(range(tokenizer.size - len(missing), tokenizer.size)) == missing


def test_shards_hold_the_ids_of_the_text_as_it_stands(made, tmp_path, monkeypatch):
    _, _, tokenizer = made
    read, texts = ReadOptions("line"), [text for text in RAW if "\n" not in text and text.strip()]
    texts.append(" ".join(SENTENCES * 40))
    (tmp_path / "lines.txt").write_text("\n".join(texts), encoding="utf-8")
    monkeypatch.setattr(encode, "ENCODE_CHARACTERS", 4000)
    manifest, = tokenize(tmp_path / "lines.txt", tmp_path / "out", unit_bytes=0, read=read,
                         tokenizer=tokenizer).values()
    stored = np.load(tmp_path / "out/tokens" / f"{manifest.shards[0].name}.npy")
    assert stored.tolist() == [number for text in texts for number in tokenizer.encode(text)]


def test_an_exported_directory_gives_auto_tokenizer_the_same_ids(made, tmp_path):
    name, _, tokenizer = made
    write_tokenizer_files(tokenizer.files, tmp_path, 128)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in RAW:
        wanted = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
        assert theirs(text)["input_ids"] == wanted, text
    for masked in ("The {} fox.", "The quick {}, again {} again.", "{}: it"):  # in a pipeline
        masked = masked.replace("{}", tokenizer.mask_token)
        if name in ("albert", "v3"):
            assert theirs(masked)["input_ids"] == encode_with_masks(tokenizer, masked)
    assert len(theirs) == tokenizer.size
    for role, number in tokenizer.special_ids.items():
        assert getattr(theirs, f"{role}_token_id") == number
    assert Tokenizer(tmp_path).sha256 == tokenizer.sha256


def test_words_of_text_start_where_they_do_in_it(made):
    _, _, tokenizer = made
    starts, text = tokenizer.word_starts(), "The quick brown fox, jumps"
    pieces = tokenizer.readable(tokenizer.encode(text))
    words, ids = "", tokenizer.encode(text)
    for piece, begins in zip(pieces, starts[ids], strict=True):
        words += "|" * bool(begins) + piece.strip()
    assert words.lower().replace("quickbrown", "quick|brown") == "|the|quick|brown|fox|,|jumps"


def test_a_model_that_marks_the_ends_of_words_is_refused(tmp_path):
    model = cases._sentencepiece(tmp_path / "m.model", vocab_size=300,
                                 treat_whitespace_as_suffix=True)
    with pytest.raises(UserError, match=r"m.model: marks the ends of words"):
        Tokenizer(model)


def _trained(path, **options):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(path / "spm"), vocab_size=120,
        hard_vocab_limit=False, minloglevel=2, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", **options)
    return path / "spm.model"


@pytest.mark.parametrize("kind", ["control_symbols", "user_defined_symbols"])
def test_a_model_that_holds_the_mask_gets_no_second_one(tmp_path, kind):
    model = _trained(tmp_path, **{kind: ["[MASK]"]})
    tokenizer = Tokenizer(model)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert tokenizer.mask_id == library.piece_to_id("[MASK]") == 4
    assert tokenizer.size == library.get_piece_size()
    assert tokenizer.mask_id not in tokenizer.encode("a [MASK] b")
    (tmp_path / "out").mkdir()
    write_tokenizer_files(tokenizer.files, tmp_path / "out", 128)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.mask_token_id, len(theirs)) == (4, tokenizer.size)


def test_names_that_a_user_defined_are_text_in_a_model_of_those_ids(tmp_path):
    proto = model_proto(_trained(tmp_path).read_bytes(), tmp_path)
    for piece in list(proto.pieces)[:3]:
        piece.type = piece.USER_DEFINED
    (tmp_path / "spm.model").write_bytes(proto.SerializeToString())
    tokenizer = Tokenizer(tmp_path / "spm.model")
    assert not {0, 1, 2} & set(tokenizer.encode("x [CLS] y [SEP] z [PAD]"))


@pytest.mark.parametrize(("settings", "message"), [
    ({"do_lower_case": True}, "spm.model: do_lower_case = true .*tokenizer.json"),
    ({"split_by_punct": True}, "split_by_punct = true"),
    ({"added_tokens_decoder": {"900": {"content": "[ENT]"}}}, r"add '\[ENT\]' with id 900"),
    ({"mask_token": "<hole>"}, r"name '<hole>' as the mask token, but .* '\[MASK\]'")])
def test_settings_that_a_model_alone_does_not_follow_are_refused(tmp_path, settings, message):
    model = _trained(tmp_path)
    mask = Tokenizer(model).mask_id
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text(json.dumps({"do_lower_case": False, "mask_token": "[MASK]",
                                  "added_tokens_decoder": {mask: {"content": "[MASK]"}}}))
    assert Tokenizer(tmp_path).mask_id == mask
    beside.write_text(json.dumps(settings))
    for path in (tmp_path, model):
        with pytest.raises(UserError, match=message):
            Tokenizer(path)


def test_special_tokens_named_beside_a_model_are_taken(tmp_path):
    cases.sentencepiece_t5(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match="no token for"):
        Tokenizer(tmp_path)
    ids = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    names = {"cls_token": ids.id_to_piece(20), "mask_token": ids.id_to_piece(30)}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.cls_id, tokenizer.mask_id) == (20, 30)
    assert open_tokenizer(find_tokenizer_files(tmp_path)).sha256 == tokenizer.sha256
    assert Tokenizer(tmp_path / "tokenizer.model").sha256 == tokenizer.sha256
    others = names | {"mask_token": ids.id_to_piece(31)}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(others))
    assert Tokenizer(tmp_path).sha256 != tokenizer.sha256  # a corpus of the other must not be taken
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"cls_token": names["cls_token"]}))
    whole, added = add_special_tokens(tmp_path, tmp_path / "whole")
    assert (whole.cls_id, whole.pieces([whole.mask_id]), added) == (20, ["<mask>"], ["<mask>"])


@pytest.mark.parametrize("kind", ["char", "word"])
def test_models_of_characters_and_words_are_refused_when_opened(tmp_path, kind):
    with pytest.raises(UserError, match=r"spm.model: .*characters or words; give a unigram"):
        Tokenizer(_trained(tmp_path, model_type=kind))


def test_a_disk_that_fails_is_what_the_error_says(tmp_path, monkeypatch):
    """It asked for the path of a SentencePiece model, which had been given."""
    path = cases.SENTENCEPIECE["v3"](tmp_path / "spm.model")

    def fail(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(UserError, match="spm.model: Input/output error; the disk or the network"):
        Tokenizer(path)


def test_a_bpe_model_is_published_with_its_ids(tmp_path):
    """`tokenizers` has no such model: the merges are read off the pieces and their scores."""
    ours = Tokenizer(cases.sentencepiece_bpe(tmp_path / "spm.model"))
    published = tokenizers.Tokenizer.from_str(build_tokenizer_json(ours))
    assert published.token_to_id("[MASK]") == ours.mask_id
    for text in (*RAW, *random_documents(50, seed=7)):
        assert published.encode(text).ids[1:-1] == ours.encode(text), text
