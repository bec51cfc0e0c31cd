"""A tokenizer of each kind through its pipeline: trained, given [MASK], corpus, rows, export."""

import json
import re

import numpy as np
import pytest
import transformers
from data_helpers import SENTENCES, check_batch, tokenize, tokenizer_path
from tokenizer_cases import MAKERS, ODD, SENTENCEPIECE, directory_of, trained

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.corpus import encode
from deberta_ds.corpus.documents import ReadOptions
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.data.rows import RowDataset, collate
from deberta_ds.evaluate.fill_mask import encode_with_masks
from deberta_ds.release.model_files import find_tokenizer_files, write_tokenizer_files
from deberta_ds.tokenizer import Tokenizer, text
from deberta_ds.tokenizer.publish import add_special_tokens, special_token
from deberta_ds.tokenizer.text import normalize

READ = ReadOptions("line")
PIECES = {"byte_bpe": 620, "bpe": 620, "wordpiece": 380}
RAW = [text for text in ODD if "\n" not in text and text.strip()]  # that are lines of a file


def test_unknown_tokens_are_said(tmp_path, capsys):
    """A corpus that was half [UNK] was said to be whole."""
    tokenizer = trained(tmp_path, ["ab cd"] * 200, kind="wordpiece", vocab_size=12)
    (tmp_path / "other.txt").write_text("ab нет\n" * 7)
    done, = tokenize(tmp_path / "other.txt", tmp_path / "out", read=READ,
                     tokenizer=tokenizer).values()
    said = re.search(r"warning: ([\d.]+)% of the tokens are unknown", capsys.readouterr().err)
    assert float(said[1]) == pytest.approx(100 * 7 / done.tokens, abs=0.05)
    assert not any("unknown" in name for name in done.counts)  # another content hash than before


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join([*RAW, "   "] * 3), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", PIECES)
def test_trained_kinds_have_our_special_ids_and_our_text_rules(kind, tmp_path):
    made, again = (trained(tmp_path, [*RAW, "   "] * 3, name, kind=kind, vocab_size=PIECES[kind],
                           character_coverage=0.99) for name in ("one", "other"))
    assert made.sha256 == again.sha256
    assert made.special_ids == {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": PIECES[kind]}
    assert made.size == made.mask_id + 1
    theirs = transformers.AutoTokenizer.from_pretrained(made.path)
    for raw in (*ODD, "x▁y"):
        ids = made.encode(raw)
        assert ids == made.encode(normalize(raw)) == theirs(raw)["input_ids"][1:-1]
        if made.kind != "wordpiece":
            assert made.decode(ids) == normalize(raw) and made.unk_id not in ids


def test_too_little_text_and_a_wrong_name_are_one_error(tmp_path):
    for kind, pieces in (("byte_bpe", 30_000), ("wordpiece", 30_000), ("wordpiece", 40)):
        with pytest.raises(UserError, match=f"of {pieces:,} subwords from this sample") as refused:
            trained(tmp_path, RAW, "t", kind=kind, vocab_size=pieces)
        possible = int(re.search(r"--vocab_size (\d+)", str(refused.value))[1])  # the error says it
        assert trained(tmp_path, RAW, f"{kind}-{pieces}", kind=kind,
                       vocab_size=possible).mask_id == possible
    with pytest.raises(UserError, match="writes a directory"):
        trained(tmp_path, RAW, "spm.model", kind="bpe")


def _as_gpt2(values):
    """Take all special tokens away, and put in their place the one that is at the end of a text."""
    vocabulary = {piece: number - 4 for piece, number in values["model"]["vocab"].items()
                  if number >= 4}
    values["model"]["vocab"], values["post_processor"] = vocabulary, None
    values["added_tokens"] = [special_token("<|endoftext|>", len(vocabulary), False)]


def _without(*names):
    """Return what takes tokens out of a tokenizer.json, and renames the pieces called so."""
    def change(values):
        values["added_tokens"] = [one for one in values["added_tokens"]
                                  if one["content"] not in names]
        pieces = values["model"]["vocab"]
        for name in names:
            if name in pieces:
                pieces[f"unused {name}"] = pieces.pop(name)
    return change


BRACKETS = {role: f"[{role.upper()}]" for role in ("pad", "cls", "sep", "unk", "mask")}
ANGLES = {"pad": "<pad>", "cls": "<s>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


@pytest.mark.parametrize(("source", "change", "settings", "lacks", "roles"), [
    ("roberta", _without("<mask>"), {}, {"mask"}, ANGLES),
    ("roberta", _as_gpt2, {}, {*BRACKETS}, BRACKETS),
    ("roberta", _as_gpt2, dict.fromkeys(("bos", "eos", "unk", "pad"), "<|endoftext|>"),
     {*BRACKETS} - {"pad"}, BRACKETS | {"pad": "<|endoftext|>"}),
    # --add_mask said that one token is both pad and sep, and gave itself as the remedy.
    *(("llama", _without("<pad>", "<mask>"), {"bos": "<s>", "eos": "</s>", "pad": pad},
       {"pad", "mask"}, ANGLES) for pad in ("</s>", "<unk>"))])
def test_missing_special_tokens_are_added_behind_the_others(tmp_path, source, change, settings,
                                                            lacks, roles):
    values = json.loads((directory_of(source) / "tokenizer.json").read_text())
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {f"{role}_token": name for role, name in settings.items()}))
    with pytest.raises(UserError, match=r"tokenizer.json: .*--add_mask"):
        Tokenizer(tmp_path)
    tokenizer, names = add_special_tokens(tmp_path, tmp_path / "out")
    assert tokenizer.special_names == roles and sorted(names) == sorted(map(roles.get, lacks))
    assert tokenizer.mask_id == tokenizer.size - 1
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.mask_token_id == tokenizer.mask_id and len(theirs) == tokenizer.size
    wanted = theirs([*RAW], add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_batch(RAW) == wanted


@pytest.fixture(scope="module", params=[*MAKERS, *SENTENCEPIECE])
def corpus(request, lines):
    tokenizer = Tokenizer(directory_of(request.param))
    out = lines.parent / f"corpus-{request.param}"
    manifest, = tokenize(lines, out, read=READ, tokenizer=tokenizer).values()
    pack_corpus(out, tokenizer, 48)
    return tokenizer, out, manifest


def test_shards_hold_the_ids_of_the_text_as_it_stands(corpus):
    tokenizer, out, manifest = corpus
    tokens = np.load(out / "tokens" / f"{manifest.shards[0].name}.npy")
    assert tokens.tolist() == [number for raw in RAW * 3 for number in tokenizer.encode(raw)]
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
    framed = {raw: [tokenizer.cls_id, *tokenizer.encode(raw), tokenizer.sep_id] for raw in ODD}
    for raw, wanted in framed.items():
        assert theirs(raw)["input_ids"] == wanted, raw
    assert theirs(*SENTENCES[:2])["input_ids"] == framed[SENTENCES[0]] + framed[SENTENCES[1]][1:]
    assert len(theirs) == tokenizer.size
    for role, number in tokenizer.special_ids.items():
        assert getattr(theirs, f"{role}_token_id") == number
    for masked in ("The {} fox.", "The quick {}, again {} again.", "{}: it"):  # in a pipeline
        masked = masked.replace("{}", tokenizer.mask_token)
        if tokenizer.path.name in ("albert", "v3"):
            assert theirs(masked)["input_ids"] == encode_with_masks(tokenizer, masked)


@pytest.mark.parametrize("name", ["roberta", "roberta_prefix", "bert", "unigram", "llama",
                                  *SENTENCEPIECE])
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
