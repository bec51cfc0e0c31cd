"""Entities as characters [start, end) of a text, in the forms of annotation tools -> tags of words.

    doccano           {"text": "...", "label": [[0, 4, "PER"]]}, or objects in a list "entities"
    spaCy             ["...", {"entities": [[0, 4, "PER"]]}]: columns "text" and "entities"
    Prodigy           {"text": "...", "spans": [{"start": 0, "end": 4, "label": "PER"}], "answer"}
                      (accepted without any: no "spans")
    Label Studio      {"data": {"text": "..."}, "annotations": [{"result": [{"value": {...}}]}]},
                      or JSON_MIN: {"text": "...", "label": [{"start", "end", "labels": ["PER"]}]}
                      (annotated without any: no "label"), which its CSV has as cells; classes
                      that were chosen are columns by their names in its labelling interface

Every character of such a text has a tag: that of its token, of which the model learns one
(features.py). So entities may begin and end inside words, as Korean and German ones do.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

from deberta_ds.tokenizer.words import UNSPACED_SCRIPTS, is_unspaced

_WIDE = (*UNSPACED_SCRIPTS, (0x3001, 0x303F), (0xFF01, 0xFFEF))
_NAMES = ("label", "type", "tag", "entity_group")
Entity = tuple[int, int, str]
BAD_ENTITIES = (ValueError, TypeError, AttributeError, KeyError, IndexError)  # of `entities_of`


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Label Studio's JSON as other tools write one, with the first annotation that
    was not cancelled; Prodigy's without what was rejected. Others stay as they are.
    """
    if isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list):
        done = [part for part in row["annotations"]
                if isinstance(part, dict) and not part.get("was_cancelled")]
        entries, chosen = done[0].get("result") if done else None, {}
        if isinstance(entries, list):
            chosen = {str(entry.get("from_name")): entry["value"].get("choices")
                      for entry in entries if isinstance(entry, dict)
                      and entry.get("type") == "choices" and isinstance(entry.get("value"), dict)}
            entries = [entry for entry in entries if not isinstance(entry, dict)
                       or str(entry.get("type", "labels")).endswith("labels")]
        return {"id": row.get("id"), **row["data"], "label": entries, **chosen}
    if row.get("answer") in ("reject", "ignore") and not {"spans", "_task_hash"}.isdisjoint(row):
        return row | {name: None for name in ("spans", "label", "accept") if name in row}
    return row


def is_annotated(row: Mapping[str, Any]) -> bool:
    """Return whether a row of Prodigy or Label Studio was annotated: it may have no entity then."""
    return row.get("answer") == "accept" or row.get("annotation_id") not in (None, "")


def is_entities(value: Any) -> bool:
    """Return whether a label is a list of entities (none of them: of nothing at all)."""
    return isinstance(value, list) and all(
        isinstance(part, dict) or (isinstance(part, list | tuple) and len(part) == 3)
        for part in value)


def entities_of(text: str, value: list) -> list[Entity]:
    """Return the entities of a text in order, without spaces at their ends."""
    found = sorted(_entity(text, part) for part in value)
    for (_, end, name), (start, _, other) in zip(found, found[1:], strict=False):
        if start < end:
            raise ValueError(f"{name} and {other} overlap at character {start}; a word has one tag,"
                             " so remove one of them")
    return found


def _entity(text: str, part: Any) -> Entity:
    quoted = None
    if isinstance(part, dict):
        part = part["value"] if isinstance(part.get("value"), dict) else part
        name = next((part[key] for key in _NAMES if part.get(key)), (part.get("labels") or [0])[0])
        start, end = part.get("span") or (
            part.get(key, part.get(f"{key}_offset")) for key in ("start", "end"))
        quoted = part.get("text")
    else:
        start, end, name = part
    if type(start) is not int or type(end) is not int or not isinstance(name, str) or not name:
        raise ValueError(f"{part!r} is no entity; it is [start, end, label] or an object with "
                         "start, end and label")
    if quoted is not None and text[start:end] != quoted:  # a browser counts an emoji as two
        units = text.encode("utf-16-le")
        start, end = (len(units[: 2 * at].decode("utf-16-le", "ignore")) for at in (start, end))
        if text[start:end] != quoted:
            raise ValueError(f"{quoted!r} is not at character {start} of its text")
    if not 0 <= start < end <= len(text) or not text[start:end].strip():
        raise ValueError(f"{name} [{start}, {end}) is no piece of a text of {len(text)} characters,"
                         " which are counted from 0, not bytes or units of UTF-16")
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip()), name


def words_in(text: str) -> list[tuple[int, int]]:
    """Return the characters [start, end) of every word: a run of letters, digits and marks, another
    character, or one of a script without spaces."""
    found: list[tuple[int, int]] = []
    goes_on = False  # the last word takes letters
    for place, character in enumerate(text):
        kind = unicodedata.category(character)
        letter = (kind[0] in "LN" or character == "_") and not is_unspaced(character)
        touches = bool(found) and found[-1][1] == place
        if touches and (kind[0] == "M" or kind == "Cf" or (letter and goes_on)):
            found[-1] = (found[-1][0], place + 1)
        elif not character.isspace():
            found.append((place, place + 1))
            goes_on = letter
    return found


def tags_of_characters(text: str, entities: list[Entity]) -> list[str]:
    """Return the IOB2 tag of every character."""
    tags = ["O"] * len(text)
    for start, end, name in entities:
        tags[start:end] = [f"B-{name}"] + [f"I-{name}"] * (end - start - 1)
    return tags


def glued(words: list[str], spaces: bool) -> tuple[str, list[tuple[int, int]]]:
    """Return (words as one text, the characters of each): with spaces between, but for words of
    scripts without spaces; `spaces = False`: the words hold the spaces themselves."""
    text, places = "", []
    for word in words:
        if text and spaces and not (_is_wide(text[-1]) and _is_wide(word[:1])):
            text += " "
        places.append((len(text), len(text) + len(word)))
        text += word
    return text, places


def _is_wide(character: str) -> bool:
    """Return whether a script without spaces has this character, or its punctuation."""
    return any(low <= ord(character or " ") <= high for low, high in _WIDE)


def hold_spaces(words: Mapping[str, int]) -> bool:
    """Return whether words, with their counts, are all that a text is of: spaces are words too, or
    each is one character of a script that has none."""
    total = sum(words.values())
    blank = sum(count for word, count in words.items() if word.isspace())
    single = sum(count for word, count in words.items() if len(word) == 1)
    wide = sum(count for word, count in words.items() if _is_wide(word[:1]))
    return blank > 0.05 * total or (single == total and wide > total / 2)
