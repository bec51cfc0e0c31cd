"""Tokenizers of every kind: ids as AutoTokenizer's, special tokens by role, words, refusal."""

import itertools
import json
import pickle
import random
import shutil
import unicodedata

import numpy as np
import pytest
import transformers
from data_helpers import SENTENCES
from tokenizer_cases import MAKERS, ODD, SENTENCEPIECE, directory_of, trained

from deberta_ds.base.errors import UserError
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.publish import add_special_tokens, write_tokenizer_json
from deberta_ds.tokenizer.words import byte_of
from tools.fuzz import mutate

TEXTS = [*ODD, "\ufeffx\x00", "x\u2581y", "        indented = [1]"]


def _changed(tmp_path, name: str, change) -> Tokenizer:
    """Return a tokenizer whose tokenizer.json has been changed, in the directory "changed"."""
    directory = tmp_path / "changed"
    shutil.copytree(directory_of(name), directory)
    values = json.loads((directory / "tokenizer.json").read_text())
    change(values)
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return Tokenizer(directory)


@pytest.mark.parametrize("name", MAKERS)
def test_ids_are_those_of_auto_tokenizer(name):
    ours = Tokenizer(directory_of(name))
    theirs = transformers.AutoTokenizer.from_pretrained(directory_of(name))
    wanted = theirs(TEXTS, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(TEXTS) == wanted
    assert [ours.encode(text) for text in TEXTS] == wanted
    assert [ours.encode_array(text).tolist() for text in TEXTS] == wanted
    for role, number in ours.special_ids.items():
        assert getattr(theirs, f"{role}_token_id") == number
    assert ours.size == len(theirs)


@pytest.mark.parametrize("name", ["Roberta", "GPT2", "Qwen2", "Deberta", "Bert", "Funnel", "T5",
                                  "XLMRoberta", "Albert", "DebertaV2", "Llama", "Gemma"])
def test_ids_of_tokenizers_that_transformers_has_trained_and_saved(name, tmp_path):
    """As each class of transformers 5 puts it together; what lacks a role is given it."""
    theirs = getattr(transformers, f"{name}Tokenizer")().train_new_from_iterator(
        SENTENCES * 4, 600, show_progress=False)
    theirs.save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    try:
        ours = Tokenizer(tmp_path / "saved")
    except UserError as error:
        assert "no token for" in str(error)
        ours, _ = add_special_tokens(tmp_path / "saved", tmp_path / "whole")
        assert len(set(ours.special_ids.values())) == 5
    wanted = theirs(TEXTS, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(TEXTS) == wanted


@pytest.mark.parametrize("name", [*MAKERS, *SENTENCEPIECE, "sentencepiece"])
def test_names_of_special_tokens_in_text_are_text(name):
    tokenizer = Tokenizer(directory_of(name))
    special = tokenizer.is_special()
    special[tokenizer.unk_id] = False
    assert not special[tokenizer.encode("a [MASK] b<mask>, <s>c</s> [CLS]")].any()
    part = tokenizer.is_part()
    broken = ["\\x" in text or byte_of(text) is not None
              for text in tokenizer.readable(range(tokenizer.size))]
    assert part.tolist() == broken and not part[tokenizer.encode("the old house")].any()


@pytest.mark.parametrize("name", [*MAKERS, *SENTENCEPIECE, "sentencepiece"])
def test_offsets_decoding_and_another_process(name):
    tokenizer = pickle.loads(pickle.dumps(Tokenizer(directory_of(name))))
    for text in (*SENTENCES, "  The\tquick\nfox \U0001f600x  ", "naïve 𝒳y"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text) and len(ids) == len(offsets)
        assert all(0 <= start <= end <= len(text) for start, end in offsets)
        covered = {place for start, end in offsets for place in range(start, end)}
        assert all(place in covered for place, c in enumerate(text) if not c.isspace())
        assert all(not text[start].isspace() or end == start + 1 for start, end in offsets
                   if start < end)
    ids = [tokenizer.cls_id, *tokenizer.encode("The fox"), tokenizer.sep_id]
    first, last = tokenizer.subwords(ids[:1] + ids[-1:])
    assert tokenizer.decode(ids).lower().split()[:: len(ids)] == [first.lower()]
    assert tokenizer.decode(ids).endswith(last)


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe", "wordpiece"])
def test_spans_reach_over_marks_that_compose(kind, tmp_path):
    """An answer ended inside of a character, and so no answer of decomposed text was right."""
    lines = [*SENTENCES, "새로운 사랑 é", "사람 사랑 서울"] * 20  # first bytes join with the space
    made = trained(tmp_path, lines, kind=kind, vocab_size=400)
    words = ["Kraków", "서울", "Việt", "사랑", "사람", "fox"]
    text = unicodedata.normalize("NFD", " ".join(words))
    ids, offsets = made.encode_with_offsets(text)
    assert ids == made.encode(text) == made.encode(" ".join(words))
    covered = {place for start, end in offsets for place in range(start, end)}
    assert covered >= {place for place, c in enumerate(text) if c != " "}
    for _, end in offsets:
        rest = text[end : end + 1]
        assert not unicodedata.combining(rest or " ") and not "\u1160" <= rest <= "\u11ff"


@pytest.mark.parametrize("name, text", [
    ("bert", "राम के घर, सु"), ("bert", "كِتَابٌ هُنَا"), ("bert", "naïve e\u0301 q\u0303"),
    ("unigram", "ｶﾞｷﾞ ﾊﾟ x")])
def test_spans_reach_over_marks_that_are_stripped_or_composed(name, text):
    _, offsets = Tokenizer(directory_of(name)).encode_with_offsets(text)
    covered = {place for start, end in offsets for place in range(start, end)}
    assert covered >= {place for place, c in enumerate(text) if c != " "}
    assert all(before <= after for before, after in itertools.pairwise(offsets))


def test_one_tokenizer_has_one_checksum_however_its_files_spell_it(tmp_path):
    directory = directory_of("modernbert")
    wanted = Tokenizer(directory).sha256
    assert Tokenizer(directory / "tokenizer.json").sha256 == wanted
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(tmp_path / "again")
    assert Tokenizer(tmp_path / "again").sha256 == wanted
    assert _changed(tmp_path, "modernbert", lambda v: v.update(normalizer=None)).sha256 != wanted


def test_the_library_still_has_the_cache_of_words_that_is_made_larger():
    """A tenth of the tokenize stage's time; its name begins with an underscore."""
    assert hasattr(Tokenizer(directory_of("roberta"))._engine._fast.model, "_resize_cache")


def test_all_bytes_need_no_unknown_token_in_the_model(tmp_path):
    """A model may name one that is an added token, or is not there: it is never asked for."""
    ours = _changed(tmp_path, "qwen", lambda v: v["model"].update(unk_token="<|late|>"))
    theirs = transformers.AutoTokenizer.from_pretrained(ours.path)
    wanted = theirs(TEXTS, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(TEXTS) == wanted


def test_vocabulary_files_by_their_own_names():
    directory = directory_of("deberta_v1")
    wanted = Tokenizer(directory)
    for name in ("vocab.json", "merges.txt"):
        assert Tokenizer(directory / name).sha256 == wanted.sha256
    assert wanted.special_ids == {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4}


def test_no_byte_starts_a_word_inside_a_character():
    tokenizer = Tokenizer(directory_of("roberta"))
    starts, begins = tokenizer.word_starts(), tokenizer.character_starts()
    assert not starts[~begins].any() and (~begins).sum() >= 64
    ids = np.array(tokenizer.encode(" naïve हि 안 ไ 漢"))
    pieces = tokenizer.readable(ids)
    assert len(pieces) > len(" naïve हि 안 ไ 漢".split())
    words = np.split(ids, np.flatnonzero(starts[ids])[1:])
    found = [tokenizer.decode(word).strip() for word in words]
    assert list(filter(None, found)) == "naïve हि 안 ไ 漢".split()


@pytest.mark.parametrize(("name", "change", "message"), [
    ("bert", lambda v: v.pop("model"), "no model with a vocabulary"),
    ("bert", lambda v: v["model"].update(vocab=["a"]), "WordPiece vocabulary is damaged"),
    ("bert", lambda v: v["model"]["vocab"].update(x=1 << 30), "at most 16,777,216"),
    ("bert", lambda v: v["model"]["vocab"].pop("[MASK]") and v.update(added_tokens=[]),
     r"names '\[MASK\]' as its mask token.*--add_mask"),
    ("bert", lambda v: v["model"].update(continuing_subword_prefix=""),
     "a WordPiece model without a mark of word starts"),
    ("roberta", lambda v: v.update(pre_tokenizer=None), "without a mark of word starts"),
    ("roberta", lambda v: v["model"]["merges"].append(["q~", "~q"]), "cannot load it"),
    ("modernbert", lambda v: v["added_tokens"][-1].update(id=9000), r"'\[unused0\]' has id 9000"),
    ("unigram", lambda v: v["model"]["vocab"].insert(0, 3), "Unigram vocabulary is damaged"),
    ("bert", lambda v: v.update(normalizer={"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 2}),
     "makes 900 characters of one by Replace"),
    *[("bert", lambda v, pattern=pattern: v.update(normalizer={"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": pattern, "content": "a"}] * 9}),
       "makes 512 characters of one by Replace")
      for pattern in ({"String": ""}, {"Regex": "(?=a)"}, {"Regex": r"\p{L}*"})],
    *[("bert", lambda v, table=table: v.update(normalizer={
        "type": "Precompiled", "precompiled_charsmap": table}), "cannot load it .*; make it again")
      for table in ("!", "BAAAAAAAAAA=")],  # the second is read, and panics at a text
])
def test_what_is_missing_or_damaged_is_one_error(tmp_path, capfd, name, change, message):
    with pytest.raises(UserError, match=message) as error:
        _changed(tmp_path, name, change)
    assert str(tmp_path) in str(error.value) and capfd.readouterr() == ("", "")


def test_replacements_that_cannot_grow_a_text_are_read(tmp_path):
    _changed(tmp_path, "bert", lambda v: v.update(normalizer={"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "[\u2018\u2019] ?"}, "content": "'"}] * 9}))


def test_files_that_are_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="no tokenizer in this directory"):
        Tokenizer(tmp_path)
    (tmp_path / "bpe_encoder.bin").write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path, tmp_path / "bpe_encoder.bin"):
        with pytest.raises(UserError, match=r"is a pickle.*vocab.json and merges.txt"):
            Tokenizer(path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match="merges.txt: is missing"):
        Tokenizer(tmp_path / "vocab.json")
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer.json: not valid JSON"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("deberta_v1", {"tokenizer_class": "HerbertTokenizerFast"}, "belongs to a HerbertTokenizer"),
    ("deberta_v1", {"tokenizer_class": "Qwen2Tokenizer"}, "rules do not stand in it"),
    ("bert_vocab_txt", {"tokenizer_class": "BertJapaneseTokenizer"}, "vocab.txt: belongs to a"),
    ("bert_vocab_txt", {"word_tokenizer_type": "mecab"}, "a tokenizer with mecab by its")])
def test_vocabulary_files_of_classes_with_rules_of_their_own_are_refused(tmp_path, name, settings,
                                                                         message):
    """They were read as GPT-2's or BERT's, and gave other ids in silence."""
    shutil.copytree(directory_of(name), tmp_path / "t")
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path / "t")
    (tmp_path / "t/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizer"}')
    assert Tokenizer(tmp_path / "t").pieces([7]) == Tokenizer(directory_of(name)).pieces([7])


@pytest.mark.parametrize(("file", "change", "message"), [
    ("vocab.json", lambda text: json.dumps(json.loads(text) | {
        f"word{n}</w>": 600 + n for n in range(100)}), r"marks the ends of words \('</w>'\)"),
    ("vocab.json", lambda text: json.dumps(json.loads(text) | {"x": 7}), "vocabulary is damaged"),
    # Other ids in silence: every rest of the list is a list of merges.
    ("merges.txt", lambda text: "\n".join(text.split("\n")[:len(text.split("\n")) * 3 // 4]),
     r"makes \d+ of the 600 .* by no merge"),
    ("merges.txt", lambda text: text + "q~ ~q\n", "'q~ ~q' is no merge of subwords of vocab.json")])
def test_damaged_vocabulary_files_are_refused(tmp_path, file, change, message):
    shutil.copytree(directory_of("deberta_v1"), tmp_path / "t")
    path = tmp_path / "t" / file
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(UserError, match=f"{file}: .*{message}"):
        Tokenizer(tmp_path / "t")


@pytest.mark.parametrize("name", ["roberta", "bert", "unigram", "llama"])
def test_a_changed_tokenizer_json_works_or_is_one_error(name, tmp_path):
    generator = random.Random(name)
    shutil.copytree(directory_of(name), tmp_path / "t")
    path = tmp_path / "t/tokenizer.json"
    whole = json.loads(path.read_text())
    for _ in range(60):
        path.write_text(json.dumps(mutate.tree(generator, whole)[0]))
        try:
            tokenizer = Tokenizer(tmp_path / "t")
            tokenizer.word_starts()
            tokenizer.encode("The fox, 日本 \n[MASK]")
        except UserError as error:
            assert str(tmp_path) in str(error)


WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "▁a": 5, "▁b": 6}


@pytest.mark.parametrize("model", [
    {"type": "WordLevel", "unk_token": "<unk>"},
    {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
     "max_input_chars_per_word": 100},
    {"type": "BPE", "unk_token": "<unk>", "merges": [], "ignore_merges": True},
], ids=lambda model: model["type"])
def test_names_of_special_tokens_that_are_whole_words_of_a_text_are_text(tmp_path, model):
    """They gave the ids of [MASK] and [SEP], where nothing parts their characters before."""
    vocabulary, before = WORDS, {"type": "Metaspace", "replacement": "▁", "split": True,
                                 "prepend_scheme": "never"}
    if model["type"] != "BPE":
        vocabulary = {name.replace("▁", ""): number for name, number in WORDS.items()}
        before = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": before,
        "decoder": None, "post_processor": None, "model": model | {"vocab": vocabulary}}))
    tokenizer = Tokenizer(tmp_path)
    for text in ("a <mask> </s> <s> <pad> b", "<mask> a", "</s> b", "<s>", "<pad>"):
        assert not {0, 1, 2, 4} & set(tokenizer.encode(text))
    assert tokenizer.encode(" b")[-1] == 6


@pytest.mark.parametrize("name", ["roberta", "roberta_prefix"])
def test_a_space_before_the_text_is_named_where_transformers_4_looks(tmp_path, name):
    """It takes it from there alone, and gave nearly every text other ids."""
    tokenizer = Tokenizer(directory_of(name))
    write_tokenizer_json(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings.get("add_prefix_space", False) == (name == "roberta_prefix")
    for text in ("word", " word", "a b"):
        assert Tokenizer(tmp_path).encode(text) == tokenizer.encode(text)
