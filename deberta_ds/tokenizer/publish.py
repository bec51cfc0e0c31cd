"""What AutoTokenizer reads of a tokenizer: tokenizer.json, and the names of its special tokens.

The class named is `PreTrainedTokenizerFast`, which takes tokenizer.json as it stands; transformers
5 puts its other classes together from the vocabulary alone, so that a normalizer is lost.
"""

import json
from pathlib import Path

from deberta_ds.base.files import write_atomic
from deberta_ds.tokenizer.fast import vocabulary_ids
from deberta_ds.tokenizer.files import JSON, NAMES, SETTINGS, SPM, find_files, read_settings
from deberta_ds.tokenizer.kinds import read_specification, subword_kind
from deberta_ds.tokenizer.roles import ROLES, USUAL_NAMES, look_up_roles
from deberta_ds.tokenizer.spm import model_proto, with_special_tokens
from deberta_ds.tokenizer.tokenizer import Tokenizer

_LONGEST_TEXT = 512  # tokens, of the settings of a directory without a model


def write_tokenizer_json(tokenizer: Tokenizer, out: Path, max_length: int = _LONGEST_TEXT,
                         text: str | None = None) -> None:
    """Write tokenizer.json (its own, or `text`) and tokenizer_config.json to directory `out`."""
    if text is None:
        specification = tokenizer.specification
        assert specification is not None, "the text of a SentencePiece model is given"
        added = list(specification["added_tokens"])
        known = {token["content"] for token in added}  # others stand in the vocabulary alone
        added += [special_token(name, tokenizer.special_ids[role], role == "mask")
                  for role, name in tokenizer.special_names.items() if name not in known]
        parts = {"added_tokens": sorted(added, key=lambda token: token["id"])} | framing(tokenizer)
        text = json.dumps(specification | parts, ensure_ascii=False) + "\n"
    write_atomic(out / JSON, text)
    names = {f"{role}_token": name for role, name in tokenizer.special_names.items()}
    settings = names | {"bos_token": names["cls_token"], "eos_token": names["sep_token"],
                        "tokenizer_class": "PreTrainedTokenizerFast",
                        "model_max_length": max_length, "padding_side": "right",
                        "model_input_names": ["input_ids", "attention_mask"]}
    if ((tokenizer.specification or {}).get("pre_tokenizer") or {}).get("add_prefix_space"):
        settings["add_prefix_space"] = True  # transformers 4 takes it from here alone
    write_atomic(out / SETTINGS, json.dumps(settings, indent=2) + "\n")


def special_token(name: str, number: int, is_mask: bool) -> dict:
    """Return a special token as tokenizer.json has it.

    A mask takes the space before it along, as the word whose place it takes would (transformers'
    own classes of RoBERTa and DeBERTa v1 do the same); a pipeline would leave the space in the text
    otherwise, where the model has never seen one.
    """
    return {"id": number, "content": name, "single_word": False, "lstrip": is_mask,
            "rstrip": False, "normalized": False, "special": True}


def framing(tokenizer: Tokenizer) -> dict:
    """Return the parts of a tokenizer.json that frame [CLS] a [SEP] b [SEP], and pad nothing."""
    names = {role: tokenizer.special_names[role] for role in ("cls", "sep")}

    def special(role: str, segment: int) -> dict:
        return {"SpecialToken": {"id": names[role], "type_id": segment}}

    first = [special("cls", 0), {"Sequence": {"id": "A", "type_id": 0}}, special("sep", 0)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, special("sep", 1)]
    known = {name: {"id": name, "ids": [tokenizer.special_ids[role]], "tokens": [name]}
             for role, name in names.items()}
    return {"truncation": None, "padding": None,
            "post_processor": {"type": "TemplateProcessing", "single": first,
                               "pair": first + second, "special_tokens": known}}


def add_special_tokens(path: str | Path, out: str | Path) -> tuple[Tokenizer, list[str]]:
    """Write the tokenizer at `path` to directory `out` with a token for each role it lacks, behind
    all others; return it and the names added. Of a token of several roles the one keeps it that it
    is named for (</s> is sep, <unk> is unk), else, as of GPT-2's <|endoftext|>, the first.
    """
    out, files = Path(out), find_files(Path(path))
    settings = read_settings(files)
    if SPM in files:
        model, names = with_special_tokens(files[SPM], settings)
        write_atomic(out / SPM, model)
        held = {piece.piece for piece in model_proto(model, files[SPM].path).pieces}
        if named := {key: name for role in ROLES
                     if (name := settings.get(key := f"{role}_token")) in held}:
            write_atomic(out / NAMES, json.dumps(named, indent=2) + "\n")
        return Tokenizer(out), names
    specification = read_specification(files, settings)
    subword_kind(specification, Path(path))  # what marks no words is rejected before it is written
    added = {token["content"]: token["id"] for token in specification["added_tokens"]}
    ids = vocabulary_ids(specification) | added
    roles = look_up_roles(settings, ids, specification)
    angled = sum(name.startswith("<") for name in ids if name in sum(USUAL_NAMES.values(), ()))
    pieces = {number: piece for piece, number in ids.items()}
    names = []
    taken: set[int | None] = set()
    for role in sorted(ROLES, key=lambda role: pieces.get(roles[role]) not in USUAL_NAMES[role]):
        if roles[role] is None or roles[role] in taken:
            usual = sorted(USUAL_NAMES[role], key=lambda name: name.startswith("<") != bool(angled))
            used = {*taken, *roles.values()} - {None}
            name = next((name for name in usual if ids.get(name) not in used), usual[0])
            if name not in ids:
                names.append(name)
                ids[name] = max(ids.values()) + 1
                pieces[ids[name]] = name
                specification["added_tokens"].append(special_token(name, ids[name], role == "mask"))
            roles[role] = ids[name]
        taken.add(roles[role])
    return publish(specification, {role: pieces[number] for role, number in roles.items()
                                   if number is not None}, out), names


def publish(specification: dict, names: dict[str, str], out: Path) -> Tokenizer:
    """Write a tokenizer.json and the names of its special tokens, {role: name}; return it."""
    write_atomic(out / JSON, json.dumps(specification, ensure_ascii=False) + "\n")
    write_atomic(out / SETTINGS, json.dumps(
        {f"{role}_token": name for role, name in names.items()}
        | {"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")
    write_tokenizer_json(Tokenizer(out), out)
    return Tokenizer(out)
