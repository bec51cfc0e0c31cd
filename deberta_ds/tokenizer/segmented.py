"""A tokenizer that is told where words start by a function of the user's own, FILE.py:NAME.

The function gets a text and returns its words in order, white space included: together they are the
text. A token starts a word if one begins at its first character, or between it and the token before
it. So a token that holds the end of a word and the beginning of another joins both.

An id alone cannot say this: where it says the opposite (words.py), id + size stands for it.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.tokenizer.tokenizer import Tokenizer


class SegmentedTokenizer(Tokenizer):
    """A Tokenizer whose `encode`, `encode_array` and `encode_joined` give ids as shards hold them.
    """

    def __init__(self, plain: Tokenizer, words: str, known: str = ""):
        """UserError for a function that cannot be loaded, or is not the one `known` by its hash."""
        super().__init__(plain.path, plain.files)
        self._function, self._name = words_function(words), words
        self.plain = plain
        file, name = user_code.split(words)
        self._starts, self.stored_size = self.word_starts(), 2 * self.size
        self.words = f"{Path(file).name}:{name} sha256 {user_code.digest('words', words)}"
        if self.words != (known or self.words):
            raise UserError(f"{file}: changed while this command ran; run it again")

    def __reduce__(self) -> tuple:
        return _unpickled, (self.plain, self._name, self.words)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        ids, offsets = self.encode_with_offsets(text)
        begins = np.zeros(len(text) + 2, dtype=np.int64)  # before each character: words begun
        begins[[1 + place for place in self._places(text)]] = 1
        begun = begins.cumsum()
        first, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        starts = begun[first + 1] > begun[np.concatenate([[0], end[:-1]])] if ids else first
        return np.where(starts == self._starts[ids], 0, self.size).astype(np.int32) + np.array(
            ids, dtype=np.int32)

    def encode_joined(self, texts: list[str]) -> tuple[np.ndarray, list[int]]:
        found = [self.encode_array(text) for text in texts]
        return np.concatenate([np.zeros(0, np.int32), *found]), list(map(len, found))

    def _places(self, text: str) -> list[int]:
        """Return where the words of a text begin."""
        words = user_code.call(self._function, self._name, text)
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            kind = type(words).__name__
            raise user_code.OwnCodeError(f"{self._name} returned {kind}; it must return a list of "
                                        "the words of the text, with the white space between them")
        joined = "".join(words)
        if joined != text:
            place = next((at for at, pair in enumerate(zip(joined, text, strict=False))
                          if pair[0] != pair[1]), min(len(joined), len(text)))
            raise user_code.OwnCodeError(
                f"{self._name} changed the text at {text[place:place + 20]!r}; its words must give "
                "the text when they are joined, white space and all")
        return list(accumulate(map(len, words), initial=0))[:-1]


def words_function(words: str) -> Callable[[str], list[str]]:
    """Return the function that FILE.py:NAME names; UserError if it cannot be loaded."""
    if not user_code.is_own(words) or not user_code.split(words)[1]:
        raise UserError(f"words: {words!r} is not FILE.py:NAME, such as words.py:words")
    return user_code.load("words", words, ("text",))


@lru_cache(4)  # of a process
def _unpickled(plain: Tokenizer, words: str, known: str) -> SegmentedTokenizer:
    return SegmentedTokenizer(plain, words, known)
