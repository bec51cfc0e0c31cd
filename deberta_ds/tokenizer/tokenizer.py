"""A tokenizer of any kind: ids, special ids, and which ids start a word.

Text is never searched for special strings: the characters "[MASK]" in a document are ordinary text.
"""

from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

from deberta_ds.tokenizer import words
from deberta_ds.tokenizer.fast import FastEngine
from deberta_ds.tokenizer.files import SPM, Files, choose, find_files
from deberta_ds.tokenizer.spm import SentencePieceEngine

_MANY_UNKNOWN = 0.001  # of the tokens
_LEADS = ("a", "0", ".", "中")  # texts that what follows hardly ever merges with


class Tokenizer:
    """A tokenizer from its files.

    Attributes: kind ("sentencepiece", "byte_level", "metaspace", "wordpiece", "words"); files
    {published name: file as it was read}; pad_id, cls_id, sep_id, mask_id, unk_id (None where
    nothing is unknown); special_ids {role: id} of these; size (largest id + 1; a model's vocab_size
    must be at least this); mask_token; sha256, of the SentencePiece model or of all that
    `tokenizers` computes with; normalizes_itself, True if text is given to it as it stands
    (docs/explanation/tokenizers.md); lost, what of a text it skips in silence; stored_size, of the
    ids in shards, and words, the name and hash of a function for them (segmented.py).
    """

    words = ""

    def __init__(self, path: str | Path, known: Files | None = None):
        """Load the tokenizer at `path`, a file or a directory (files.py says which), or the one
        among the `known` files of a directory; UserError if it is missing, broken, or lacks a
        special token.
        """
        self.path = Path(path)
        files = find_files(self.path) if known is None else choose(known, self.path)
        self.files = files
        engine: SentencePieceEngine | FastEngine = (
            SentencePieceEngine(files) if SPM in files else FastEngine(files))
        self._engine = engine
        self.kind, self.sha256 = engine.kind, engine.sha256
        self.normalizes_itself, self.lost = engine.normalizes_itself, engine.lost
        self.special_ids = {role: number for role, number in engine.roles.items()
                            if number is not None}
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = (
            self.special_ids[role] for role in ("pad", "cls", "sep", "mask"))
        self.unk_id = self.special_ids.get("unk")
        self.size = self.stored_size = len(engine.pieces)
        self.mask_token = engine.pieces[self.mask_id]

    def __reduce__(self) -> tuple:
        return _unpickled, (tuple(self.files.items()), self.path)

    @property
    def special_names(self) -> dict[str, str]:
        """{role: the vocabulary item of its special token}."""
        return {role: self._engine.pieces[number] for role, number in self.special_ids.items()}

    @property
    def specification(self) -> dict | None:
        """The content of a tokenizer.json that gives these ids; None for SentencePiece."""
        return getattr(self._engine, "specification", None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without [CLS] and [SEP]."""
        text.encode()  # UnicodeEncodeError: of what is no UTF-8 the libraries do not say it
        return self._engine.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return self._engine.encode_batch(texts)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of `text` as an int32 array; see `encode_joined`."""
        return self.encode_joined([text])[0]

    def encode_joined(self, texts: list[str]) -> tuple[np.ndarray, list[int]]:
        """Return (int32 ids of all texts, how many each has), fast, for short texts too; they are
        normalized, unless `normalizes_itself`.
        """
        return self._engine.encode_joined(texts)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and, per id, the characters [start, end) of `text` it stands for.

        Spaces before a word belong to no token. All bytes of one character get its span.
        """
        text.encode()  # as above
        ids, offsets = self._engine.encode_with_offsets(text)
        trimmed = []
        for start, end in offsets:
            while start < end - 1 and text[start].isspace():
                start += 1
            trimmed.append((start, end))
        return ids, trimmed

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of `text` behind other text: only a space at its front begins a word."""
        for lead in _LEADS:
            before, ids = self.encode(lead), self.encode(lead + text)
            if ids[: len(before)] == before:
                return ids[len(before):]
        return self.encode(text)

    def encode_around_masks(self, parts: list[str]) -> list[int]:
        """Return the ids of texts with a mask between each two.

        The space before a mask belongs to the masked token, as in training; text behind it keeps
        its own, or continues the word.
        """
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += [self.mask_id] if number else []
            part = part.rstrip() if number + 1 < len(parts) else part
            if part:
                ids += self.encode_after(part) if number else self.encode(part)
        return ids

    def decode(self, ids) -> str:
        """Return the text of `ids`; special ids appear as their names."""
        parts: list[str] = []
        for is_name, run in groupby(map(int, ids), lambda token: (
                self._special[token] and token != self.unk_id)):
            tokens = list(run)
            parts += self.subwords(tokens) if is_name else [self._engine.decode(tokens)]
        return " ".join(parts)

    def subwords(self, ids) -> list[str]:
        """Return the vocabulary item of each id."""
        return [self._engine.pieces[int(token)] for token in ids]

    pieces = subwords  # its name in 0.2.0

    def readable(self, ids) -> list[str]:
        """Return the text of each id, with the space before a word; lone bytes as \\xNN."""
        return [self._readable(int(token)) for token in ids]

    def _readable(self, number: int) -> str:
        piece = self._engine.pieces[number]
        if number in self._engine.verbatim:
            return piece
        if self.kind == "byte_level":
            data = words.bytes_of_subword(piece)
            return piece if data is None else data.decode("utf-8", "backslashreplace")
        if self.kind in ("metaspace", "sentencepiece"):
            return piece.replace(words.SPACE_MARK, " ")
        rest = piece.removeprefix(self._engine.prefix)
        return rest if rest != piece else " " + piece

    def _bytes_of(self, number: int) -> bytes | None:
        if number in self._engine.added:
            return None
        of_piece = words.bytes_of_subword if self.kind == "byte_level" else words.byte_of
        return of_piece(self._engine.pieces[number])

    def word_starts(self) -> np.ndarray:
        """Return bool[size]: whether each id starts a word (the rule is in words.py)."""
        return self._table(self._starts_word)

    def _starts_word(self, number: int) -> bool:
        piece = self._engine.pieces[number]
        if number in self._engine.added or self.kind == "words":
            return True
        if self.kind == "byte_level":
            data = words.bytes_of_subword(piece)
            return data is None or words.bytes_start_word(data)
        if self.kind == "wordpiece":
            rest = piece.removeprefix(self._engine.prefix)  # it marks what continues a word
            return rest == piece or (bool(rest) and words.is_unspaced(rest[0]))
        return words.subword_starts_word(piece)

    def stored_word_starts(self) -> np.ndarray:
        """Return bool[2 * size]: `word_starts` for ids as shards hold them (segmented.py)."""
        return np.concatenate([self.word_starts(), ~self.word_starts()])

    def official_word_starts(self) -> np.ndarray:
        """Return bool[size]: the words of microsoft/DeBERTa, for `selection = "deberta_window"`.

        It has none for WordPiece, which keeps its own.
        """
        if self.kind in ("wordpiece", "words"):
            return self.word_starts()
        return self._table(lambda number: words.starts_official_word(
            self._readable(number).replace(" ", words.SPACE_MARK) if self.kind == "byte_level"
            else self._engine.pieces[number]))

    def character_starts(self) -> np.ndarray:
        """Return bool[size]: False for ids that begin inside a character (its later bytes)."""
        return self._table(lambda number: not (data := self._bytes_of(number))
                           or words.character_length(data[0]))

    def is_special(self) -> np.ndarray:
        """Return bool[size]: ids that are never masked and never drawn as a replacement."""
        return self._special.copy()

    def is_part(self) -> np.ndarray:
        """Return bool[size]: ids of bytes that are no whole characters, and all byte tokens of
        SentencePiece: most text has none of them.
        """
        return ~self._special & self._table(lambda number: (
            (data := self._bytes_of(number)) is not None
            and (self.kind != "byte_level" or data.decode(errors="ignore").encode() != data)))

    @cached_property
    def _special(self) -> np.ndarray:
        special = np.zeros(self.size, dtype=bool)
        special[[*self.special_ids.values(), *self._engine.special]] = True
        return special

    def _table(self, rule) -> np.ndarray:
        return np.array([self._special[number] or rule(number) for number in range(self.size)],
                        dtype=bool)


@lru_cache(4)  # of a process: it takes seconds to make some
def _unpickled(files: tuple, path: Path) -> Tokenizer:
    """Return a tokenizer of the bytes that the process which sends it has read."""
    return Tokenizer(path, dict(files))


def unknown_tokens(count: int, tokens: int) -> str:
    """Return what is wrong with `tokens` of which `count` are unknown, "" if these are few."""
    if count <= _MANY_UNKNOWN * tokens:
        return ""
    return f"{count / tokens:.1%} of the tokens are unknown: what they stood for is lost"
