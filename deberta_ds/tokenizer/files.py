"""Which files a tokenizer is made from.

A path may name a SentencePiece model, a tokenizer.json, the vocab.json and merges.txt of GPT-2,
RoBERTa and DeBERTa v1, the vocab.txt of BERT, or a directory with one of these. In a directory
spm.model comes first (our own exports have a tokenizer.json derived from it next to it), unless
transformers has added tokens to that tokenizer.json.
tokenizer_config.json and its like are read next to tokenizer.json and the vocabulary files: the
names of special tokens and settings such as add_prefix_space may be there alone.
"""

import itertools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError, looked_in
from deberta_ds.base.files import ReadFile, read_file, read_json
from deberta_ds.tokenizer.vocabularies import VOCABULARIES

Files = dict[str, ReadFile]  # by the names under which they are published
SPM, JSON, SETTINGS = "spm.model", "tokenizer.json", "tokenizer_config.json"
NAMES, ADDED = "special_tokens_map.json", "added_tokens.json"
OTHER_MODELS = ("spiece.model", "tokenizer.model")
_EXTRA = (SETTINGS, NAMES, ADDED)
_TOKENS = [f"{role}_token" for role in ("pad", "cls", "sep", "unk", "mask", "bos", "eos")]
_PICKLE = "bpe_encoder.bin"
# All that a tokenizer is made from; in a directory the first that is there.
FORMS = ((SPM,), (JSON,), *(kind.files for kind in VOCABULARIES))
_VOCABULARIES = ", ".join(" with ".join(kind.files) for kind in VOCABULARIES)
KINDS = (f"a SentencePiece model ({SPM}), a {JSON}, {_VOCABULARIES}, or a directory with one of "
         "them")


def find_files(path: Path) -> Files:
    """Return the files a tokenizer is made from; UserError if there are none."""
    if path.is_dir():
        return choose(read_known(path, (*itertools.chain(*FORMS), _PICKLE, *_EXTRA, *OTHER_MODELS)),
                      path)
    if not path.exists():
        raise UserError(f"{path}: cannot read the tokenizer (no such file{looked_in(path)}); give "
                        f"{KINDS}, or train one with data_prep/train_tokenizer.py")
    extra = read_known(path.parent, _EXTRA)
    for names in (kind.files for kind in VOCABULARIES if path.name in kind.files):
        found = read_known(path.parent, names)
        for name in names:
            if name not in found:
                raise UserError(f"{path.with_name(name)}: is missing; {' and '.join(names)} are "
                                "needed in one directory")
        return found | extra
    if path.name == _PICKLE:
        raise UserError(_pickle_message(path))
    file = read_file(path)
    if file.data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        return {JSON: file} | (extra if path.name == JSON else {})
    json = read_known(path.parent, (JSON,)) if path.name == SPM else {}
    if json and has_added_tokens(json[JSON]):
        raise UserError(f"{path}: {JSON} next to it adds tokens that {SPM} lacks; give the "
                        f"directory to read them, or a copy of {SPM} that lies alone")
    return {SPM: file} | (extra if path.name in (SPM, *OTHER_MODELS) else {})


def read_known(directory: Path, names: Iterable[str]) -> Files:
    """Return those of `names` that are files of a directory."""
    return {name: read_file(directory / name) for name in names if (directory / name).exists()}


def choose(known: Files, place: Path) -> Files:
    """Return those of a directory's files that its tokenizer is made from."""
    extra = {name: known[name] for name in _EXTRA if name in known}
    if {SPM, JSON} <= known.keys() and has_added_tokens(known[JSON]):
        return {JSON: known[JSON]} | extra
    for names in FORMS:
        if set(names) <= known.keys():
            return {name: known[name] for name in names} | extra
    for name in OTHER_MODELS:
        if name in known:
            return {SPM: known[name]} | extra
    if _PICKLE in known:
        raise UserError(_pickle_message(known[_PICKLE].path))
    raise UserError(f"{place}: no tokenizer in this directory; give {KINDS}")


def has_added_tokens(file: ReadFile) -> bool:
    """Return whether a tokenizer.json holds a token, but the [MASK] of DeBERTa's models, that is no
    piece of the SentencePiece model next to it: transformers' `add_tokens` writes it there.
    """
    values = read_json(file)
    with suppress(AttributeError, IndexError, KeyError, TypeError):  # damaged, and not read
        vocabulary = values["model"]["vocab"]
        pieces = {piece if isinstance(piece, str) else piece[0] for piece in vocabulary}
        return not {token["content"] for token in values["added_tokens"]} <= {*pieces, "[MASK]"}
    return False


def _pickle_message(path: Path) -> str:
    return (f"{path}: is a pickle, which can run any program and is not read; put the model's "
            f"vocab.json and merges.txt (or its {JSON}) next to it: the Hugging Face repository of "
            "the model has them")


def read_settings(files: Files) -> dict:
    """Return what stands next to the vocabulary: names of special tokens (f"{role}_token": text),
    settings, added tokens.

    `added_tokens` is {content: (id, facts)}, of added_tokens.json and `added_tokens_decoder`.
    """
    settings = read_json(files[SETTINGS]) if SETTINGS in files else {}
    names = read_json(files[NAMES]) if NAMES in files else {}
    added: dict[str, tuple[int, dict]] = {}
    if ADDED in files:
        for content, number in read_json(files[ADDED]).items():
            added[content] = (_number(number, files[ADDED]), {})
    decoder = settings.pop("added_tokens_decoder", None) or {}
    for number, facts in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(facts, dict) and isinstance(facts.get("content"), str):
            added[facts["content"]] = (_number(number, files[SETTINGS]), facts)
    found = names | {key: value for key, value in settings.items() if value is not None}
    return found | {key: token_name(found[key]) for key in _TOKENS if key in found} | {
        "added_tokens": added}


def token_name(value: Any) -> str | None:
    """Return the text of a token in a settings file: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _number(value, path: ReadFile) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise UserError(f"{path}: {value!r} is not the id of an added token")
    return number
