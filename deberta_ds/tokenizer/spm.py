"""The engine for SentencePiece models.

DeBERTa-v2/v3 conventions (microsoft/DeBERTa, `deberta/spm_tokenizer.py`): ids 0..3 are [PAD] [CLS]
[SEP] [UNK], and [MASK] is appended after the last SentencePiece piece. Other models are taken if
they have a token for each role.
"""

import hashlib
from pathlib import Path

import numpy as np
import sentencepiece

from deberta_ds.errors import UserError, refuse_pipe
from deberta_ds.tokenizer.roles import USUAL_NAMES, check_roles, look_up_roles
from deberta_ds.tokenizer.words import (
    SPACE_MARK,
    byte_value,
    character_length,
    piece_starts_word,
)

SPECIAL_PIECES = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
MASK_PIECE = "[MASK]"


class SentencePieceEngine:
    """What `Tokenizer` asks of a SentencePiece model; its attributes are documented there."""

    kind = "sentencepiece"
    normalizes_itself = False
    lost = ""

    def __init__(self, path: Path):
        try:
            refuse_pipe(path)
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot read the tokenizer ({error.strerror}); give the path "
                            "of a SentencePiece model") from error
        self.sha256 = hashlib.sha256(data).hexdigest()
        processor = _load(data, path)
        found = tuple(processor.id_to_piece(number)
                      for number in range(min(4, processor.get_piece_size())))
        self.pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
        if found == SPECIAL_PIECES:
            self.roles = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": len(self.pieces)}
            self.pieces.append(MASK_PIECE)
        else:
            processor = _load(_with_control_roles(data), path)
            self.roles = _roles(processor, path)
        self._processor = processor
        self.special = {number for number in range(processor.get_piece_size())
                        if processor.is_control(number) or processor.is_unused(number)}

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(_plain_spaces(text))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode([_plain_spaces(text) for text in texts], num_threads=1)

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of texts whose only white space is U+0020, as int32 arrays: fast."""
        return [self._processor.encode(text, return_type="numpy") for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._processor.encode(_plain_spaces(text), return_type="offset_mapping")
        pieces, offsets = found["pieces"], [tuple(span) for span in found["offsets"]]
        for index in range(len(pieces) - 2, -1, -1):
            start, end = offsets[index]
            if start == end and byte_value(pieces[index]) is not None:
                offsets[index] = offsets[index + 1]
        return list(found["ids"]), offsets

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def official_piece(self, number: int) -> str:
        return self.pieces[number]

    def starts_word(self, number: int) -> bool:
        return piece_starts_word(self.pieces[number])

    def starts_character(self, number: int) -> bool:
        value = byte_value(self.pieces[number])
        return value is None or bool(character_length(value))

    def readable(self, number: int) -> str:
        return self.pieces[number].replace(SPACE_MARK, " ")


def _load(data: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, UnicodeDecodeError) as error:  # its own message may be damaged, too
        raise UserError(f"{path}: not a SentencePiece model, or a damaged one") from error
    return processor


def _with_control_roles(data: bytes) -> bytes:
    """Return the model with its special tokens as control pieces: text never gives their ids."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    names = {name for role in USUAL_NAMES if role != "unk" for name in USUAL_NAMES[role]}
    for piece in proto.pieces:
        if piece.piece in names and piece.type == piece.USER_DEFINED:
            piece.type = piece.CONTROL
    return proto.SerializeToString(deterministic=True)


def _roles(processor: sentencepiece.SentencePieceProcessor, path: Path) -> dict[str, int | None]:
    ids = {processor.id_to_piece(number): number for number in range(processor.get_piece_size())}
    own = {"pad": processor.pad_id(), "bos": processor.bos_id(), "eos": processor.eos_id()}
    settings = {f"{name}_token": processor.id_to_piece(number)
                for name, number in own.items() if number >= 0}
    unknown = {"model": {"unk_token": processor.id_to_piece(processor.unk_id())}}
    roles = look_up_roles(settings, ids, unknown)
    check_roles(path, roles, settings, ids, needs_unknown=True)
    return roles


_SPACE_TABLE = {code: " " for code in range(0x3001) if chr(code).isspace()}


def _plain_spaces(text: str) -> str:
    """Return `text` with every kind of white space as U+0020, one for one (offsets stay true)."""
    return text if text.isprintable() else text.translate(_SPACE_TABLE)
