"""Text without spaces between words, where rules made for others would lose or miss some of it."""

import random

import pytest
from data_helpers import documents_of
from transformers import AutoTokenizer

from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.quality import find_personal
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.train_tokenizer import sample_texts, train_tokenizer

SYLLABLES = "กา ขี้ คำ งาน จะ ดี ที่ ไม่ มา น้ำ ผู้ เรียน".split()


def test_wordpiece_knows_every_stretch_of_letters(tmp_path):
    """A word of more than 100 characters is unknown to WordPiece, and here a line is one word."""
    generator, read = random.Random(0), ReadOptions(documents="line")
    lines = ["".join(generator.choices(SYLLABLES, k=generator.randint(5, 120))) + " abc"
             for _ in range(200)]
    lines += ["ที่" * 120, "a" * 150]  # 40 letters with their marks are more than 100 characters
    (tmp_path / "a.txt").write_text("\n".join(lines))
    wanted = TokenizerRecipe(kind="wordpiece", vocab_size=120, character_coverage=1.0)
    ours = train_tokenizer(plan_units([str(tmp_path / "a.txt")], read), tmp_path / "out", wanted,
                           read=read)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert max(map(len, lines)) > 300
    for line in lines:
        ids = ours.encode(line)
        assert ours.unk_id not in ids and ours.decode(ids).replace(" ", "") == line.replace(" ", "")
        assert theirs.encode(line, add_special_tokens=False) == ids


@pytest.mark.parametrize(("text", "kind"), [
    ("連絡はfoo@corp.jpまで。", "email"), ("電話は+81 3 4111 2222へ", "phone"),
    ("サーバ93.184.216.34です", "ip"),
    ("番号4111 1111 1111 1111です", "card"), ("口座DE89 3704 0044 0532 0130 00です", "iban"),
    ("อีเมลfoo@corp.co.thครับ", "email")])
def test_personal_data_between_letters_is_masked(text, kind):
    masked, found = find_personal(text, (kind,))
    assert found == {kind: 1} and masked[0] == text[0] and masked[-1] == text[-1]


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
