"""What a record of any format gives: its text, or what is wrong with it, its label and its id."""

from pathlib import Path

from deberta_ds.data.prep.documents import Extent, ReadOptions
from deberta_ds.errors import UserError

EMPTY_LINE: dict = {}  # what an empty line of JSON lines stands for


def directory_label(extent: Extent, options: ReadOptions) -> str:
    return Path(extent.path).parent.name if options.label_from_directory else ""


def fields_of(record, label: str, options: ReadOptions) -> tuple[str, str, str, str]:
    """Return (text, problem, label, id) of one record."""
    text = record.get(options.text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "", _why_no_text(record, options), label, ""
    if options.label_key:
        value = record.get(options.label_key)
        label = "" if value is None else str(value)
    if not options.id_key:
        return text, "", label, ""
    name = record.get(options.id_key)
    if name is None or name == "":
        return "", f"no id under {options.id_key!r}; see --id_key", label, ""
    if not isinstance(name, str | int) or isinstance(name, bool):  # two may read the same then
        return "", (f"its id under {options.id_key!r} is neither text nor a whole number of at "
                    "most 64 bits"), label, ""
    return text, "", label, str(name)


def _why_no_text(record, options: ReadOptions) -> str:
    """Return what is wrong with a record without a text; "" if it stands for an empty line."""
    if record is EMPTY_LINE:
        return ""
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, not an object"
    if options.text_key in record:
        value = record[options.text_key]
        kind = "null" if value is None else type(value).__name__
        return f"no string under {options.text_key!r} but {kind}"
    found = ", ".join(map(str, record)) or "nothing"
    return f"no string under {options.text_key!r} (found: {found}); see --text_key"


def columns_of(options: ReadOptions, available: list[str], path: str) -> list[str]:
    """Return the columns that are read; UserError if one is not among those `available`."""
    wanted = [options.text_key] + [key for key in (options.label_key, options.id_key) if key]
    for name in wanted:
        if name not in available:
            raise UserError(f"{path}: no column {name!r} (found: {', '.join(available)})")
    return wanted
