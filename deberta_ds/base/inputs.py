"""What a command reads, opened once and read once.

`identity` holds digests of the bytes that were read, by name. It is what the ranks of a job
compare, what a resumed run compares, and what records and checkpoints name: a path says nothing.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Input:
    """One input: a tokenizer, corpora, minimal pairs, code of one's own, a table, a model."""

    name: str
    value: Any  # what is computed with
    identity: dict[str, str]
    problems: list[str] = field(default_factory=list)  # why a run cannot use it
    lines: list[str] = field(default_factory=list)  # what the log says of it
