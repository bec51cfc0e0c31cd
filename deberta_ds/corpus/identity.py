"""Inputs by their content, which names the work units: finished ones are known again, whatever
happens to other files. Size, time of modification and inode of a local file, its stamp, say at the
first look whether it must be hashed again; `.inputs.json` of a job remembers both.
"""

import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import xxhash

from deberta_ds.base.errors import UserError, naming, still_at_work
from deberta_ds.base.files import read_json, xxh3
from deberta_ds.corpus.documents import BAD, Extent
from deberta_ds.files.remote import remote_state, stamp_of

Part = tuple[int, int] | None  # (i, n): units i, i + n, ... of n parts; None: all, and the end
Units = dict[str, list[Extent]]  # by their names, 32 hexadecimal digits
RECORDS = ".inputs*.json"


def identified(units: list[list[Extent]], out: str | Path, part: Part = None) -> Units:
    """Return the work units with the contents of local files as their states, by names that follow
    from these; a part of an array looks at the files of its own units alone.
    """
    extents = [extent for extent in extents_of(units, part) if extent.stamp]
    files = {extent.path: extent.stamp for extent in extents}
    known = read_inputs(out) | {extent.path: [extent.stamp, extent.state] for extent in extents
                                if extent.state != extent.stamp}  # by an earlier call
    new = [path for path, stamp in files.items() if known.get(path, [""])[0] != stamp]
    with ThreadPoolExecutor() as pool, still_at_work(lambda: f"hash {len(new):,} inputs"):
        known |= {path: [files[path], state]
                  for path, state in zip(new, pool.map(_content, new), strict=True)}
    named = [[replace(extent, state=known[extent.path][1]) if extent.path in files else extent
              for extent in unit] for unit in units]
    return {digest_of(f"{extent.path} {extent.kind} {extent.start} {extent.end} {extent.state}"
                      f"{extent.read or ''}" for extent in unit if extent.kind != BAD): unit
            for unit in named}


def digest_of(parts: Iterable[str]) -> str:
    """Return one xxh3 digest of several lines."""
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _content(path: str) -> str:
    with naming(path):
        return f"{os.path.getsize(path)} bytes, xxh3 {xxh3(path)}"


def check_unchanged(extents: Iterable[Extent]) -> None:
    """Raise UserError for an input that is not the file that it was when the work was planned."""
    files = {extent.path: extent.stamp or extent.state for extent in extents
             if extent.stamp or _is_stored(extent.path)}
    for path, stamp in files.items():
        with naming(path):
            now = remote_state(path) if _is_stored(path) else stamp_of(os.stat(path))
        if now != stamp:
            raise UserError(
                f"{path}: changed while this command read it (from {stamp} to {now}); when nothing "
                "writes to it any more, run the same command again: units of other files are kept")


def _is_stored(path: str) -> bool:
    """Return whether a file lies at a URL; a web server's versions are compared as it is read."""
    return "://" in path and not path.startswith("http")


def extents_of(units: Iterable[list[Extent]], part: Part = None) -> list[Extent]:
    """Return what the units read, or those of a part of an array."""
    first, step = (part[0] - 1, part[1]) if part else (0, 1)
    return list(itertools.chain.from_iterable(list(units)[first::step]))


def inputs_of(units: Units, part: Part = None) -> dict[str, list[str]]:
    """Return {path: [stamp, state]}."""
    return {extent.path: [extent.stamp, extent.state]
            for extent in extents_of(units.values(), part)}


def read_inputs(out: str | Path) -> dict[str, list[str]]:
    """Return `inputs_of` the units of a job, as it has noted them, or its parts."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(out).glob(RECORDS)):
        found |= read_json(path)
    return found
