"""The special tokens of a tokenizer by role: which token pads, frames, hides, stands for unknown.

A role is filled by the name that tokenizer_config.json or special_tokens_map.json gives, else by
one of the usual names, else by what the post-processor of tokenizer.json puts around a text.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.tokenizer.files import token_name

ROLES = ("pad", "cls", "sep", "unk", "mask")
USUAL_NAMES = {"pad": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
               "cls": ("[CLS]", "<s>", "<cls>"), "sep": ("[SEP]", "</s>", "<sep>"),
               "unk": ("[UNK]", "<unk>"), "mask": ("[MASK]", "<mask>", "<|mask|>")}
Roles = dict[str, int | None]


def look_up_roles(settings: dict, ids: Mapping[str, int], specification: dict) -> Roles:
    """Return {role: id, None where there is no token for it}; `ids` has those of all tokens."""
    other = framing_tokens(specification.get("post_processor")) | {
        "unk": unknown_piece(specification["model"])}
    roles: Roles = {}
    for role in ROLES:
        boundary = {"cls": "bos", "sep": "eos"}.get(role)
        names = [settings.get(f"{role}_token"), *USUAL_NAMES[role], other.get(role),
                 settings.get(f"{boundary}_token")]
        roles[role] = next((ids[name] for name in names if name is not None and name in ids), None)
    return roles


def check_roles(place: object, roles: Roles, settings: dict, ids: Mapping[str, int],
                needs_unknown: bool) -> None:
    """UserError that names every role without a token, or a token of two roles.

    A tokenizer that spells everything in bytes needs no unk.
    """
    for role in ROLES:
        named = settings.get(f"{role}_token")
        if named is not None and named not in ids and role != "unk":
            raise UserError(f"{place}: names {named!r} as its {role} token, but the vocabulary has "
                            f"no such token; {_remedy(place)}")
    missing = [role for role, number in roles.items()
               if number is None and (role != "unk" or needs_unknown)]
    if missing:
        usual = ", ".join(f"{role} ({' or '.join(USUAL_NAMES[role][:2])})" for role in missing)
        raise UserError(f"{place}: no token for {usual}; name it in tokenizer_config.json, or "
                        f"{_remedy(place)}")
    taken: dict[int, str] = {}
    for role, number in roles.items():
        if number in taken:
            raise UserError(f"{place}: one token (id {number}) is both {taken[number]} and {role}; "
                            "each role needs a token of its own: name another in "
                            f"tokenizer_config.json, or {_remedy(place)}")
        if number is not None:
            taken[number] = role


def _remedy(place: object) -> str:
    return f"add it with data_prep/train_tokenizer.py --add_mask {place} --out DIRECTORY"


def framing_tokens(processor: Any) -> dict[str, str]:
    """Return {"cls": name, "sep": name} that a post-processor puts around a single text; nothing
    for one that does not, or is damaged: the roles are missed then, if nothing else names them.
    """
    found: dict = {}
    with suppress(AttributeError, IndexError, KeyError, TypeError):
        kind = processor["type"]
        if kind == "Sequence":
            for part in processor["processors"]:
                found |= framing_tokens(part)
        elif kind in ("BertProcessing", "RobertaProcessing"):
            found = {role: processor[role][0] for role in ("cls", "sep")}
        elif kind == "TemplateProcessing" and len(processor["single"]) > 1:
            ends = processor["single"][0], processor["single"][-1]
            found = {role: end.get("SpecialToken", {}).get("id")
                     for role, end in zip(("cls", "sep"), ends, strict=True)}
    return {role: name for role, name in found.items() if isinstance(name, str)}


def unknown_piece(model: dict) -> str | None:
    """Return the piece that a model of tokenizer.json puts for what it does not know."""
    number = model.get("unk_id")
    if isinstance(number, int) and 0 <= number < len(model["vocab"]):
        return model["vocab"][number][0]
    return token_name(model.get("unk_token"))
