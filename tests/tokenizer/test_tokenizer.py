"""Special ids, offsets, word starts, and refusal of other models."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from data_helpers import SENTENCES, tiny_tokenizer, tokenizer_path

from deberta_ds.base.errors import UserError
from deberta_ds.tokenizer import SPACE_MARK, Tokenizer, subword_starts_word


def test_special_ids():
    tokenizer = tiny_tokenizer()
    names = tokenizer.subwords([0, 1, 2, 3, tokenizer.mask_id])
    assert names == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert tokenizer.size == tokenizer.mask_id + 1
    assert np.flatnonzero(tokenizer.is_special()).tolist() == [0, 1, 2, 3, tokenizer.mask_id]


@pytest.mark.parametrize("text", [*SENTENCES, "", "a", "emoji \U0001f600 rare 𝒳 here"])
def test_decode_gives_the_text_back(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, text]) == [ids, ids]
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.mask_id not in ids
    assert tokenizer.decode([1, *ids, 2]).split() == ["[CLS]", *text.split(), "[SEP]"]


def test_a_forked_process_encodes_batches_and_ends():
    """The library's thread for batches is not in a child, which waited for its end forever."""
    code = ("import os, sys\nfrom deberta_ds.tokenizer import Tokenizer\n"
            f"tokenizer = Tokenizer({tokenizer_path()!r})\n"
            "ids = tokenizer.encode_array('The quick fox').tolist()\nchild = os.fork()\n"
            "assert tokenizer.encode_array('The quick fox').tolist() == ids\n"
            "sys.exit(os.waitpid(child, 0)[1] if child else 0)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("text", [*SENTENCES, "  The\tquick\nfox \U0001f600x  ", "naïve 𝒳y"])
def test_offsets_cover_the_words(text):
    tokenizer = tiny_tokenizer()
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and len(ids) == len(offsets)
    for (start, end), piece in zip(offsets, tokenizer.subwords(ids), strict=True):
        assert 0 <= start <= end <= len(text)
        assert start < end or piece == "\u2581"
        if not piece.startswith("<0x"):
            assert text[start:end].strip() in piece.replace("\u2581", " ")
    covered = {i for start, end in offsets for i in range(start, end)}
    assert all(i in covered for i, c in enumerate(text) if not c.isspace())


@pytest.mark.parametrize(
    ("piece", "starts"),
    [("\u2581the", True), ("\u2581", True), ("ing", False), ("7", False), (",", True),
     ("...", True), ("'s", True), ("_x", False), ("$", True), ("中", True), ("の", True),
     ("ไทย", True), ("한", False), ("\u0301", False), ("\u0e31", False), ("<0xE4>", True),
     ("<0xB8>", False), ("<0xC3>", False), ("<0x41>", False), ("<0xF0>", True), ("ة", False)])
def test_word_start_rule(piece, starts):
    assert subword_starts_word(piece) is starts


def test_refuses_other_models(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        Tokenizer(tmp_path / "missing.model")
    (tmp_path / "junk.model").write_bytes(b"\x00junk" * 100)
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer(tmp_path / "junk.model")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES * 5), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "plain"), vocab_size=150,
        hard_vocab_limit=False, minloglevel=2)
    with pytest.raises(UserError, match=r"plain.model: no token for pad .*, mask .*--add_mask"):
        Tokenizer(tmp_path / "plain.model")


def test_a_piece_that_is_no_utf_8_is_one_clear_error(tmp_path):
    data = Path(tokenizer_path()).read_bytes()
    place = data.index(SPACE_MARK.encode())  # the first piece with it
    path = tmp_path / "spm.model"
    path.write_bytes(data[:place] + b"\x99" + data[place + 1:])
    with pytest.raises(UserError, match="spm.model: .* damaged one .*no UTF-8"):
        Tokenizer(path)
