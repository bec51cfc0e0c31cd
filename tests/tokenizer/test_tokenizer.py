"""Special ids, batches, word starts, and refusal of other models."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
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
