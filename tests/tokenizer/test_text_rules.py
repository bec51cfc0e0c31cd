"""The text rules inside the tokenizer: what is pretrained on is what everybody encodes later."""

import random
import unicodedata

import pytest
import tokenizers
from data_helpers import SENTENCES, random_documents

from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.evaluate.fill_mask import encode_with_masks
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json
from deberta_ds.tokenizer.text import normalise

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
    directory = tmp_path_factory.mktemp("rules")
    (directory / "text.txt").write_text("\n".join(random_documents(60)), encoding="utf-8")
    read = ReadOptions(documents="line")
    return train_tokenizer(plan_units([str(directory / "text.txt")], read),
                           directory / "spm.model", TokenizerRecipe(vocab_size=400), read=read)


@pytest.fixture(scope="module")
def published(tokenizer):
    return tokenizers.Tokenizer.from_str(build_tokenizer_json(tokenizer))


@pytest.mark.parametrize("text", RAW)
def test_raw_text_gets_the_ids_of_normalised_text(tokenizer, published, text):
    """Soft hyphens gave 11 ids downstream where pretraining had 3."""
    assert normalise(text) != text or "joiners" in text
    expected = tokenizer.encode(normalise(text))
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_array(normalise(text)).tolist() == expected
    assert published.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.decode(expected) == normalise(text)


def test_offsets_are_those_of_the_raw_text(tokenizer):
    text = "A soft\u00adhyphen of cafe\u0301s here"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert offsets[0][0] == 0 and offsets[-1][1] == len(text)
    pieces = tokenizer.pieces(ids)
    assert text[slice(*offsets[pieces.index("<0xC3>")])] == "e\u0301"  # one letter as two bytes
    covered = {place for start, end in offsets for place in range(start, end)}
    assert covered >= {place for place, character in enumerate(text) if character.isalpha()}


def test_offsets_of_letters_that_grow_or_shrink(tokenizer):
    text = "x a\u0301\u0327\u0316b \ufb2cy \u00f3\u0323z"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) == tokenizer.encode(normalise(text))
    for letter in "xbyz":
        place = [text[start:end].strip() for start, end in offsets].index(letter)
        assert text[offsets[place][1] - 1] == letter
    covered = {place for start, end in offsets for place in range(start, end)}
    assert covered >= {place for place, c in enumerate(text) if not c.isspace()}


@pytest.mark.parametrize("text", ["The [MASK] fox", "[MASK]ing", "un[MASK]able [MASK], ok [MASK]",
                                  " \u200b[MASK] [MASK] x"])
def test_what_follows_a_mask_has_the_ids_that_it_has_in_a_text(tokenizer, published, text):
    assert published.encode(text).ids == encode_with_masks(tokenizer, text)


def test_normalised_text_is_left_alone(tokenizer, published):
    generator = random.Random(0)
    letters = [chr(code) for code in range(0x20, 0x2E00)
               if unicodedata.category(chr(code))[0] not in "C"]
    for text in [*SENTENCES, *("".join(generator.choices(letters, k=20)) for _ in range(300))]:
        text = normalise(text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert published.encode(text, add_special_tokens=False).ids == ids
