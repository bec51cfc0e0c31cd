"""The engine for everything that Hugging Face `tokenizers` runs: a tokenizer.json, or vocabulary
files, as it stands in them, normalization included.

Changed before it is loaded: padding, truncation and the post-processor go (rows are framed here),
and special tokens are not searched for in text. A model could still find the *name* of one as a
piece, so the names are replaced by texts that no document holds.
"""

import hashlib
import itertools
import json
import math
import os
import re
import threading
import unicodedata
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tokenizers

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.tokenizer.files import Files, read_settings, token_name
from deberta_ds.tokenizer.kinds import parts_of, read_specification, subword_kind, what_is_lost
from deberta_ds.tokenizer.roles import check_roles, look_up_roles
from deberta_ds.tokenizer.words import byte_of, character_length

# Workers are processes here; threads inside each would share the same cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_LARGEST = 1 << 24  # ids; a damaged file must not take all memory
_MOST_GROWTH = 100  # characters that a normalizer may make of one
_ONE_AT_A_TIME = threading.Lock()  # of what changes standard error
_PROBE = "".join(map(chr, range(32, 0x180))) + "\u3042\uac00\uff21"  # damaged tables panic at them
# Words whose pieces BPE and Unigram keep. The library's own 10,000 are full after a megabyte of
# text and stay; with these it executes 2.3 % less on 1.8 MB of novels. At most some 30 MB.
_WORDS_KEPT = 1 << 17


class FastEngine:
    """What `Tokenizer` asks of `tokenizers`; its attributes are documented there."""

    normalizes_itself = True

    def __init__(self, files: Files):
        self.place = next(iter(files.values())).path
        settings = read_settings(files)
        self.specification = read_specification(files, settings)
        self.kind, self.prefix = subword_kind(self.specification, self.place)
        self.lost = what_is_lost(self.specification, self.kind)
        added = {token["content"]: token["id"] for token in self.specification["added_tokens"]}
        ids = vocabulary_ids(self.specification) | added
        model = self.specification["model"]
        self.roles = look_up_roles(settings, ids, self.specification)
        check_roles(self.place, self.roles, settings, ids,
                    self.kind != "byte_level" and not model.get("byte_fallback"))
        size = max(ids.values()) + 1
        if size > _LARGEST:
            raise UserError(f"{self.place}: a token has id {size - 1:,}, but at most {_LARGEST:,} "
                            "are read; fix its added tokens")
        self.pieces = [""] * size
        for piece, number in ids.items():
            self.pieces[number] = piece
        self.added = set(added.values())
        self.special = {token["id"] for token in self.specification["added_tokens"]
                        if token.get("special")}
        self.special |= set(range(len(self.pieces))) - set(ids.values())
        self.verbatim = self.added | self.special
        self.sha256 = self._identity()
        self._fast = _load(self.specification, set(self.roles.values()), self.place)

    def _identity(self) -> str:
        """Return the checksum of all that decides ids and roles, however the files spell it."""
        roles = set(self.roles.values())
        sought = [token for token in self.specification["added_tokens"]
                  if not token.get("special") and token["id"] not in roles]
        values = {name: self.specification.get(name)
                  for name in ("normalizer", "pre_tokenizer", "model")}
        values |= {"sought": sorted(sought, key=lambda token: token["id"]), "roles": self.roles,
                   "special": sorted(self.special - roles), "size": len(self.pieces)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        found = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def encode_joined(self, texts: list[str]) -> tuple[np.ndarray, list[int]]:
        joined, lengths = array("I"), []
        for ids in self.encode_batch(texts):
            joined.fromlist(ids)  # "I" takes a quarter of the time of "i" or numpy.array
            lengths.append(len(ids))
        return np.frombuffer(joined, np.int32), lengths

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._fast.encode(text, add_special_tokens=False)
        values = [byte_of(self.pieces[number]) for number in found.ids]
        return found.ids, _over_marks(text, _spread(values, found.offsets))

    def decode(self, ids: list[int]) -> str:
        return self._fast.decode(ids, skip_special_tokens=False)


def _spread(values: list[bytes | None], offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return offsets in which the bytes of each character have its span: Unigram gives all bytes of
    unknown characters in a row the span of them all. `values`: the byte of each id, if it is one.
    """
    spread = list(offsets)
    for (start, end), same in itertools.groupby(range(len(offsets)), offsets.__getitem__):
        run = list(same)
        found = [values[index] for index in run]
        place = start - 1
        places = [place := place + bool(value is not None and character_length(value[0]))
                  for value in found]
        if end - start > 1 and places[0] == start and places[-1] == end - 1 \
                and None not in found:
            for index, place in zip(run, places, strict=True):
                spread[index] = (place, place + 1)
    return spread


def _over_marks(text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return offsets that reach over the marks and the Hangul vowels and finals behind them which
    no id has: a normalizer that composes a character gives it the span of its first part, and one
    that strips accents gives them to nobody.
    """
    if text.isascii():
        return offsets
    starts, reached = {start for start, _ in offsets}, []
    for start, end in offsets:
        while start < end < len(text) and end not in starts and _continues(text[end]):
            end += 1
        reached.append((start, end))
    return reached


def _continues(character: str) -> bool:
    return (unicodedata.category(character).startswith("M")
            or "\u1160" <= character <= "\u11ff"  # Hangul vowels and finals
            or character in "\uff9e\uff9f")  # voicing marks of half-width kana


def vocabulary_ids(specification: dict) -> dict[str, int]:
    """Return {piece: id} of the model, without added tokens."""
    vocabulary = specification["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}


def _load(specification: dict, roles: set[int | None], place: Path) -> tokenizers.Tokenizer:
    known = vocabulary_ids(specification)
    numbers = set(known.values())
    added = [token | {"special": bool(token.get("special") or token["id"] in roles)}
             for token in specification["added_tokens"]]
    # What is unknown goes by its name, but in Unigram models, which have its number.
    name = token_name(specification["model"].get("unk_token"))
    unknown = None if name is None else known.get(name)
    hidden = numbers & roles - {unknown, specification["model"].get("unk_id")}
    hidden |= numbers & {token["id"] for token in added if token["special"]} - {unknown}
    model = _without_names(specification["model"], hidden)
    added = [token for token in added if not token["special"] or token["id"] not in numbers]
    growth = math.prod(map(_growth, parts_of(specification.get("normalizer"))))
    if growth > _MOST_GROWTH:
        raise UserError(f"{place}: its normalizer makes {growth:,} characters of one by Replace "
                        f"(at most {_MOST_GROWTH}, or a text could fill the memory); "
                        "shorten what it writes")
    parts = specification | {"model": model, "added_tokens": added, "post_processor": None,
                             "truncation": None, "padding": None}
    try:
        with _silent_panics():
            fast = tokenizers.Tokenizer.from_str(json.dumps(parts))
            if fast.normalizer:
                fast.normalizer.normalize_str(_PROBE)
    except BaseException as error:  # a bad file's error is a bare Exception, or a panic of Rust
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise UserError(f"{place}: `tokenizers` {tokenizers.__version__} cannot load it "
                        f"({first_line(error)}); make it again, or save it with this version"
                        ) from error
    for token in added:  # the library numbers them itself, behind the vocabulary
        found = fast.token_to_id(token["content"])
        if found != token["id"] and not token["special"]:
            raise UserError(f"{place}: says that its added token {token['content']!r} has id "
                            f"{token['id']}, but `tokenizers` gives it {found}: ids of added "
                            "tokens follow those of the vocabulary without a hole; save it again "
                            "with the library that made it")
    fast.encode_special_tokens = True  # their names in a document are ordinary text
    if hasattr(fast.model, "_resize_cache"):  # WordPiece has none
        fast.model._resize_cache(_WORDS_KEPT)
    return fast


@contextmanager
def _silent_panics() -> Iterator[None]:
    """Context without standard error, where Rust prints a panic before Python sees it."""
    with _ONE_AT_A_TIME, open(os.devnull, "wb") as nowhere, open(os.dup(2), "wb") as kept:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept.fileno(), 2)


def _growth(normalizer: dict) -> int:
    """Return how many characters a step of a normalizer can make of one by replacing."""
    content, pattern = normalizer.get("content"), normalizer.get("pattern")
    if not (isinstance(content, str) and isinstance(pattern, dict)):
        return 1
    shortest = 0  # of what is replaced: the new text may then stand before each character
    with suppress(re.error, KeyError, TypeError, OverflowError, RecursionError):
        shortest = len(pattern["String"]) if "String" in pattern else \
            re._parser.parse(pattern["Regex"]).getwidth()[0]  # type: ignore[attr-defined]
    return max(1, len(content) // shortest) if shortest else 1 + len(content)


def _without_names(model: dict, hidden: set[int]) -> dict:
    """Return a model in which the pieces of some ids, and merges to them, cannot be found."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return model | {"vocab": [(_unreachable(number), score) if number in hidden
                                  else (piece, score)
                                  for number, (piece, score) in enumerate(vocabulary)]}
    names = {piece for piece, number in vocabulary.items() if number in hidden}
    found = {_unreachable(number) if number in hidden else piece: number
             for piece, number in vocabulary.items()}
    if not isinstance(model.get("merges"), list):
        return model | {"vocab": found}
    merges = [merge for merge in model["merges"] if not names & _texts_of(merge)]
    return model | {"vocab": found, "merges": merges}


def _texts_of(merge) -> set[str]:
    """Return the parts of a merge and their sum; nothing of a damaged one: loading says it."""
    is_whole = isinstance(merge, list) and all(isinstance(part, str) for part in merge)
    return {*merge, "".join(merge)} if is_whole else set()


def _unreachable(number: int) -> str:
    """Return a text that no document holds: noncharacters of Unicode."""
    return f"\U0010FFFF{number}\U0010FFFE"
