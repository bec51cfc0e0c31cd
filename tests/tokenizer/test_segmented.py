"""Words by a function of one's own: shards hold them, rows hide them whole, faults are named."""

import json
import runpy

import numpy as np
import pytest
from data_helpers import run_main
from tokenizer_cases import directory_of

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.corpus.stats import corpus_stats
from deberta_ds.data.corpus import Corpus, map_array
from deberta_ds.data.masking import IGNORE, LONGEST_WORD
from deberta_ds.data.rows import RowDataset
from deberta_ds.data.shards import read_manifest
from deberta_ds.tokenizer import Tokenizer

TEXT = ("中文没有空格，所以每个词片都是一个词。日本語も同じです。 Words like 42; ", "同じ カタ!")
WORDS = """import re
def words(text):
    return re.findall(r"\\s*[^\\W\\d_]{1,4}|[\\s\\S]", text)  # as MeCab, white space in front
def shorter(text): return text.split()
def other(text): return text
def failing(text): return words(text)[1000]
"""


@pytest.fixture
def tokenize(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(WORDS)
    (tmp_path / "a.jsonl").write_text("".join(
        json.dumps({"text": text * count}, ensure_ascii=False) + "\n" for text in TEXT
        for count in (1, 40)))
    return lambda tokenizer, out, *options: run_main(
        "data_prep/tokenize_corpus.py", "a.jsonl", "--out", out, "--workers", 1, "--tokenizer",
        tokenizer, *options)


@pytest.mark.parametrize("name", ["roberta", "llama", "sentencepiece"])
def test_shards_and_masks_have_the_words_of_the_function(tokenize, tmp_path, name):
    path = directory_of(name)
    tokenizer, size = Tokenizer(path), Tokenizer(path).size
    tokenize(path, "plain")
    tokenize(path, "out", "--words", "own.py:words")
    manifest = read_manifest("out")[0]
    assert manifest.words.startswith("own.py:words sha256 ")
    assert "words" not in json.loads((tmp_path / "plain/manifest.json").read_text())
    made = [tmp_path / "out", tmp_path / "plain"]  # whole paths: open files are kept by name
    stored, plain = (map_array(f"{out}/tokens/00000-000.npy") for out in made)
    assert np.array_equal(stored % size, plain)
    words = runpy.run_path("own.py")["words"]
    starts = []
    for text in (text * count for text in TEXT for count in (1, 40)):
        text = text if tokenizer.normalizes_itself else text.strip()
        begins = {sum(map(len, words(text)[:number])) for number in range(len(words(text)))}
        before = 0
        for start, end in tokenizer.encode_with_offsets(text)[1]:
            starts.append(bool(begins & set(range(before, start + 1))))
            before = end
    assert np.array_equal(tokenizer.stored_word_starts()[stored], starts)
    assert corpus_stats("out", tokenizer).word_starts == sum(starts)
    run_main("data_prep/pack.py", "out", "plain", "--tokenizer", path, "--seq_len", 64)
    rows = RowDataset([SourceConfig(path=str(made[0]))], tokenizer, seq_len=64, seed=0,
                      mask=MaskConfig(rate=0.4))
    corpus = Corpus(made[0], seq_len=64)
    for g in range(corpus.num_rows):
        row, pieces = rows[g], corpus.stored_row(rows.locate(g)[1])
        target, at = row.labels != IGNORE, 1
        assert target.any() and row.input_ids.max() < size and row.labels.max() < size
        for piece, ids in zip(pieces, corpus.row(rows.locate(g)[1]), strict=True):
            assert np.array_equal(ids, piece % size)
            hidden = target[at:at + len(piece)]
            for word in np.split(hidden, np.flatnonzero(
                    tokenizer.stored_word_starts()[piece])):
                assert word.all() or not word.any() or len(word) > min(LONGEST_WORD, target.sum())
            at += len(piece) + 2


@pytest.mark.parametrize(("function", "message"), [
    ("own.py:shorter", "a.jsonl:1: own.py:shorter changed the text at ' Words like 42"),
    ("own.py:other", "a.jsonl:1: own.py:other returned str; it must return a list"),
    ("own.py:failing", "a.jsonl:1: own.py:failing failed on this document: IndexError.*line 6"),
    ("own.py:none", "words: own.py has no none"), ("jieba", "'jieba' is not FILE.py:NAME")])
def test_a_function_that_gives_no_words_is_named(tokenize, function, message):
    with pytest.raises(UserError, match=message):
        tokenize(directory_of("sentencepiece"), "out", "--words", function)
