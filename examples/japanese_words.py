"""Words of Japanese text, for whole-word masks: a stem with its endings, a run of katakana.

    words = "examples/japanese_words.py:words"        # of a corpus in a recipe
    tokenize_corpus.py ... --words examples/japanese_words.py:words

Called with the text of a document, or of a part of a long one, as the tokenizer gets it. Returns
its words in order; joined they are the text, white space included. A segmenter takes its place in
a line: jieba.lcut(text) for Chinese, pythainlp.word_tokenize(text) for Thai, and for Japanese
[word.white_space + word.surface for word in fugashi.Tagger()(text)].
"""

import re

# Kanji and the hiragana behind them; katakana; other hiragana (particles); Latin and digits;
# anything else (punctuation, white space) a character at a time.
_WORD = re.compile(r"[\u3400-\u9fff々]+[\u3041-\u3096]{0,3}|[\u30a1-\u30ffー]+|[\u3041-\u3096]+"
                   r"|[^\W\u3041-\u30ff\u3400-\u9fff]+|[\s\S]")


def words(text: str) -> list[str]:
    return _WORD.findall(text)
