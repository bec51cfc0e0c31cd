"""Rows that cannot be used: all of them are named at once, and a few may be left out."""

from collections.abc import Sequence
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.cluster import dist

_MOST_SHOWN = 10


def left_out(faults: Sequence[str], total: int, max_bad: int, file: Path | None) -> str:
    """Return a line on the rows that are left out, "" for none; UserError if they are too many.

    `faults` are errors with the place of each; all are written to `file` where that is given.
    """
    if not faults:
        return ""
    if len(faults) == 1 and not max_bad:
        raise UserError(faults[0])
    lines = [fault.partition("\n")[0] for fault in faults]
    shown = "\n  ".join(lines[:_MOST_SHOWN])
    text = f"{len(faults):,} of {total:,} rows cannot be used:\n  {shown}"
    if file and dist.is_main():
        write_atomic(file, "\n".join(lines) + "\n")
    if len(faults) > _MOST_SHOWN:
        text += f"\n  and {len(faults) - _MOST_SHOWN:,} more" + (f", see {file}" if file else "")
    elif file:
        text += f"\n  (listed in {file})"
    if len(faults) <= max_bad:
        return text
    hint = faults[0].partition("\n")[2]
    raise UserError(f"{text}\n  Correct them, or leave out up to N rows with --max_bad N"
                    + (f"\n{hint}" if hint else ""))
