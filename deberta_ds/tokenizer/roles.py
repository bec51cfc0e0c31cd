"""The special tokens of a tokenizer by role: which token pads, frames, hides, stands for unknown.

A role is filled by the name that tokenizer_config.json or special_tokens_map.json gives, else by
one of the usual names, else by what the post-processor of tokenizer.json puts around a text.
"""

from collections.abc import Callable

from deberta_ds.errors import UserError

ROLES = ("pad", "cls", "sep", "unk", "mask")
USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "unk": ("[UNK]", "<unk>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
Roles = dict[str, int | None]


def find_roles(
    place: object, settings: dict, id_of: Callable[[str], int | None], *, framed: dict[str, str],
    unknown: str | None, needs_unknown: bool,
) -> Roles:
    """Return {role: id}; UserError that names every role without a token.

    `id_of` looks a token up. `framed` has the cls and sep of a post-processor, `unknown` the name
    the model itself gives. A tokenizer that spells everything in bytes needs no unk: None then.
    """
    roles: Roles = {}
    for role in ROLES:
        named = token_name(settings.get(f"{role}_token"))
        if named is not None and id_of(named) is None and role != "unk":
            raise UserError(f"{place}: names {named!r} as its {role} token, but the vocabulary has "
                            f"no such token; {_remedy(place)}")
        other = {"unk": unknown}.get(role) or framed.get(role)
        boundary = {"cls": "bos", "sep": "eos"}.get(role)
        names = [named, *USUAL_NAMES[role], other, token_name(settings.get(f"{boundary}_token"))]
        roles[role] = next((number for name in names if name is not None
                            and (number := id_of(name)) is not None), None)
    missing = [role for role, number in roles.items()
               if number is None and (role != "unk" or needs_unknown)]
    if missing:
        usual = ", ".join(f"{role} ({' or '.join(USUAL_NAMES[role][:2])})" for role in missing)
        raise UserError(f"{place}: no token for {usual}; name it in tokenizer_config.json, or "
                        f"{_remedy(place)}")
    _check_distinct(place, roles)
    return roles


def _check_distinct(place: object, roles: Roles) -> None:
    taken: dict[int, str] = {}
    for role, number in roles.items():
        if number in taken:
            raise UserError(f"{place}: one token (id {number}) is both {taken[number]} and {role}; "
                            "each role needs a token of its own: give another in "
                            "tokenizer_config.json")
        if number is not None:
            taken[number] = role


def _remedy(place: object) -> str:
    return f"add it with data_prep/train_tokenizer.py --add_mask {place} --out DIRECTORY"


def token_name(value) -> str | None:
    """Return the text of a token in a settings file: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def framing_tokens(processor: dict | None) -> dict[str, str]:
    """Return {"cls": name, "sep": name} that a post-processor puts around a single text."""
    kind = processor.get("type") if isinstance(processor, dict) else None
    if kind == "Sequence":
        found: dict[str, str] = {}
        for part in processor.get("processors", ()):
            found |= framing_tokens(part)
        return found
    if kind in ("BertProcessing", "RobertaProcessing"):
        return {role: processor[role][0] for role in ("cls", "sep") if processor.get(role)}
    if kind != "TemplateProcessing":
        return {}
    parts = processor.get("single") or ()
    names = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in parts]
    if len(names) < 2:
        return {}
    framed = {"cls": names[0], "sep": names[-1]}
    return {role: name for role, name in framed.items() if name is not None}
