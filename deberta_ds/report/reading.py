"""JSON files as the pages read them: checked against a dataclass, every fault in one error."""

from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import ConfigDict, TypeAdapter, ValidationError

from deberta_ds.base.errors import UserError, naming

# Strict about types; keys that a page does not draw may be there.
READ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_MOST_NAMED = 3


def read_checked(path: Path, form: Any) -> tuple[Any, Any]:
    """Return (the file as `form`, a type made with READ; the file as plain JSON values)."""
    if not path.exists():
        raise UserError(f"{path}: no such file; give a directory a run has written to")
    with naming(path):
        text = path.read_bytes()
    try:
        return TypeAdapter(form).validate_json(text), pydantic_core.from_json(text)
    except ValidationError as error:
        found = error.errors()
        named = "; ".join(_problem(item) for item in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise UserError(f"{path}: {named}{more}; write the file anew") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}; write the file anew") from None


def _problem(item: Any) -> str:
    if item["type"] == "json_invalid":
        return f"not valid JSON: {item['ctx']['error']}"
    place = ".".join(str(part)[:60] for part in item["loc"]) or "the file"
    return f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}"
