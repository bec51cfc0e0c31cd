"""Inputs that would be lost, doubled or misread in silence, and outputs that went away."""

import bz2
import gzip
import json
import lzma
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from data_helpers import (
    READ,
    documents_of,
    problems_of,
    random_documents,
    run_main,
    stored_texts,
    texts_of,
    tokenize,
    tree,
    write_json_lines,
)
from tokenizers import decoders, models, pre_tokenizers, trainers

from deberta_ds.base.errors import UserError
from deberta_ds.corpus import encode
from deberta_ds.corpus.build import Build
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.origins import take_down
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import CorpusRecipe, Recipe, TokenizerRecipe
from deberta_ds.corpus.stats import corpus_stats, stats_text
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.data.shards import read_manifest
from deberta_ds.files.inputs import open_bytes
from deberta_ds.tokenizer import Tokenizer

COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress,
            ".zst": lambda data: zstandard.ZstdCompressor().compress(data)}


def written(path, texts):
    write_json_lines(path, texts)
    return path


def test_a_held_out_directory_that_is_gone_is_whole_again(tmp_path):
    """It, or another one in its place."""
    texts = written(tmp_path / "text.jsonl", random_documents(300))

    def run(out, held, part=None):
        return tokenize(texts, tmp_path / out, heldout_out=tmp_path / held, heldout_share=0.2,
                        unit_bytes=12_000, part=part)

    run("whole", "whole-held")
    assert run("out", "held", part=(1, 2)) == {}
    shutil.copytree(tmp_path / "out", tmp_path / "out-2")
    shutil.rmtree(tmp_path / "held")
    for out, held in (("out", "held"), ("out-2", "held-2")):
        run(out, held)
        for one, other in (("whole", out), ("whole-held", held)):
            assert stored_texts(tmp_path / one) == stored_texts(tmp_path / other)
            assert tree(tmp_path / one / "tokens") == tree(tmp_path / other / "tokens")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_frames_of_a_compressed_file_are_read_and_none_is_dropped(tmp_path, suffix):
    lines = [b"".join(json.dumps({"text": f"{part} {i}"}).encode() + b"\n" for i in range(4000))
             for part in "ab"]
    first, second = map(COMPRESS[suffix], lines)
    path = tmp_path / f"text.jsonl{suffix}"
    padding = b"\0" * 8 if suffix in (".gz", ".xz") else b""
    path.write_bytes(first + padding + second + padding)
    assert texts_of([path]) == [f"{part} {i}" for part in "ab" for i in range(4000)]
    damaged = bytearray(second)
    damaged[1] ^= 0x55
    for bad in (first + bytes(damaged), first + second[:-5], first + b"garbage behind",
                first + second + b"x", first[:-9], b"not compressed at all"):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=f"{path.name}: damaged or cut short"):
            documents_of(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="nothing is in it"):
        documents_of(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_block_that_grows_a_millionfold_is_read_in_steps(tmp_path, suffix):
    path = tmp_path / f"letters.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"a" * (1 << 24)))
    [document] = documents_of(path, max_document_bytes=1000)
    assert "longer than 1000 bytes" in document.problem
    with open_bytes(str(path)) as file:
        sizes = [len(chunk) for chunk in iter(lambda: file.raw.read(1 << 30), b"")]
        assert file.raw.tell() == sum(sizes) == 1 << 24 and max(sizes) <= 1 << 22


def test_tables_that_are_not_read_in_order_may_be_compressed(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "plain.parquet")
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"table.parquet{suffix}"
        path.write_bytes(compress((tmp_path / "plain.parquet").read_bytes()))
        assert texts_of([path]) == ["a", "b"]


def test_an_id_is_text_or_a_whole_number(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"text": "one", "id": value}) + "\n" for value in (
        "a", 2**62, 2**65, 1.0, True, ["a"], {"a": 1})))
    good, bad = (found := documents_of(path, id_key="id"))[:2], found[2:]
    assert [document.id for document in good] == ["a", str(2**62)] and len(bad) == 5
    assert all("neither text nor a whole number" in document.problem for document in bad)


def test_invalid_utf_8_in_a_table_is_one_bad_row(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes(b"text,id\nhello,1\ncaf\xe9 au lait,2\nthird,3\n")
    problems, found = problems_of(path, id_key="id")
    assert [document.text for document in found] == ["hello", "", "third"]
    assert problems == [f"{path}:row 2: invalid UTF-8"]
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):  # what Excel calls Unicode text
        (tmp_path / "wide.csv").write_bytes("text,id\nhello,1\n".encode(encoding))
        assert texts_of([tmp_path / "wide.csv"]) == ["hello"]
    (tmp_path / "wide.csv").write_bytes("text,n\xba\nhello,1\n".encode("latin-1"))
    with pytest.raises(UserError, match="wide.csv: its header is not UTF-8"):
        documents_of(tmp_path / "wide.csv")
    cells = pa.array([b"hello", b"caf\xe9", b"third"])
    column = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "latin.parquet")
    problems, found = problems_of(tmp_path / "latin.parquet")
    assert [document.text for document in found] == ["hello", "", "third"]
    assert problems == [f"{tmp_path}/latin.parquet:row 2: invalid UTF-8"]


def test_a_pattern_ends_before_any_line_end(tmp_path):
    found = {}
    for name, end in (("lf", "\n"), ("crlf", "\r\n")):
        path = tmp_path / f"{name}.txt"
        path.write_bytes(end.join(["Intro", "CHAPTER I", "abc", "CHAPTER II", "ghi", ""]).encode())
        found[name] = documents_of(path, documents="match:CHAPTER [IVX]+$")
    assert len(found["lf"]) == len(found["crlf"]) == 3
    path.write_text("one\ntwo\n\nthree\n\nfour\n")
    for pattern in (r"\s+$", r"\n", r"^$", r"^\s*$"):
        assert len(documents_of(path, documents=f"match:{pattern}")) == 3, pattern


def test_an_input_is_named_once(tmp_path):
    path = tmp_path / "in" / "a.txt"
    path.parent.mkdir()
    path.write_text("hello\n")
    (tmp_path / "link.txt").symlink_to(path)
    for names in ([path, path], [path.parent, path], [path, tmp_path / "link.txt"]):
        with pytest.raises(UserError, match="named twice"):
            plan_units(list(map(str, names)), ReadOptions())
    assert plan_units([str(tmp_path / "**" / "a.txt")], ReadOptions())
    (path.parent / "same.txt").symlink_to(path)  # as of equal files in a cache of the Hub's
    assert len(plan_units([str(path.parent)], ReadOptions())[0]) == 2


def test_a_tokenizer_is_not_trained_on_nothing_or_over_something(tmp_path):
    path = written(tmp_path / "text.jsonl", random_documents(200))
    units = plan_units([str(path)], ReadOptions())

    def fast(out, read=READ, **options):
        return train_tokenizer(units, tmp_path / out, TokenizerRecipe(
            kind="byte_bpe", vocab_size=300), read=read, **options)

    for most, message in ((0, r"text.jsonl:1: no string under 'body'"), (1000, "no text in it")):
        with pytest.raises(UserError, match=message):
            fast("wrong", read=ReadOptions(text_key="body"), max_bad=most)
    assert fast("mine").sha256 == fast("mine").sha256  # over its own
    for out, message in (("", "is one file; name it"), (path, "is one of the inputs")):
        with pytest.raises(UserError, match=message):
            train_tokenizer(units, out, TokenizerRecipe(vocab_size=300), read=READ)
    assert len(documents_of(path)) == 200


@pytest.mark.parametrize(("kind", "pieces"), [("byte_bpe", 617), ("bpe", 641), ("wordpiece", 415)])
def test_a_long_document_of_words_is_not_cut(tmp_path, monkeypatch, kind, pieces):
    monkeypatch.setattr(encode, "ENCODE_CHARACTERS", longest := 1 << 15)
    words = [re.sub(r"[^\w ]", "", text) for text in random_documents(400)]
    path = written(tmp_path / "text.jsonl", words)
    tokenizer = train_tokenizer(plan_units([str(path)], READ), tmp_path / kind,
                                TokenizerRecipe(kind=kind, vocab_size=pieces), read=READ)
    text = " ".join(words)
    text = " ".join([text] * (2 * longest // len(text) + 2))
    ids, lengths, owners = encode.encode_joined(tokenizer, [text, "short"])
    assert len(lengths) == 2 and list(owners) == [0, 1]
    assert ids[:lengths[0]].tolist() == tokenizer.encode(text)


def test_characters_are_what_they_were_after_a_takedown(tmp_path):
    texts = [f"Zeile {i}:   {'ganz  ' * i}viel" for i in range(60)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": str(i)}) + "\n"
                            for i, text in enumerate(texts)))
    options = ReadOptions(id_key="id")
    units = plan_units([str(path)], options)
    tokenizer = train_tokenizer(units, tmp_path / "wp", TokenizerRecipe(
        kind="wordpiece", vocab_size=104), read=options)
    tokenize(units, tmp_path / "corpus", tokenizer=tokenizer, read=options)
    pack_corpus(tmp_path / "corpus", tokenizer, 16)
    take_down(tmp_path / "corpus", [str(i) for i in range(1, 60)], tmp_path / "less", tokenizer)
    assert read_manifest(tmp_path / "less")[0].counts["characters"] == len(texts[0])


def test_statistics_need_no_unknown_token(tmp_path):
    path = written(tmp_path / "text.jsonl", random_documents(40))
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    fast.train_from_iterator(random_documents(40), trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "cls", "sep", "mask")}))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.unk_id is None
    tokenize(path, tmp_path / "corpus", tokenizer=tokenizer)
    text = stats_text(corpus_stats(tmp_path / "corpus", tokenizer), tokenizer)
    assert "WARNING" not in text


def test_what_a_build_makes_lies_outside_of_its_inputs(tmp_path):
    (tmp_path / "in").mkdir()
    corpus = CorpusRecipe(name="a", inputs=(str(tmp_path / "in"),))
    with pytest.raises(UserError, match="choose a directory outside"):
        Build(Recipe(out=f"{tmp_path}/in/out", corpora=(corpus,)))


def test_options_of_single_commands_have_the_limits_of_the_recipe(capsys):
    with pytest.raises(SystemExit):
        run_main("data_prep/tokenize_corpus.py", "text", "--out", "o", "--tokenizer", "t",
                 "--min_letter_share", "5")
    assert "min_letter_share = 5.0: must be at most 1" in capsys.readouterr().err


def test_documents_without_the_named_text_are_no_clean_ones(tmp_path):
    """filter.py said "0 documents dropped" of a corpus that it could not read."""
    path = written(tmp_path / "text.jsonl", random_documents(4))
    said = run_main("data_prep/filter.py", path, "--filters", "data_prep/filters/web_en.toml",
                    "--text_key", "body", "--out", tmp_path / "out", "--workers", 1)
    assert "4 of 4 documents (100.0%)" in said and "unreadable (verify.py says why)" in said
