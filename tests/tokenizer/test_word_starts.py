"""Words of a text: by its letters, by a function of one's own, in many scripts; masked whole."""

import json
import random
import runpy
import unicodedata
from collections import Counter

import numpy as np
import pytest
from data_helpers import documents_of, run_main
from tokenizer_cases import MAKERS, directory_of, trained
from transformers import AutoTokenizer

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.stats import corpus_stats
from deberta_ds.corpus.train_tokenizer import sample_texts
from deberta_ds.data.corpus import Corpus, map_array
from deberta_ds.data.masking import IGNORE, LONGEST_WORD, mask_row, word_spans
from deberta_ds.data.rows import RowDataset
from deberta_ds.data.shards import read_manifest
from deberta_ds.tokenizer import UNSPACED_SCRIPTS, Tokenizer

# Written for this test: the same sentence or so, with punctuation, digits and a foreign word.
LANGUAGES = {
    "ar": "القطة الصغيرة نامت، ثم استيقظت في الساعة 7 (مبكرا) لتشرب الحليب.",
    "be": "Маленькая кошка спала, потым прачнулася а 7 гадзіне — вельмі рана.",
    "bg": "Малката котка спеше, после се събуди в 7 часа (много рано).",
    "bn": "ছোট বিড়ালটি ঘুমাচ্ছিল, তারপর ৭টায় জেগে উঠল।",
    "cs": "Malá kočka spala, pak se v 7 hodin vzbudila (příliš brzy).",
    "de": "Die kleine Katze schlief; um 7 Uhr wachte sie auf – viel zu früh.",
    "el": "Η μικρή γάτα κοιμόταν, μετά ξύπνησε στις 7 (πολύ νωρίς).",
    "en": "The small cat slept, then woke at 7 o'clock (far too early) & didn't mind.",
    "es": "¿Dormía la gata pequeña? ¡Sí!, y a las 7 despertó.",
    "fa": "گربه‌ی کوچک خوابید، سپس ساعت ۷ بیدار شد.",
    "fr": "La petite chatte dormait ; à 7 h, l'été, elle s'éveilla « trop tôt ».",
    "ha": "Karamar ƙyanwa ta yi barci, sai ta farka da ƙarfe 7.",
    "he": "החתולה הקטנה ישנה, ואז התעוררה בשעה 7 (מוקדם מדי).",
    "hi": "छोटी बिल्ली सो रही थी, फिर 7 बजे जाग गई।",
    "hu": "A kis macska aludt, majd 7 órakor felébredt (túl korán).",
    "id": "Kucing kecil itu tidur, lalu bangun pukul 7 (terlalu pagi).",
    "it": "La gattina dormiva; alle 7 si svegliò, perché c'era il latte.",
    "ja": "小さな猫は眠り、7時に目を覚ました。カタカナのコーヒーも飲んだ!",
    "ka": "პატარა კატას ეძინა, შემდეგ 7 საათზე გაიღვიძა.",
    "km": "ឆ្មាតូចកំពុងគេង ហើយភ្ញាក់នៅម៉ោង ៧។",
    "ko": "작은 고양이는 자다가 7시에 깼다 (너무 일찍).",
    "my": "ကြောင်ငယ် အိပ်ပျော်နေပြီး ၇ နာရီမှာ နိုးလာတယ်။",
    "nl": "De kleine kat sliep, en werd om 7 uur wakker - véél te vroeg.",
    "pl": "Mały kot spał, potem obudził się o 7 (zbyt wcześnie); żółć.",
    "sw": "Paka mdogo alilala, kisha akaamka saa 7 (mapema mno).",
    "ta": "சிறிய பூனை தூங்கியது, பின்னர் 7 மணிக்கு விழித்தது.",
    "th": "แมวตัวเล็กนอนหลับ แล้วตื่นตอน 7 โมง",
    "tr": "Küçük kedi uyudu, sonra saat 7'de uyandı (çok erken).",
    "vi": "Con mèo nhỏ ngủ, rồi thức dậy lúc 7 giờ (quá sớm).",
    "zh": "小猫睡着了,然后在7点醒来(太早了)。",
    "emoji": "cat 😀😺 sleeps 👩‍👩‍👧 until 7️⃣ → wakes ©®™ 𝒳",
}


# Where words begin by the text alone: after white space, at punctuation or a symbol (not "_"), and
# at each character of a script written without spaces. WordPiece also begins one after punctuation.
def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def _is_unspaced(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in UNSPACED_SCRIPTS)


def begins_in_text(text: str, kind: str) -> tuple[set[int], set[int]]:
    """Return (characters at which a word must begin, characters at which one may)."""
    must, may = set(), set()
    for place, character in enumerate(text):
        before = text[place - 1] if place else " "
        if character.isspace():
            continue
        if before.isspace():
            must.add(place)
        after_mark = kind == "wordpiece" and (_is_mark(before) or _is_unspaced(before))
        if before.isspace() or _is_mark(character) or _is_unspaced(character) or after_mark:
            may.add(place)
    return must, may


def compare_words(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """Return counts: words missed, those too many, characters split.

    A joiner or a mark spelled in bytes is not too many: an id cannot tell it from a symbol that
    begins with the same bytes.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    ids, spans = np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2)
    special = tokenizer.is_special()
    blank = np.array([not piece.strip() for piece in tokenizer.readable(ids)], dtype=bool)
    pieces_at = Counter(int(low) for low, high in spans if high == low + 1)
    in_bytes = {place for place, count in pieces_at.items() if count > 1}
    starts, lengths = word_spans(tokenizer.word_starts()[ids], special[ids])
    unknown = {place for low, high in spans[special[ids]] for place in range(low, high)}
    found, split, last = set(), 0, 0
    for start, length in zip(starts, lengths, strict=True):
        inside = np.arange(start, start + length)[~blank[start : start + length]]
        if not len(inside):
            continue
        low, high = spans[inside[0], 0], spans[inside[-1], 1]
        split += int(low < last)
        found.add(int(low))
        last = int(high)
    must, may = begins_in_text(text, tokenizer.kind)
    spelled = {place for place in found - may if place in in_bytes
               and unicodedata.category(text[place]) in ("Cf", "Mn", "Mc", "Me")}
    after_unknown = {place for place in found if place - 1 in unknown}
    assert must
    return {"missed": len(must - found - unknown), "split": split,
            "extra": len(found - may - after_unknown - spelled)}


@pytest.mark.parametrize("name", [*MAKERS, "albert", "v3", "t5", "llama_spm", "sentencepiece"])
def test_words_begin_where_the_text_says(name):
    tokenizer = Tokenizer(directory_of(name))
    counts = {language: compare_words(tokenizer, text) for language, text in LANGUAGES.items()}
    assert not {language: found for language, found in counts.items() if any(found.values())}


@pytest.mark.parametrize("name", MAKERS)
def test_a_masked_word_leaves_no_byte_of_itself_visible(name):
    """Words of up to 16 tokens are hidden whole; of longer ones each character is."""
    tokenizer = Tokenizer(directory_of(name))
    starts, begins, special = (tokenizer.word_starts(), tokenizer.character_starts(),
                               tokenizer.is_special())
    for seed, text in enumerate([*LANGUAGES.values(), "एकशब्दजोबहुतहीलंबाहै" * 3]):
        ids = np.array([tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id])
        labels = mask_row(ids, starts, begins, special, MaskConfig(rate=0.3), tokenizer.mask_id,
                          np.random.default_rng(seed), pad_id=tokenizer.pad_id)[1]
        hidden = labels >= 0
        assert hidden.any() or special[ids].all()
        for position in range(1, len(ids)):
            inside = not begins[ids[position]] and not special[ids[position - 1]]
            if inside:
                assert hidden[position] == hidden[position - 1], (text, position)
        words = np.split(np.arange(len(ids)), np.flatnonzero(starts[ids])[1:])
        for word in words:
            if len(word) <= min(LONGEST_WORD, hidden.sum()) and not special[ids[word]].any():
                assert hidden[word].all() or not hidden[word].any()


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


SYLLABLES = "กา ขี้ คำ งาน จะ ดี ที่ ไม่ มา น้ำ ผู้ เรียน".split()


def test_wordpiece_knows_every_stretch_of_letters(tmp_path):
    """A word of more than 100 characters is unknown to WordPiece, and here a line is one word."""
    generator = random.Random(0)
    lines = ["".join(generator.choices(SYLLABLES, k=generator.randint(5, 120))) + " abc"
             for _ in range(200)]
    lines += ["ที่" * 120, "a" * 150]  # 40 letters with their marks are more than 100 characters
    ours = trained(tmp_path, lines, kind="wordpiece", vocab_size=120, character_coverage=1.0)
    theirs = AutoTokenizer.from_pretrained(ours.path)
    assert max(map(len, lines)) > 300
    for line in lines:
        ids = ours.encode(line)
        assert ours.unk_id not in ids and ours.decode(ids).replace(" ", "") == line.replace(" ", "")
        assert theirs.encode(line, add_special_tokens=False) == ids


@pytest.mark.parametrize("pattern", ["第[一二三]章", r"第\w章", "(?i)第.章"])
def test_a_pattern_of_other_letters_splits_documents(tmp_path, pattern):
    (tmp_path / "book.txt").write_text("第一章 春\nあ\n第二章 夏\nい\n第三章 秋\nう\n")
    found = documents_of(tmp_path / "book.txt", documents=f"match:{pattern}")
    assert [document.text[:3] for document in found] == ["第一章", "第二章", "第三章"]


def test_a_sample_takes_its_share_of_files_that_are_one_document(tmp_path):
    """One line of a whole book took all of the sample, and the next file nothing."""
    for name, letter in (("a", "あ"), ("b", "ก")):
        (tmp_path / f"{name}.txt").write_text(letter * 300_000)
    read = ReadOptions()
    units = plan_units([str(tmp_path)], read, unit_bytes=1)
    sample = "".join(sample_texts(units, 90_000, read))
    assert len(units) == 2 and abs(sample.count("あ") - sample.count("ก")) <= 1_000
    assert 90_000 <= len(sample.encode()) < 100_000
