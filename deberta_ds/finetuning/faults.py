"""Rows of a table that cannot be used: all are named at once, and a few may be left out."""

from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.cluster import dist
from deberta_ds.finetuning.tasks import Task

_MOST_SHOWN = 10


class Faults:
    """What is wrong with rows, by their place; up to `most` may be left out. `file` lists all."""

    def __init__(self, most: int = 0, file: Path | None = None):
        self.most, self.file = most, file
        self.errors: dict[str, str] = {}
        self.needed = 0  # tokens of the longest that is too long

    def add(self, place: str, error: UserError) -> None:
        """Count a row."""
        self.errors.setdefault(place, str(error))
        self.needed = max(self.needed, getattr(error, "needed", 0))

    def fit(self, task: Task, option: str) -> str:
        """Return what can be done about texts that are too long; "" if there are none."""
        cut = f", or {option}truncation=longest_first" if task.is_cut else ""
        return f"Set {option}max_length={self.needed}{cut}" if self.needed else ""

    def check(self, total: int, remedy: str = "") -> str:
        """Return what is said of them, "" for none; UserError if they are too many.

        `total`: rows that were read. `remedy`: another one than to leave them out.
        """
        lines = [error.partition("\n")[0] for error in self.errors.values()]
        if self.file and dist.is_main():
            self.file.unlink(missing_ok=True)  # of another run
        if not lines:
            return ""
        remedy = f". {remedy}" if remedy else ""
        if len(lines) == 1 and not self.most:
            raise UserError(lines[0] + remedy if remedy else next(iter(self.errors.values())))
        text = f"{len(lines):,} of {total:,} rows cannot be used:\n  " + "\n  ".join(
            lines[:_MOST_SHOWN])
        if self.file:
            if dist.is_main():
                write_atomic(self.file, "\n".join(lines) + "\n")
            text += f"\n  (all in {self.file})"
        if len(lines) <= self.most:
            return text
        _, _, form = next(iter(self.errors.values())).partition("\n")
        raise UserError(f"{text}\n  Correct them, or leave out up to N rows with --max_bad N"
                        f"{remedy}\n{form}".rstrip())
