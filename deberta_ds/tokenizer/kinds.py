"""What a tokenizer of `tokenizers` is made of, as one specification: the content of tokenizer.json.

It is read, or made from vocabulary files (vocabularies.py). Settings that transformers takes from
tokenizer_config.json are taken from there: add_prefix_space, do_lower_case, strip_accents,
tokenize_chinese_chars.
"""

from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import ReadFile, read_json
from deberta_ds.tokenizer.files import JSON, SETTINGS, Files
from deberta_ds.tokenizer.vocabularies import VOCABULARIES, Vocabulary
from deberta_ds.tokenizer.words import SPACE_MARK, byte_of_character

_REMEDY = "a tokenizer.json of Hugging Face `tokenizers` is expected; save the tokenizer again"
_PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")


def read_specification(files: Files, settings: dict) -> dict:
    """Return the specification; UserError if a file is damaged or lacks what is needed."""
    if JSON in files:
        specification = _read_json(files[JSON])
    else:
        kind = next(one for one in VOCABULARIES if set(one.files) <= files.keys())
        file = files[kind.files[0]]
        _check_class(kind, file, settings)
        specification = kind.read(*(files[name] for name in kind.files))
        _check_vocabulary(specification["model"], file)
    _apply_settings(specification, settings)
    add_tokens(specification, settings["added_tokens"])
    return specification


def _check_class(kind: Vocabulary, path: ReadFile, settings: dict) -> None:
    """UserError if vocabulary files belong to a class whose rules do not stand in them."""
    owner = str(settings.get("tokenizer_class") or "")
    words = settings.get("word_tokenizer_type", "basic")
    if owner.startswith(_PLAIN_CLASSES) or (words == "basic" and (
            not owner or owner.removesuffix("Fast").removesuffix("Tokenizer") in kind.classes)):
        return
    raise UserError(f"{path}: belongs to a {owner or f'tokenizer with {words}'} by its {SETTINGS}, "
                    "whose rules do not stand in it; load it with transformers' AutoTokenizer and "
                    f"save it: where that writes a {JSON}, give this one")


def _read_json(path: ReadFile) -> dict:
    specification = read_json(path)
    model = specification.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list) \
            or not model["vocab"]:
        raise UserError(f"{path}: no model with a vocabulary in it; {_REMEDY}")
    if "type" not in model:  # files of early versions do not say
        model["type"] = ("BPE" if "merges" in model else "Unigram"
                         if isinstance(model["vocab"], list) else "WordPiece")
    _check_vocabulary(model, path)
    if isinstance(model.get("merges"), list):  # "a b" in older files, ["a", "b"] in newer ones
        model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge
                           for merge in model["merges"]]
    if model.get("dropout"):
        model["dropout"] = None  # a document has the same ids each time
    _check_unknown(model, path)
    tokens = specification.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
            isinstance(token, dict) and isinstance(token.get("content"), str)
            and type(token.get("id")) is int and token["id"] >= 0 for token in tokens):
        raise UserError(f"{path}: added_tokens without id or content; {_REMEDY}")
    return specification | {"added_tokens": list(tokens)}


def _check_vocabulary(model: dict, path: ReadFile) -> None:
    """UserError unless it is {piece: id} with no id twice, or [[piece, score], ...] of Unigram."""
    vocabulary = model["vocab"]
    if model["type"] == "Unigram":
        is_whole = isinstance(vocabulary, list) and all(
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            and isinstance(entry[1], int | float) for entry in vocabulary)
    else:
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [None]
        is_whole = all(type(number) is int and 0 <= number < 1 << 31 for number in ids) and (
            len(set(ids)) == len(ids))
    if not is_whole:
        raise UserError(f"{path}: its {model['type']} vocabulary is damaged; {_REMEDY}")


def _check_unknown(model: dict, path: ReadFile) -> None:
    """UserError if the model would fail at the first text that it does not know."""
    if model["type"] == "Unigram":
        number = model.get("unk_id")
        known = type(number) is int and 0 <= number < len(model["vocab"])
        known = known or (number is None and bool(model.get("byte_fallback")))
    else:
        name = model.get("unk_token")
        if isinstance(name, str) and model["type"] == "BPE" and name not in model["vocab"] and (
                byte_of_character().keys() <= model["vocab"].keys()):
            name = model["unk_token"] = None  # with all bytes nothing is unknown
        known = name in model["vocab"] if isinstance(name, str) else (
            name is None and model["type"] == "BPE")
    if not known:
        raise UserError(f"{path}: its {model['type']} model has no token for what it does not know "
                        f"(unk); {_REMEDY}")


def _apply_settings(specification: dict, settings: dict) -> None:
    """Let tokenizer_config.json say what transformers' own classes would take from it."""
    owner = str(settings.get("tokenizer_class") or "")
    if owner.startswith(_PLAIN_CLASSES):
        return
    for part in parts_of(specification.get("pre_tokenizer")):
        if part.get("type") == "ByteLevel" and "add_prefix_space" in settings:
            part["add_prefix_space"] = bool(settings["add_prefix_space"])
    keys = {"lowercase": "do_lower_case", "strip_accents": "strip_accents",
            "handle_chinese_chars": "tokenize_chinese_chars"}
    for part in parts_of(specification.get("normalizer")):
        if part.get("type") == "BertNormalizer":
            part |= {ours: settings[theirs] for ours, theirs in keys.items() if theirs in settings}


def add_tokens(specification: dict, added: dict[str, tuple[int, dict]]) -> None:
    """Add the tokens of `read_settings` that a specification lacks."""
    known = {token["content"] for token in specification["added_tokens"]}
    for content, (number, facts) in sorted(added.items(), key=lambda item: item[1][0]):
        if content not in known:
            specification["added_tokens"].append(
                {"id": number, "content": content} | {
                    name: bool(facts.get(name, name == "normalized" and not facts.get("special")))
                    for name in ("single_word", "lstrip", "rstrip", "normalized", "special")})


def parts_of(step: Any) -> list[dict]:
    """Return the steps of a normalizer or pre-tokenizer, those inside a Sequence one by one."""
    if not isinstance(step, dict):
        return []
    steps = step.get("normalizers", step.get("pretokenizers"))
    return [part for inner in steps for part in parts_of(inner)] if isinstance(steps, list) \
        else [step]


def what_is_lost(specification: dict, kind: str) -> str:
    """Return what of a text this tokenizer skips in silence, having no subword for it."""
    model = specification["model"]
    if model["type"] != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return ""
    if kind != "byte_level":
        return "characters outside its vocabulary"
    bytes_of_text = {character for character, byte in byte_of_character().items()
                     if byte not in (0xC0, 0xC1) and byte < 0xF5}
    lacking = len(bytes_of_text - model["vocab"].keys())
    return f"{lacking} of the {len(bytes_of_text)} bytes of UTF-8" if lacking else ""


def subword_kind(specification: dict, place: Path) -> tuple[str, str]:
    """Return (kind, prefix of pieces that continue a word): what marks the starts of words.

    Kinds: "byte_level", "metaspace", "wordpiece", "words". UserError if nothing marks them.
    """
    model = specification["model"]
    before = parts_of(specification.get("pre_tokenizer"))
    first = parts_of(specification.get("normalizer"))
    if model["type"] == "WordLevel":
        return "words", ""
    if model.get("end_of_word_suffix"):
        raise UserError(f"{place}: marks the ends of words ({model['end_of_word_suffix']!r}), so "
                        "an id does not say whether a word starts there, which whole-word masks "
                        "need; use a tokenizer with a space mark, byte-level spaces or ##")
    if any(part.get("type") == "ByteLevel" for part in before + first):
        return "byte_level", ""
    prefix = model.get("continuing_subword_prefix")
    if model["type"] == "WordPiece" and prefix is None:
        prefix = "##"
    if prefix:
        return "wordpiece", prefix
    marks = any(part.get("type") == "Metaspace" for part in before) or any(
        SPACE_MARK in (part.get("content"), part.get("prepend")) for part in first)
    if not marks:
        raise UserError(f"{place}: a {model['type']} model without a mark of word starts "
                        "(ByteLevel, Metaspace or ##), which whole-word masks need; use or train "
                        "a tokenizer that has one")
    return "metaspace", ""
