"""The text rules, and bounded parts for long documents."""

import pytest
from data_helpers import SENTENCES, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from deberta_ds.tokenizer import text as rules
from deberta_ds.tokenizer.text import (
    BadTextError,
    encodable_parts,
    letter_share,
    normalise,
    normalise_all,
    normalise_and_count,
)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [("plain text", "plain text"), ("  two  spaces\nand\tlines\r\n ", "two spaces and lines"),
     ("no\u00a0break\u3000wide\u2028line", "no break wide line"),
     ("\ufeffmark \x00nul\x07bell", "mark nulbell"), ("soft\u00adhy\u200bphen", "softhyphen"),
     ("e\u0301 A\u030a", "\u00e9 \u00c5"),
     ("\u0645\u06cc\u200c\u062e\u0648", "\u0645\u06cc\u200c\u062e\u0648"),
     ("under\u2581score", "under_score"), ("", ""), (" \n\x00 ", "")])
def test_rules(raw, clean):
    assert normalise(raw) == clean


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_idempotent_and_round_trip(raw):
    try:
        clean = normalise(raw)
    except BadTextError:
        assert any("\ud800" <= c <= "\udfff" for c in raw)
        return
    assert normalise(clean) == clean
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(clean)) == clean


@settings(max_examples=300, deadline=None)
@given(st.text("a \n\r\t\x00\u00e4\u0301\u3000\u4e00", max_size=60))
def test_long_texts_follow_the_same_rules(raw):
    expected = normalise_and_count(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_LONG", 1)
        assert normalise_and_count(raw) == expected
        patch.setattr(rules, "_FRONT", 2)
        assert rules.has_text(raw) == bool(expected[0])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("a .\n\r\x0b\x00\x7f\u00e4\u0301\u1112\u1161\u200b\u3000\u2581\U0001f600",
                        max_size=20), max_size=8), st.booleans())
def test_texts_at_once_are_what_each_is_alone(raw, is_long):
    alone = [normalise_and_count(text) for text in raw]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_LONG", 1 if is_long else 1 << 13)
        texts, removed = normalise_all(raw)
    assert texts == [text for text, _ in alone] and removed == sum(count for _, count in alone)


def test_removed_characters_are_counted():
    assert normalise_and_count("a\x00b\u200b\x07 \u00e4\ufeff\r\n") == ("ab \u00e4", 4)
    assert normalise_and_count("nothing\tto remove") == ("nothing to remove", 0)


def test_lone_surrogates_are_bad():
    with pytest.raises(BadTextError):
        normalise("x\ud800y")
    with pytest.raises(BadTextError):
        normalise_all(["good", "x\ud800y", "\u00e4"])
    with pytest.raises(BadTextError):
        rules.has_text("x" * 100 + "\ud800")
    for encode in (tiny_tokenizer().encode, tiny_tokenizer().encode_with_offsets):
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
            encode("x\udcff")  # an argument that is no UTF-8: SentencePiece cannot "cast" it


def test_parts_encode_as_the_whole(monkeypatch):
    monkeypatch.setattr(rules, "ENCODE_CHARACTERS", 100)
    tokenizer, text = tiny_tokenizer(), " ".join(SENTENCES[:6])
    parts = list(encodable_parts(text))
    assert len(parts) > 3 and [starts for _, starts in parts] == [True] + [False] * (len(parts) - 1)
    pieces = [token for part, _ in parts for token in tokenizer.encode(part)]
    assert pieces == tokenizer.encode(text)


def test_an_endless_word_starts_new_documents(monkeypatch):
    monkeypatch.setattr(rules, "ENCODE_CHARACTERS", 10)
    parts = list(encodable_parts("x" * 25 + " yy"))
    assert "".join(part for part, _ in parts) == "x" * 25 + " yy"
    assert [starts for _, starts in parts] == [True, True, True]


def test_letter_share():
    assert letter_share("ab 12") == 0.5 and letter_share("") == 0.0
