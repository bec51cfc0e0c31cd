"""SentencePiece models, ours and of others: ids, special ids, word starts, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizer_cases as cases
import transformers
from data_helpers import tiny_tokenizer, tokenizer_path

from deberta_ds.base.errors import UserError
from deberta_ds.release.model_files import (
    find_tokenizer_files,
    open_tokenizer,
    write_tokenizer_files,
)
from deberta_ds.tokenizer import SPACE_MARK, Tokenizer
from deberta_ds.tokenizer.publish import add_special_tokens
from deberta_ds.tokenizer.spm import model_proto
from deberta_ds.tokenizer.words import subword_starts_word

ADDED = {"albert": [], "v3": [], "spm_bpe": [], "t5": ["<s>", "<mask>"],
         "llama_spm": ["<pad>", "<mask>"]}


@pytest.mark.parametrize("name", ADDED)
def test_ids_are_those_of_the_library_and_what_a_model_lacks_is_added(name, tmp_path):
    whole, texts, missing = cases.directory_of(name), list(cases.ODD), ADDED[name]
    model, tokenizer = whole.with_name("their.model"), Tokenizer(whole)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    wanted = [library.encode(text) for text in texts]
    assert tokenizer.normalizes_itself
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts] == wanted
    assert [tokenizer.encode_array(text).tolist() for text in texts] == wanted
    assert len(set(tokenizer.special_ids.values())) == 5
    assert add_special_tokens(model, tmp_path)[1] == missing
    if not missing:
        assert Tokenizer(model).sha256 == tokenizer.sha256
        return
    with pytest.raises(UserError, match=f"their.model: no token for .*--add_mask {model}"):
        Tokenizer(model)
    assert tokenizer.subwords(range(tokenizer.size - len(missing), tokenizer.size)) == missing


@pytest.mark.parametrize(("options", "message"), [
    ({"treat_whitespace_as_suffix": True}, "marks the ends of words"),
    ({"model_type": "char"}, ".*characters or words; give a unigram"),
    ({"model_type": "word"}, ".*characters or words; give a unigram")])
def test_models_without_starts_of_words_are_refused_when_opened(tmp_path, options, message):
    with pytest.raises(UserError, match=f"spm.model: {message}"):
        Tokenizer(_trained(tmp_path, **options))


def _trained(path, **options):
    return cases.sentencepiece_v3(path / "spm.model", **{"vocab_size": 120} | options)


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


def test_a_disk_that_fails_is_what_the_error_says(tmp_path, monkeypatch):
    """It asked for the path of a SentencePiece model, which had been given."""
    path = cases.SENTENCEPIECE["v3"](tmp_path / "spm.model")

    def fail(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(UserError, match="spm.model: Input/output error; the disk or the network"):
        Tokenizer(path)


def test_special_ids():
    tokenizer = tiny_tokenizer()
    names = tokenizer.subwords([0, 1, 2, 3, tokenizer.mask_id])
    assert names == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert tokenizer.size == tokenizer.mask_id + 1
    assert np.flatnonzero(tokenizer.is_special()).tolist() == [0, 1, 2, 3, tokenizer.mask_id]


def test_a_forked_process_encodes_batches_and_ends():
    """The library's thread for batches is not in a child, which waited for its end forever."""
    code = ("import os, sys\nfrom deberta_ds.tokenizer import Tokenizer\n"
            f"tokenizer = Tokenizer({tokenizer_path()!r})\n"
            "ids = tokenizer.encode_array('The quick fox').tolist()\nchild = os.fork()\n"
            "assert tokenizer.encode_array('The quick fox').tolist() == ids\n"
            "sys.exit(os.waitpid(child, 0)[1] if child else 0)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("piece", "starts"),
    [("\u2581the", True), ("\u2581", True), ("ing", False), ("7", False), (",", True),
     ("...", True), ("'s", True), ("_x", False), ("$", True), ("中", True), ("の", True),
     ("ไทย", True), ("한", False), ("\u0301", False), ("\u0e31", False), ("<0xE4>", True),
     ("<0xB8>", False), ("<0xC3>", False), ("<0x41>", False), ("<0xF0>", True), ("ة", False)])
def test_word_start_rule(piece, starts):
    assert subword_starts_word(piece) is starts


def test_what_is_no_model_or_a_damaged_one_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        Tokenizer(tmp_path / "missing.model")
    data = Path(tokenizer_path()).read_bytes()
    place = data.index(SPACE_MARK.encode())  # the first piece with it
    for bad, message in ((b"\x00junk" * 100, "not a SentencePiece model"),
                         (data[:place] + b"\x99" + data[place + 1:], "damaged one .*no UTF-8")):
        (tmp_path / "spm.model").write_bytes(bad)
        with pytest.raises(UserError, match=f"spm.model: .*{message}"):
            Tokenizer(tmp_path / "spm.model")
