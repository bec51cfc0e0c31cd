"""What a command reads, opened once and read once.

`identity` holds digests of the bytes that were read, by name. It is what the ranks of a job
compare, what a resumed run compares, and what records and checkpoints name: a path says nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Input:
    """One input: a tokenizer, corpora, minimal pairs, code of one's own, a table, a model."""

    name: str
    value: Any  # what is computed with
    identity: dict[str, Any]  # digests; a short thing may stand for itself
    problems: list[str] = field(default_factory=list)  # why a run cannot use it
    lines: list[str] = field(default_factory=list)  # what the log says of it


def identity_of(opened: Iterable[Input]) -> dict[str, Any]:
    """Return the identities of all, which share no name."""
    return {name: digest for one in opened for name, digest in one.identity.items()}
