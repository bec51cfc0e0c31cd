"""Which inputs are damaged: each is read to its end, and all that are not whole are named."""

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby, product
from pathlib import Path

from deberta_ds.base.errors import UserError, naming, still_at_work, tell
from deberta_ds.base.numbers import counted
from deberta_ds.corpus.documents import Extent, ReadOptions, plan_units, split, whole_inputs
from deberta_ds.corpus.encode import Cleaner, CleanOptions, batches
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.units import FORK, extents_of
from deberta_ds.files.inputs import open_bytes

_HUGE_BYTES, FEW_DOCUMENTS = 1 << 22, 20  # the latter: to hold out of a small corpus


def plan_whole(inputs: list[str], read: ReadOptions, unit_bytes: int, *outs: str | None,
               skip_bad_files: int, max_bad: int, workers: int, is_divided: bool
               ) -> list[list[Extent]]:
    """Return the work units of inputs without up to `skip_bad_files` damaged ones; UserError for
    more, and for one of `outs` inside of an input directory, which it would change. `is_divided`:
    somebody has said what a document is.
    """
    for name, target in product(filter(os.path.isdir, inputs), filter(None, outs)):
        if "://" not in target and Path(os.path.realpath(target)).is_relative_to(
                os.path.realpath(name)):
            raise UserError(f"{target}: lies in the input {name}, of which it would be a part "
                            "when the job goes on; choose a directory outside")
    bad = damaged_files(inputs, read, workers, max_bad) if skip_bad_files else {}
    for why in bad.values():
        tell(f"bad file: {why}")
    if len(bad) > skip_bad_files:
        raise UserError(f"{next(iter(bad))}: bad, like {len(bad) - 1} more; --skip_bad_files "
                        f"allows {skip_bad_files}; repair or fetch them, or allow more")
    units = plan_units(inputs, read, unit_bytes, bad)
    if not is_divided:
        refuse_huge(units)
        if few := describe_few(units):
            tell(f"WARNING: {few}")
    return units


def damaged_files(inputs: list[str], read: ReadOptions, workers: int, max_bad: int = 0
                 ) -> dict[str, str]:
    """Return {file: its name and why it is not whole} of inputs.

    A file with a document that cannot be read is not whole, but with `max_bad` > 0, which leaves
    such documents out one by one.
    """
    extents = [extent for extent, _ in whole_inputs(inputs, read)]
    found: list[str] = []
    with ProcessPoolExecutor(workers, FORK) as pool, still_at_work(
            lambda: f"read {len(found):,} of {len(extents):,} files"):
        found.extend(pool.map(partial(_why_bad, read=read, max_bad=max_bad), extents))
    return {extent.path: why for extent, why in zip(extents, found, strict=True) if why}


def _why_bad(extent: Extent, read: ReadOptions, max_bad: int) -> str:
    cleaner = Cleaner(CleanOptions(max_bad=sys.maxsize), is_read=True)
    try:
        with naming(extent.path):
            parts = [part for part, _ in split(extent, extent.end, sys.maxsize, read)]
        for documents in batches(read_unit(parts, read)):
            cleaner.texts(documents)
    except UserError as error:
        return str(error)
    count = 0 if max_bad else cleaner.counts["bad"]
    return f"{cleaner.problems[0]} ({counted(count, 'bad document')})" if count else ""


def describe_few(units: list[list[Extent]]) -> str:
    """Return what other rules give of a few text files, each of which is one document; "" of many
    or others.
    """
    extents = extents_of(units)
    if len(extents) >= FEW_DOCUMENTS or any(one.kind != "text" for one in extents):
        return ""
    counts = _by_rule(extents)
    return (f"{counted(len(extents), 'document')}, as each text file is one; documents = "
            f"blank_line gives {counts['blank_line']:,}, line {counts['line']:,}")


def _by_rule(extents: list[Extent]) -> Counter[str]:
    """Return how many documents each rule makes of the fronts of text files."""
    counts = Counter[str]()
    for extent in extents:
        with naming(extent.path), open_bytes(extent.path) as file:
            lines = file.read(_HUGE_BYTES).replace(b"\r", b"\n").splitlines()
        is_text = [bool(line.strip()) for line in lines]
        counts["line"] += sum(is_text)
        counts["blank_line"] += sum(key for key, _ in groupby(is_text))
    return counts


def refuse_huge(units: list[list[Extent]]) -> None:
    """Raise UserError, with what other rules give, for a large text file that is one document
    because nothing else was asked for.
    """
    for extent in extents_of(units):
        if extent.kind == "text" and extent.end > _HUGE_BYTES:
            counts = _by_rule([extent])
            raise UserError(
                f"{extent.path}: its {extent.end / 1e6:,.1f} MB would be one document. In its "
                f"first {_HUGE_BYTES / 1e6:.1f} MB, --documents blank_line gives "
                f"{counts['blank_line']:,} documents and --documents line {counts['line']:,}; give "
                "one of them, or --documents match:PATTERN, or --documents file to keep it whole")
