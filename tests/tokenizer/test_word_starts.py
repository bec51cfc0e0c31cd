"""Word starts by id against word boundaries from the text, in many languages; masks hide words."""

import numpy as np
import pytest
from tokenizer_cases import MAKERS, directory_of
from word_boundaries import compare_words

from deberta_ds.config.objective import MaskConfig
from deberta_ds.data.masking import LONGEST_WORD, mask_row
from deberta_ds.tokenizer import Tokenizer

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


@pytest.mark.parametrize("name", [*MAKERS, "sentencepiece"])
def test_words_begin_where_the_text_says(name):
    tokenizer = Tokenizer(directory_of(name))
    assert len(LANGUAGES) >= 29
    wrong = {}
    for language, text in LANGUAGES.items():
        counts = compare_words(tokenizer, text)
        assert counts["words"]
        if counts["missed"] or counts["split"] or counts["extra"]:
            wrong[language] = counts
    assert not wrong


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
