"""Tokens for a tokenizer that exists, and choices of a new one: ids are those of AutoTokenizer."""

import json

import pytest
from data_helpers import SENTENCES, run_main, write_json_lines
from tokenizer_cases import directory_of, sentencepiece_v3
from transformers import AutoTokenizer

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.extend_tokenizer import extend_tokenizer
from deberta_ds.corpus.train_tokenizer import read_symbols
from deberta_ds.release.model_files import write_tokenizer_files
from deberta_ds.tokenizer import Tokenizer

NEW = ("myocarditis", "electrocardiogram", "кардиограмма", "Herzmuskelentzündung")
TEXTS = [f"The {first} of the {second}, {first}." for first in NEW for second in NEW]
SYMBOLS = ["<drug>", "tnf-α"]


def exported(tokenizer, out):
    """Return the ids that AutoTokenizer gives each text, from the exported directory."""
    write_tokenizer_files(tokenizer.files, out, 512)
    auto = AutoTokenizer.from_pretrained(out)
    return lambda texts: [auto(text, add_special_tokens=False).input_ids for text in texts]


@pytest.mark.parametrize("kind", ["sentencepiece", "v3", "spm_bpe", "roberta", "qwen",
                                  "bert_vocab_txt", "unigram_bytes", "llama"])
def test_an_extended_tokenizer_keeps_its_ids_and_is_exported(tmp_path, kind):
    path = directory_of(kind)
    old = Tokenizer(path)
    new, said = extend_tokenizer(path, tmp_path / "new", SYMBOLS, 15, TEXTS)
    assert new.size == old.size + len(SYMBOLS) + 15 and new.special_ids == old.special_ids
    assert new.pieces(range(old.size)) == old.subwords(range(old.size))
    texts = [*TEXTS, *SENTENCES, "a <drug> b", "x<drug>y tnf-α", "(tnf-α) myocarditises"]
    ids = new.encode_batch(texts)
    assert ids == exported(new, tmp_path / "out")(texts)
    assert old.size in ids[-3] and old.size + 1 in ids[-1]
    lengths = [sum(map(len, one.encode_batch(TEXTS))) for one in (old, new)]
    assert lengths[1] < 0.85 * lengths[0] and "learned 15" in said
    again, said = extend_tokenizer(tmp_path / "new", tmp_path / "again", SYMBOLS, 0, [])
    assert again.sha256 == new.sha256 and "added 0 tokens (2 were there already)" in said


def test_a_learned_subword_saves_the_most_tokens(tmp_path):
    """The first one is the most frequent pair of a loop from the definition."""
    old = Tokenizer(directory_of("sentencepiece"))
    counts: dict[tuple[int, int], int] = {}
    for word in " ".join(TEXTS).replace(",", "").replace(".", "").split():
        ids = old.encode(word)
        for pair in zip(ids, ids[1:], strict=False):
            counts[pair] = counts.get(pair, 0) + 1
    new, _ = extend_tokenizer(old.path, tmp_path, [], 1, TEXTS)
    ordinary = {pair: count for pair, count in counts.items()
                if "<0x" not in "".join(old.subwords(pair))}
    best = {"".join(old.subwords(pair)) for pair in ordinary
            if ordinary[pair] == max(ordinary.values())}
    assert new.pieces([old.size])[0] in best
    with pytest.raises(UserError, match="give only .* new subwords; ask for"):
        extend_tokenizer(old.path, tmp_path / "a", [], 9999, TEXTS)


def test_tokens_next_to_a_sentencepiece_model_are_taken_in(tmp_path):
    """transformers 4 wrote them to added_tokens.json."""
    path = sentencepiece_v3(tmp_path / "spm.model")
    size = Tokenizer(path).size
    beside = tmp_path / "added_tokens.json"
    beside.write_text(json.dumps({"[MASK]": size - 1, "<drug>": size}))
    with pytest.raises(UserError, match=r"which the model does not hold; .*--extend"):
        Tokenizer(tmp_path)
    new, said = extend_tokenizer(tmp_path, tmp_path / "new", [], 0, [])
    assert new.pieces([size]) == ["<drug>"] and new.mask_id == size - 1 and "added 1 tok" in said
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(UserError, match="do_lower_case = true"):
        extend_tokenizer(tmp_path, tmp_path / "other", [], 0, [])
    (tmp_path / "tokenizer_config.json").unlink()
    beside.write_text(json.dumps({"<drug>": size + 7}))
    with pytest.raises(UserError, match=f"id {size + 7}, but `tokenizers` gives it {size}"):
        extend_tokenizer(tmp_path, tmp_path / "other", [], 0, [])


@pytest.mark.parametrize(("lines", "said"), [
    ("one\ntwo words\n", ":2: 'two words': write"), ("one\n\n", ":2: '': write")])
def test_a_symbol_is_one_word(tmp_path, lines, said):
    (tmp_path / "symbols.txt").write_text(lines)
    with pytest.raises(UserError, match=said):
        read_symbols(tmp_path / "symbols.txt")
    (tmp_path / "symbols.txt").write_text("zork\nfrob\n", "utf-8-sig")
    assert read_symbols(tmp_path / "symbols.txt") == ["zork", "frob"]


SIZES = {"unigram": 380, "wordpiece": 350}
CODE = "def f(x):\n\tif x == 1234:\n        return  ['Ａ', x]\n"


@pytest.mark.parametrize("kind", ["unigram", "byte_bpe", "bpe", "wordpiece"])
@pytest.mark.parametrize("options", [
    ("--normalization=nfkc", "--lower_case", "--split_digits"), ("--lower_case",),
    ("--split_digits", "--add_tokens=symbols.txt"),
    ("--keep_white_space", "--normalization=nfkc"), ("--keep_white_space",)])
def test_choices_of_a_new_tokenizer_are_exported(tmp_path, monkeypatch, kind, options):
    monkeypatch.chdir(tmp_path)
    if "--keep_white_space" in options and kind not in ("unigram", "byte_bpe"):
        return
    (tmp_path / "symbols.txt").write_text("<drug>\n")
    write_json_lines(tmp_path / "text.jsonl", [*SENTENCES, CODE] * 9)
    run_main("data_prep/train_tokenizer.py", "text.jsonl", f"--kind={kind}",
             "--out", "new/spm.model" if kind == "unigram" else "new",
             f"--vocab_size={SIZES.get(kind, 500)}", *options)
    tokenizer = Tokenizer(tmp_path / "new")
    texts = [*SENTENCES, CODE, "Ａ ﬁ Å 1234", "a <drug> b", "ÀÉ İ ẞ  x"]
    assert tokenizer.encode_batch(texts) == exported(tokenizer, tmp_path / "out")(texts)
    number = tokenizer.encode("1234")
    assert "--split_digits" not in options or len(number) >= 4
    if "--lower_case" in options:
        assert tokenizer.encode("THE DOG") == tokenizer.encode("the dog")
    if "--normalization=nfkc" in options:
        assert tokenizer.encode("Ａ ﬁ") == tokenizer.encode("A fi")
    if "--add_tokens=symbols.txt" in options:
        assert "<drug>" in tokenizer.subwords(tokenizer.encode("a <drug> b"))
    if "--keep_white_space" in options:
        assert tokenizer.decode(tokenizer.encode(SENTENCES[0] + "\n\tx  y")) == \
            SENTENCES[0] + "\n\tx  y"
