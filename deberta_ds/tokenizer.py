"""The SentencePiece tokenizer: ids, special ids, and which ids start a word.

DeBERTa-v2/v3 conventions (microsoft/DeBERTa, `deberta/spm_tokenizer.py`): ids 0..3 are [PAD] [CLS]
[SEP] [UNK], and [MASK] is appended after the last SentencePiece piece. Text is never searched for
special strings: the characters "[MASK]" in a document are ordinary text.

The word rule is a property of the id alone, so a table of booleans carries it. An id starts a
word if
- its piece begins with the space mark U+2581 (or is a lone space), or
- its first character is punctuation or a symbol (categories P and S, but not "_"), or
- its first character belongs to a script written without spaces (Han, Kana, Thai, Lao, Khmer,
  Myanmar, Tibetan): there every piece is a word of its own, or
- it is the byte piece <0xE2>..<0xF4> (first byte of a rare Han character, symbol or emoji), or
- it is a special id.
A combining mark never starts a word; digits continue one.
"""

import hashlib
import unicodedata
from pathlib import Path

import numpy as np
import sentencepiece

from deberta_ds.errors import UserError

SPACE_MARK = "\u2581"
SPECIAL_PIECES = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
MASK_PIECE = "[MASK]"
_FIRST_BYTES_OF_A_WORD = range(0xE2, 0xF5)
UNSPACED_SCRIPTS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han compatibility
    (0x20000, 0x323AF),  # Han extensions B and later
)


class Tokenizer:
    """A DeBERTa-style SentencePiece model.

    Attributes: pad_id, cls_id, sep_id, unk_id, mask_id (= number of pieces), size (= mask_id + 1;
    a model's vocab_size must be at least this), sha256 of the model file.
    """

    pad_id = 0
    cls_id = 1
    sep_id = 2
    unk_id = 3

    def __init__(self, path: str | Path):
        """Load `path` (spm.model); UserError if it is missing, broken or not DeBERTa-style."""
        self.path = Path(path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: cannot read the tokenizer ({error.strerror}); give the path of a "
                "SentencePiece spm.model file, or train one with data_prep/train_tokenizer.py"
            ) from error
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise UserError(f"{path}: not a SentencePiece model, or a damaged one") from error
        found = tuple(self._processor.id_to_piece(list(range(4))))
        if found != SPECIAL_PIECES:
            raise UserError(
                f"{path}: ids 0..3 are {' '.join(found)}, but a DeBERTa tokenizer has "
                f"{' '.join(SPECIAL_PIECES)}; train one with data_prep/train_tokenizer.py"
            )
        self.mask_id = self._processor.get_piece_size()
        self.size = self.mask_id + 1

    def __getstate__(self) -> dict:
        return {"path": self.path}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["path"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without [CLS] and [SEP]."""
        return self._processor.encode(_plain_spaces(text))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return self._processor.encode([_plain_spaces(text) for text in texts], num_threads=1)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of `text`, whose only white space is U+0020, as an int32 array: fast."""
        return self._processor.encode(text, return_type="numpy")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and, per id, the characters [start, end) of `text` it stands for.

        Spaces before a word belong to no token. All byte pieces of one character get its span.
        """
        found = self._processor.encode(_plain_spaces(text), return_type="offset_mapping")
        pieces, offsets = found["pieces"], [tuple(span) for span in found["offsets"]]
        for index in range(len(pieces) - 2, -1, -1):
            start, end = offsets[index]
            if start == end and _byte_value(pieces[index]) is not None:
                offsets[index] = offsets[index + 1]
        trimmed = []
        for start, end in offsets:
            while start < end - 1 and text[start].isspace():
                start += 1
            trimmed.append((start, end))
        return list(found["ids"]), trimmed

    def decode(self, ids) -> str:
        """Return the text of `ids`; special ids appear as their names."""
        parts, run = [], []
        for token in (int(token) for token in ids):
            if 4 <= token < self.mask_id or token == self.unk_id:
                run.append(token)
                continue
            parts += [self._processor.decode(run)] if run else []
            parts.append(self.pieces([token])[0])
            run = []
        parts += [self._processor.decode(run)] if run else []
        return " ".join(parts)

    def pieces(self, ids) -> list[str]:
        """Return the piece of each id."""
        return [
            MASK_PIECE if token == self.mask_id else self._processor.id_to_piece(token)
            for token in (int(token) for token in ids)
        ]

    def word_starts(self) -> np.ndarray:
        """Return bool[size]: whether each id starts a word (the rule is at the top of the file)."""
        special = self.is_special()
        pieces = self.pieces(range(self.size))
        return np.array(
            [special[i] or piece_starts_word(piece) for i, piece in enumerate(pieces)], dtype=bool
        )

    def official_word_starts(self) -> np.ndarray:
        """Return bool[size]: the words of microsoft/DeBERTa, for `selection = "deberta_window"`."""
        special = self.is_special()
        pieces = self.pieces(range(self.size))
        return np.array(
            [special[i] or starts_official_word(piece) for i, piece in enumerate(pieces)], bool
        )

    def is_special(self) -> np.ndarray:
        """Return bool[size]: ids that are never masked and never drawn as a replacement."""
        special = np.zeros(self.size, dtype=bool)
        special[[self.pad_id, self.cls_id, self.sep_id, self.unk_id, self.mask_id]] = True
        for token in range(4, self.mask_id):
            if self._processor.is_control(token) or self._processor.is_unused(token):
                special[token] = True
        return special


def piece_starts_word(piece: str) -> bool:
    """Return whether a SentencePiece piece starts a word (the rule is at the top of the file)."""
    value = _byte_value(piece)
    if value is not None:
        return value in _FIRST_BYTES_OF_A_WORD
    first = piece[:1]
    if first in ("", SPACE_MARK, " "):
        return True
    category = unicodedata.category(first)
    if category[0] == "M":
        return False
    if category[0] in "PS" and first != "_":
        return True
    code = ord(first)
    return any(low <= code <= high for low, high in UNSPACED_SCRIPTS)


def starts_official_word(piece: str) -> bool:
    """Return whether a piece starts a word by microsoft/DeBERTa's `part_of_whole_word`.

    There a piece continues a word unless it begins with the space mark or is one character of
    punctuation, white space or control: several marks in one piece ("..."), symbols, byte pieces
    and all Han characters continue the word before them.
    """
    if len(piece) != 1 or piece == SPACE_MARK:
        return piece.startswith(SPACE_MARK)
    # All of ASCII but letters and digits counts as punctuation there.
    ascii_mark = piece.isascii() and piece.isprintable() and not piece.isalnum()
    category = unicodedata.category(piece)
    return ascii_mark or category[0] in "PC" or category == "Zs"


def _byte_value(piece: str) -> int | None:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return int(piece[3:5], 16)
    return None


_SPACE_TABLE = {code: " " for code in range(0x3001) if chr(code).isspace()}


def _plain_spaces(text: str) -> str:
    """Return `text` with every kind of white space as U+0020, one for one (offsets stay true)."""
    return text if text.isprintable() else text.translate(_SPACE_TABLE)
