"""The text rules, and bounded parts for long documents."""

import random
import unicodedata

import pytest
import tokenizers
from data_helpers import SENTENCES, random_documents, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import trained

from deberta_ds.evaluate.fill_mask import encode_with_masks
from deberta_ds.tokenizer import text as rules
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json


@pytest.mark.parametrize(("raw", "clean", "removed"), [
    ("plain text\twith tab", "plain text with tab", 0),
    ("  two  spaces\nand\tlines\r\n ", "two spaces and lines", 0),
    ("no\u00a0break\u3000wide\u2028line", "no break wide line", 0),
    ("\ufeffmark \x00nul\x07bell", "mark nulbell", 3), ("soft\u00adhy\u200bphen", "softhyphen", 2),
    ("e\u0301 A\u030a", "\u00e9 \u00c5", 0), ("a\x00b\u200b\x07 \u00e4\ufeff\r\n", "ab \u00e4", 4),
    ("\u0645\u06cc\u200c\u062e\u0648", "\u0645\u06cc\u200c\u062e\u0648", 0),
    ("under\u2581score", "under_score", 0), ("", "", 0), (" \n\x00 ", "", 1)])
def test_rules(raw, clean, removed):
    assert rules.normalize_and_count(raw) == (clean, removed) and rules.normalize(raw) == clean


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_idempotent_and_round_trip(raw):
    try:
        clean = rules.normalize(raw)
    except rules.BadTextError:
        assert any("\ud800" <= c <= "\udfff" for c in raw)
        return
    assert rules.normalize(clean) == clean
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(clean)) == clean


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("a .\n\r\t\x0b\x00\x7f\u00e4\u0301\u1112\u1161\u200b\u3000\u2581\U0001f600",
                        max_size=20), max_size=8), st.booleans())
def test_texts_at_once_and_long_ones_follow_the_same_rules(raw, is_long):
    alone = [rules.normalize_and_count(text) for text in raw]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_LONG", 1 if is_long else 1 << 13)
        patch.setattr(rules, "_FRONT", 2)
        texts, removed = rules.normalize_all(raw)
        assert [rules.has_text(text) for text in raw] == [bool(text) for text, _ in alone]
    assert texts == [text for text, _ in alone] and removed == sum(count for _, count in alone)


def test_lone_surrogates_are_bad():
    for function, raw in ((rules.normalize, "x\ud800y"), (rules.normalize_all, ["good", "x\ud800"]),
                          (rules.has_text, "x" * 100 + "\ud800")):
        with pytest.raises(rules.BadTextError):
            function(raw)
    for encode in (tiny_tokenizer().encode, tiny_tokenizer().encode_with_offsets):
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
            encode("x\udcff")  # an argument that is no UTF-8: SentencePiece cannot "cast" it


def test_parts_encode_as_the_whole(monkeypatch):
    monkeypatch.setattr(rules, "ENCODE_CHARACTERS", 100)
    tokenizer, text = tiny_tokenizer(), " ".join(SENTENCES[:6])
    parts = list(rules.encodable_parts(text))
    assert len(parts) > 3 and [starts for _, starts in parts] == [True] + [False] * (len(parts) - 1)
    pieces = [token for part, _ in parts for token in tokenizer.encode(part)]
    assert pieces == tokenizer.encode(text)


def test_an_endless_word_starts_new_documents(monkeypatch):
    monkeypatch.setattr(rules, "ENCODE_CHARACTERS", 10)
    parts = list(rules.encodable_parts("x" * 25 + " yy"))
    assert "".join(part for part, _ in parts) == "x" * 25 + " yy"
    assert [starts for _, starts in parts] == [True, True, True]


def test_letter_share():
    assert rules.letter_share("ab 12") == 0.5 and rules.letter_share("") == 0.0


RAW = [
    "\u0639\u0632\u0651\u0650\u0632 \u062d\u0651\u064f\u0628 a\u0301\u0323 o\u0302\u0323",  # marks
    "soft\u00adhyphen, zero\u200bwidth space, \ufeffbyte order mark",
    "right\u200fto\u200eleft \u202amarks\u202c and\u2066 isolates\u2069",
    "tab\tand\r\nline ends,\u00a0no-break \u3000 wide  spaces ",
    "the space mark \u2581 is an underscore",
    "cafe\u0301, A\u030a, \u212b, e\u0302\u0301 and \u00ea\u0301 and e\u0323\u0302",
    unicodedata.normalize("NFD", "Übermut, Straße, Việt Nam, Ελληνικά, Й"),
    unicodedata.normalize("NFD", "한국어 텍스트"),
    "\u0958 and \u0915\u093c, \u0e33, \ufb1d",  # composition exclusions
    "joiners stay: \u0915\u094d\u200d\u0937 \u200c",
    "\u00f3\u0323r\u00f2\u0323, \u00e9\u0323 a\u0301\u0327, \u0f40\u0f39\u0f73",  # no characters
    "\ufeff\u200bremoved in front", " \ufeff \u00ad spaces, too",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("rules"), random_documents(60), "spm.model",
                   vocab_size=400)


@pytest.fixture(scope="module")
def published(tokenizer):
    return tokenizers.Tokenizer.from_str(build_tokenizer_json(tokenizer))


@pytest.mark.parametrize("text", RAW)
def test_raw_text_gets_the_ids_of_normalized_text(tokenizer, published, text):
    """Soft hyphens gave 11 ids downstream where pretraining had 3."""
    assert rules.normalize(text) != text or "joiners" in text
    expected = tokenizer.encode(rules.normalize(text))
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_array(rules.normalize(text)).tolist() == expected
    assert tokenizer.encode_batch([text, text]) == [expected, expected]
    assert published.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.decode(expected) == rules.normalize(text)


@pytest.mark.parametrize(("text", "letters"), [
    ("A soft\u00adhyphen of cafe\u0301s here", ["e\u0301"]),  # one letter as two bytes
    ("x a\u0301\u0327\u0316b \ufb2cy \u00f3\u0323z", "xbyz")])  # which grow or shrink
def test_offsets_are_those_of_the_raw_text(tokenizer, text, letters):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) == tokenizer.encode(rules.normalize(text))
    assert offsets[0][0] == 0 and offsets[-1][1] == len(text)
    covered = {place for start, end in offsets for place in range(start, end)}
    assert covered >= {place for place, c in enumerate(text) if c not in " \u00ad"}
    spans = [text[start:end].strip() for start, end in offsets]
    for letter in letters:
        assert text[slice(*offsets[spans.index(letter)])].endswith(letter)


@pytest.mark.parametrize("text", ["The [MASK] fox", "[MASK]ing", "un[MASK]able [MASK], ok [MASK]",
                                  " \u200b[MASK] [MASK] x"])
def test_what_follows_a_mask_has_the_ids_that_it_has_in_a_text(tokenizer, published, text):
    assert published.encode(text).ids == encode_with_masks(tokenizer, text)


def test_normalized_text_is_left_alone(tokenizer, published):
    generator = random.Random(0)
    letters = [chr(code) for code in range(0x20, 0x2E00)
               if unicodedata.category(chr(code))[0] not in "C"]
    for text in [*SENTENCES, *("".join(generator.choices(letters, k=20)) for _ in range(300))]:
        text = rules.normalize(text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert published.encode(text, add_special_tokens=False).ids == ids
