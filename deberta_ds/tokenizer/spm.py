"""The engine for SentencePiece models.

DeBERTa-v2/v3 conventions (microsoft/DeBERTa, `deberta/spm_tokenizer.py`): ids 0..3 are [PAD] [CLS]
[SEP] [UNK], and [MASK] is appended after the last SentencePiece piece. Other models are taken if
they have a token for each role.

Models that data_prep/train_tokenizer.py makes are given text under its rules, any other the text as
it stands.
"""

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import ReadFile
from deberta_ds.tokenizer.files import SPM, Files, read_settings
from deberta_ds.tokenizer.roles import ROLES, USUAL_NAMES, Roles, check_roles, look_up_roles
from deberta_ds.tokenizer.words import byte_of

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
MASK_TOKEN = "[MASK]"
Places = list[tuple[int, int]]  # of characters in another text, [start, end)
_OF_MARKS = "\u0f73\u0f75\u0f81"  # characters of class 0 that are made of marks
RULES_NAME = "deberta_ds-text-rules-1"  # of the normalizer in models that train_tokenizer.py makes


class SentencePieceEngine:
    """What `Tokenizer` asks of a SentencePiece model; its attributes are documented there."""

    kind = "sentencepiece"
    lost = prefix = ""
    added: frozenset[int] = frozenset()
    verbatim = added

    def __init__(self, files: Files):
        (path, data), settings = files[SPM], read_settings(files)
        self.sha256 = hashlib.sha256(data).hexdigest()
        processor = _load(data, path)
        proto = model_proto(data, path)
        _check_kind(proto, path)
        if any(piece.type == piece.USER_DEFINED for piece in proto.pieces):
            named = filter(None, (settings.get(f"{role}_token") for role in ROLES))
            processor = _load(with_control_roles(proto, named).SerializeToString(), path)
        try:
            self.pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not a SentencePiece model, or a damaged one (a subword is no "
                            f"UTF-8: {error.object!r})") from error
        if tuple(self.pieces[:4]) == SPECIAL_TOKENS:
            if MASK_TOKEN not in self.pieces:
                self.pieces.append(MASK_TOKEN)
            self.roles: Roles = {"pad": 0, "cls": 1, "sep": 2, "unk": 3,
                                 "mask": self.pieces.index(MASK_TOKEN)}
        else:
            self.roles, ids, names = _look_up(processor, settings)
            check_roles(path, self.roles, names, ids, needs_unknown=True)
            if self.roles != _look_up(processor, {})[0]:  # the files next to it say otherwise
                known = json.dumps([self.sha256, self.roles], sort_keys=True)
                self.sha256 = hashlib.sha256(known.encode()).hexdigest()
        self.normalizes_itself = proto.normalizer_spec.name != RULES_NAME
        check_settings(settings, self.pieces, self.roles, path)
        self._processor, self._path = processor, path
        self.special = {number for number in range(processor.get_piece_size())
                        if processor.is_control(number) or processor.is_unused(number)}

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(self._read(text)[0])

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode([self._read(text)[0] for text in texts], num_threads=1)

    def _read(self, text: str) -> tuple[str, Places | None]:
        """Return what the model is given of `text`, and its places unless it is one for one."""
        if self.normalizes_itself:
            return text, None
        # Every kind of white space as U+0020, one for one: offsets stay true.
        return _composed(text if text.isprintable() else text.translate(_SPACE_TABLE))

    @cached_property
    def _fast_processor(self) -> sentencepiece.SentencePieceProcessor:
        """The processor for texts under the rules of docs/explanation/data.md, not changed by the
        normalizer that holds those rules: without it, which is a tenth of the work.
        """
        if self.normalizes_itself:
            return self._processor
        proto = model_proto(self._processor.serialized_model_proto(), self._path)
        proto.normalizer_spec.precompiled_charsmap = b""
        return _load(proto.SerializeToString(), self._path)

    def encode_joined(self, texts: list[str]) -> tuple[np.ndarray, list[int]]:
        found = self._fast_processor.encode(texts, return_type="numpy", num_threads=1,
                                            **_one_thread())
        return (np.concatenate(found) if found else np.zeros(0, np.int32)), list(map(len, found))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        text, places = self._read(text)
        found = self._processor.encode(text, return_type="offset_mapping")
        pieces, offsets = found["pieces"], [tuple(span) for span in found["offsets"]]
        for index in range(len(pieces) - 2, -1, -1):
            start, end = offsets[index]
            if start == end and byte_of(pieces[index]) is not None:
                offsets[index] = offsets[index + 1]
        if places:
            starts = [*(start for start, _ in places), places[-1][1]]
            offsets = [(starts[start], places[end - 1][1] if start < end else starts[start])
                       for start, end in offsets]
        return list(found["ids"]), offsets

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


def _load(data: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, UnicodeDecodeError) as error:  # its own message may be damaged, too
        raise UserError(f"{path}: not a SentencePiece model, or a damaged one") from error
    return processor


@cache
def _one_thread() -> dict:
    """Return the option by which batches share one thread: else the library starts one for each, on
    any core, far from what the last one had in its caches. (Older versions have no such option.)
    """
    pool = getattr(sentencepiece, "ThreadPool", None)
    return {"thread_pool": pool(1)} if pool else {}


os.register_at_fork(before=_one_thread.cache_clear)  # a child has no threads, and would wait for it


def model_proto(data: bytes, path: Path):
    """Return the content of a SentencePiece model; UserError if it is damaged."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        return sentencepiece_model_pb2.ModelProto.FromString(data)
    except DecodeError as error:
        raise UserError(f"{path}: not a SentencePiece model, or a damaged one") from error


def _check_kind(proto, path: Path) -> None:
    trainer = proto.trainer_spec
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise UserError(f"{path}: a SentencePiece model of characters or words; give a unigram or "
                        "BPE model")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(f"{path}: marks the ends of words (treat_whitespace_as_suffix), so an id "
                        "does not say whether a word starts there, which whole-word masks need; "
                        "use a model that marks their starts")


def check_settings(settings: dict, pieces: list[str], roles: Roles, path: Path) -> None:
    """UserError if what stands next to a model asks for other ids than the model alone gives."""
    remedy = ("save the tokenizer with transformers' AutoTokenizer, and give the tokenizer.json "
              f"that this writes, without {path.name} next to it")
    for key in ("do_lower_case", "split_by_punct"):
        if settings.get(key) is True:
            raise UserError(f"{path}: {key} = true in the tokenizer_config.json next to it, which "
                            f"a SentencePiece model does not do by itself; {remedy}")
    for name, (number, _) in settings["added_tokens"].items():
        if number >= len(pieces) or pieces[number] != name:
            raise UserError(f"{path}: the files next to it add {name!r} with id {number}, which "
                            "the model does not hold; take them in with data_prep/"
                            f"train_tokenizer.py --extend {path} --out DIRECTORY")
    for role, number in roles.items():
        named = settings.get(f"{role}_token")
        if named is not None and number is not None and named != pieces[number]:
            raise UserError(f"{path}: the files next to it name {named!r} as the {role} token, but "
                            f"with this model it is {pieces[number]!r}; {remedy}")


def with_control_roles(proto, named: Iterable[str] = ()):
    """Make a model's special tokens, of the usual names and of those `named`, control pieces, whose
    ids text never gives, and return it.
    """
    names = {name for role in USUAL_NAMES if role != "unk" for name in USUAL_NAMES[role]}
    names |= set(named)
    for piece in proto.pieces:
        if piece.piece in names and piece.type == piece.USER_DEFINED:
            piece.type = piece.CONTROL
    return proto


def with_special_tokens(file: ReadFile, settings: dict) -> tuple[bytes, list[str]]:
    """Return (the model of `file` with a control piece for each role that neither it nor the files
    next to it have one for, their names).
    """
    path, data = file
    processor = _load(data, path)
    known = processor.id_to_piece(list(range(processor.get_piece_size())))
    if tuple(known[:4]) == SPECIAL_TOKENS:
        return data, []
    proto = model_proto(data, path)
    roles, _, _ = _look_up(_load(with_control_roles(proto).SerializeToString(), path), settings)
    angled = any(name.startswith("<") for name in known[:4])
    names = [USUAL_NAMES[role][angled] for role, number in roles.items() if number is None]
    for name in names:
        proto.pieces.add(piece=name, score=0.0, type=proto.SentencePiece.CONTROL)
    return (proto.SerializeToString(deterministic=True) if names else data), names


def _look_up(processor: sentencepiece.SentencePieceProcessor, named: dict
             ) -> tuple[Roles, dict, dict]:
    """Return (roles, {piece: id}, the names that the files next to the model or itself give)."""
    ids = {processor.id_to_piece(number): number for number in range(processor.get_piece_size())}
    own = {"pad": processor.pad_id(), "bos": processor.bos_id(), "eos": processor.eos_id()}
    settings = {f"{name}_token": processor.id_to_piece(number)
                for name, number in own.items() if number >= 0} | named
    unknown = {"model": {"unk_token": processor.id_to_piece(processor.unk_id())}}
    return look_up_roles(settings, ids, unknown), ids, settings


_SPACE_TABLE = {code: " " for code in range(0x3001) if chr(code).isspace()}


def _composed(text: str) -> tuple[str, Places | None]:
    """Return `text` with each letter and its marks in NFC, of which the table of the normalizer
    lacks marks in another order that compose to no single character; and the places in `text` of
    its characters, None where all stay.
    """
    if unicodedata.is_normalized("NFC", text):
        return text, None
    letters: list[str] = []
    for character in text:
        if letters and (unicodedata.combining(character) or character in _OF_MARKS):
            letters[-1] += character
        else:
            letters.append(character)
    composed, places, begin = [], [], 0
    for letter in letters:
        found, end = unicodedata.normalize("NFC", letter), begin + len(letter)
        places += [(begin, end)] * len(found) if found != letter else [
            (place, place + 1) for place in range(begin, end)]
        composed.append(found)
        begin = end
    return "".join(composed), places
