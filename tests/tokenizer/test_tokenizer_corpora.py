"""A tokenizer of each kind through its pipeline: trained, given [MASK], corpus, rows, export."""

import json
import re

import numpy as np
import pytest
import transformers
from data_helpers import SENTENCES, check_batch, tokenize, tokenizer_path
from tokenizer_cases import MAKERS, directory_of

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.corpus import encode
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.data.rows import RowDataset, collate
from deberta_ds.release.model_files import find_tokenizer_files, write_tokenizer_files
from deberta_ds.tokenizer import Tokenizer, text
from deberta_ds.tokenizer.publish import add_special_tokens, special_token
from deberta_ds.tokenizer.text import normalize

READ = ReadOptions("line")
PIECES = {"byte_bpe": 620, "bpe": 620, "wordpiece": 380}
RAW = (*SENTENCES, "  two  spaces\u00a0and a soft\u00adhyphen, cafe\u0301, \ufeffZ\u200bW ", "x▁y",
       "tab\there 😀 नमस्ते")


def test_unknown_tokens_are_said(tmp_path, capsys):
    """A corpus that was half [UNK] was said to be whole."""
    for name, written in (("known", "ab cd\n" * 200), ("other", "ab нет\n" * 7)):
        (tmp_path / f"{name}.txt").write_text(written)
    known, other = (plan_units([str(tmp_path / f"{name}.txt")], READ)
                    for name in ("known", "other"))
    tokenizer = train_tokenizer(known, tmp_path / "tokenizer", TokenizerRecipe(
        kind="wordpiece", vocab_size=12), read=READ)
    done, = tokenize(other, tmp_path / "out", read=READ, tokenizer=tokenizer).values()
    said = re.search(r"warning: ([\d.]+)% of the tokens are unknown", capsys.readouterr().err)
    assert float(said[1]) == pytest.approx(100 * 7 / done.tokens, abs=0.05)
    assert not any("unknown" in name for name in done.counts)  # another content hash than before


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join([*RAW, "   "] * 3), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=list(PIECES))
def trained(request, lines):
    return train(request.param, lines, lines.parent / request.param)


def train(kind, lines, out):
    wanted = TokenizerRecipe(kind=kind, vocab_size=PIECES[kind], character_coverage=0.99)
    return train_tokenizer(plan_units([str(lines)], READ), out, wanted, read=READ)


def test_trained_kinds_have_our_special_ids_and_our_text_rules(trained, lines):
    assert trained.special_ids == {"pad": 0, "cls": 1, "sep": 2, "unk": 3,
                                   "mask": PIECES[trained.path.name]}
    assert trained.size == trained.mask_id + 1
    theirs = transformers.AutoTokenizer.from_pretrained(trained.path)
    for raw in RAW:
        ids = trained.encode(raw)
        assert ids == trained.encode(normalize(raw)) == theirs(raw)["input_ids"][1:-1]
        if trained.kind != "wordpiece":
            assert trained.decode(ids) == normalize(raw)
            assert trained.unk_id not in ids
    again = train(trained.path.name, lines, lines.parent / "again")
    assert again.sha256 == trained.sha256


def test_too_little_text_and_a_wrong_name_are_one_error(lines, tmp_path):
    units = plan_units([str(lines)], READ, 0)
    for kind, pieces in (("byte_bpe", 30_000), ("wordpiece", 30_000), ("wordpiece", 40)):
        with pytest.raises(UserError, match=f"of {pieces:,} subwords from this sample") as refused:
            train_tokenizer(units, tmp_path / "t", TokenizerRecipe(kind=kind, vocab_size=pieces),
                            read=READ)
        possible = int(re.search(r"--vocab_size (\d+)", str(refused.value))[1])  # the error says it
        assert train_tokenizer(units, tmp_path / f"{kind}-{pieces}", TokenizerRecipe(
            kind=kind, vocab_size=possible), read=READ).mask_id == possible
    with pytest.raises(UserError, match="writes a directory"):
        train_tokenizer(units, tmp_path / "spm.model", TokenizerRecipe(kind="bpe"), read=READ)


def test_missing_special_tokens_are_added_behind_the_others(tmp_path):
    values = json.loads((directory_of("roberta") / "tokenizer.json").read_text())
    values["added_tokens"] = [token for token in values["added_tokens"]
                              if token["content"] != "<mask>"]
    (tmp_path / "bare.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"bare.json: no token for mask .*--add_mask"):
        Tokenizer(tmp_path / "bare.json")
    tokenizer, names = add_special_tokens(tmp_path / "bare.json", tmp_path / "out")
    whole = Tokenizer(directory_of("roberta"))
    assert names == ["<mask>"] and tokenizer.special_ids == whole.special_ids
    assert [tokenizer.encode(text) for text in RAW] == [whole.encode(text) for text in RAW]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.mask_token_id == tokenizer.mask_id and len(theirs) == tokenizer.size
    gpt2 = json.loads((directory_of("roberta") / "tokenizer.json").read_text())
    gpt2["added_tokens"], gpt2["post_processor"] = [], None
    vocabulary = {piece: number - 4 for piece, number in gpt2["model"]["vocab"].items()
                  if number >= 4}
    gpt2["model"]["vocab"] = vocabulary
    (tmp_path / "gpt2.json").write_text(json.dumps(gpt2))
    tokenizer, names = add_special_tokens(tmp_path / "gpt2.json", tmp_path / "gpt2")
    assert names == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert tokenizer.mask_id == len(vocabulary) + 4
    gpt2["added_tokens"] = [special_token("<|endoftext|>", len(vocabulary), False)]
    shared = {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "unk", "pad")}
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "tokenizer.json").write_text(json.dumps(gpt2))
    (tmp_path / "shared" / "tokenizer_config.json").write_text(json.dumps(shared))
    with pytest.raises(UserError, match="no token for mask"):
        Tokenizer(tmp_path / "shared")
    tokenizer, names = add_special_tokens(tmp_path / "shared", tmp_path / "parted")
    assert names == ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert tokenizer.pad_id == len(vocabulary) and tokenizer.mask_id == len(vocabulary) + 4
    tokenizer, names = add_special_tokens(tokenizer_path(), tmp_path / "spm")
    assert not names and tokenizer.sha256 == Tokenizer(tokenizer_path()).sha256


@pytest.fixture(scope="module", params=list(MAKERS))
def corpus(request, lines):
    tokenizer = Tokenizer(directory_of(request.param))
    out = lines.parent / f"corpus-{request.param}"
    manifest, = tokenize(lines, out, read=READ, tokenizer=tokenizer).values()
    pack_corpus(out, tokenizer, 48)
    return tokenizer, out, manifest


def test_shards_hold_the_ids_of_the_text_as_it_stands(corpus):
    tokenizer, out, manifest = corpus
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.path)
    wanted = [theirs(raw, add_special_tokens=False)["input_ids"] for raw in [*RAW] * 3]
    tokens = np.load(out / "tokens" / f"{manifest.shards[0].name}.npy")
    assert tokens.tolist() == [number for ids in wanted for number in ids]
    assert manifest.counts["empty"] == 3 and manifest.counts["removed_characters"] == 0
    assert manifest.special_ids == tokenizer.special_ids


def test_characters_that_a_tokenizer_passes_over_are_said(lines, tmp_path, capsys):
    """A BPE without unk and without bytes drops them, and a byte-level one the bytes it lacks."""
    for name, change, lost in (
            ("llama", {"unk_token": None, "byte_fallback": False}, "characters outside"),
            ("roberta", {"merges": []}, "1 of the 243 bytes")):
        values = json.loads((directory_of(name) / "tokenizer.json").read_text())
        values["model"] |= change
        if name == "roberta":
            values["model"]["vocab"] = {piece: number for piece, number in
                                        values["model"]["vocab"].items() if piece != "q"}
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
        tokenize(lines, tmp_path / name, read=READ, tokenizer=Tokenizer(tmp_path / f"{name}.json"))
        shown = capsys.readouterr().err
        assert f"{name}.json: has no subword for {lost}" in shown


def test_rows_of_every_kind_keep_the_invariants(corpus):
    tokenizer, out, _ = corpus
    dataset = RowDataset([SourceConfig(path=str(out))], tokenizer, seq_len=48, seed=3,
                         mask=MaskConfig())
    batch = collate([dataset[g] for g in range(16)])
    check_batch(batch, tokenizer)
    padding = batch.segments == 0
    assert padding.any() and (batch.input_ids[padding] == tokenizer.pad_id).all()
    other = Tokenizer(tokenizer_path())
    with pytest.raises(UserError, match="made with tokenizer sha256"):
        RowDataset([SourceConfig(path=str(out))], other, seq_len=48, seed=3, mask=MaskConfig())


def test_an_exported_directory_has_the_same_tokenizer(corpus, tmp_path):
    tokenizer, _, _ = corpus
    write_tokenizer_files(tokenizer.files, tmp_path, 128)
    again, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.sha256 == tokenizer.sha256
    assert find_tokenizer_files(tmp_path).keys() >= {"tokenizer.json", "tokenizer_config.json"}
    for raw in RAW:
        wanted = [tokenizer.cls_id, *tokenizer.encode(raw), tokenizer.sep_id]
        assert theirs(raw)["input_ids"] == wanted
    pair = theirs(RAW[0], RAW[1])["input_ids"]
    assert pair == [tokenizer.cls_id, *tokenizer.encode(RAW[0]), tokenizer.sep_id,
                    *tokenizer.encode(RAW[1]), tokenizer.sep_id]


@pytest.mark.parametrize("name", ["roberta", "roberta_prefix", "bert", "unigram", "llama"])
def test_a_long_document_has_the_tokens_of_the_whole(name, monkeypatch):
    tokenizer = Tokenizer(directory_of(name))
    document = " ".join(SENTENCES * 40)
    whole = tokenizer.encode(document)
    monkeypatch.setattr(encode, "ENCODE_CHARACTERS", 4000)
    ids, lengths, owners = encode.encode_joined(tokenizer, ["short", document, "short"])
    short = tokenizer.encode("short")
    assert lengths == [len(short), len(whole), len(short)] and owners == [0, 1, 2]
    assert ids.tolist() == [*short, *whole, *short]
    assert text.ENCODE_CHARACTERS == 1 << 18


def test_text_behind_a_mask_keeps_its_space():
    for name in (*MAKERS, "sentencepiece"):
        tokenizer = Tokenizer(directory_of(name))
        whole = tokenizer.encode("The quick fox jumps over")
        ids = tokenizer.encode_around_masks(["The quick ", " jumps over"])
        at = ids.index(tokenizer.mask_id)
        assert ids[:at] == tokenizer.encode("The quick")
        assert whole[-len(ids[at + 1:]):] == ids[at + 1:]
