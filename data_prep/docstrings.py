#!/usr/bin/env python
"""Collect the docstrings of this Python installation as a corpus of real English.

Files are parsed, never imported. Doctest lines are left out. Of packages in pinned versions alone,
the corpus is the same on every machine that has them.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from options import add_workers, share

from deberta_ds.base.command_line import local, parser_for, positive
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import atomic_path, read_file

MIN_CHARACTERS, MIN_LETTER_SHARE = 200, 0.7
NOT_PROSE = {"test", "tests", "testing", "idlelib", "encodings", "lib2to3", "ensurepip", "pip"}
# Packages with much prose, so that few files are parsed. All but torch are the same everywhere.
PROSE = {"numpy": "numpy", "scipy": "scipy", "sklearn": "scikit-learn", "pandas": "pandas",
         "networkx": "networkx", "matplotlib": "matplotlib", "torch": ""}


def installed_files() -> list[str]:
    """Return the .py files of the standard library and the packages, those of PROSE first."""
    import sysconfig

    paths = sysconfig.get_paths()
    found = list(_python_files(paths["stdlib"], NOT_PROSE | {"site-packages", "dist-packages"}))
    packages = [(os.path.relpath(path, directory).split(os.sep)[0], path)
                for directory in sorted({paths["purelib"], paths["platlib"]})
                for path in _python_files(directory, NOT_PROSE)]
    first = list(PROSE)
    packages.sort(key=lambda one: first.index(one[0]) if one[0] in first else len(first))
    return found + [path for _, path in packages]


def _python_files(directory: str, skipped: set[str]) -> Iterator[str]:
    for base, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if name not in skipped)
        yield from (os.path.join(base, name) for name in sorted(names) if name.endswith(".py"))


def pinned_files(constraints: str | Path) -> tuple[list[str], list[str]]:
    """Return the .py files of the packages of PROSE, and what a constraints file pins otherwise."""
    from importlib import metadata

    pinned = read_file(constraints).data.decode()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", pinned, re.MULTILINE))
    files: list[str] = []
    notes = []
    for name in filter(None, PROSE.values()):
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            notes.append(f"{name} is not installed")
            continue
        if package.version != pins.get(name):
            notes.append(f"{name} is {package.version}, not {pins.get(name, 'pinned')}")
        files += [str(package.locate_file("/".join(parts))) for parts in sorted(
            file.parts for file in package.files or [] if file.suffix == ".py"
            and not NOT_PROSE & set(file.parts) and ".." not in file.parts)]
    return files, notes


def docstrings_of(paths: list[str]) -> list[tuple[str, str]]:
    """Return (name, normalized text) of the docstrings of files that are long and English."""
    return [pair for path in paths for pair in _file_docstrings(path)]


def _file_docstrings(path: str) -> Iterator[tuple[str, str]]:
    import ast
    import warnings

    from deberta_ds.tokenizer.text import BadTextError, letter_share, normalize

    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # not Python of this version: templates, Python 2
    for node in ast.walk(tree):
        if isinstance(node, owners) and (raw := ast.get_docstring(node)):
            lines = [line for line in raw.splitlines() if not line.lstrip().startswith(
                (">>>", "..."))]
            try:
                text = normalize("\n".join(lines))
            except BadTextError:
                continue  # an escaped surrogate in a docstring: not text
            if len(text) >= MIN_CHARACTERS and letter_share(text) >= MIN_LETTER_SHARE:
                yield f"{_module(path)}.{getattr(node, 'name', '__doc__')}", text


def _module(path: str) -> str:
    """Return the dotted name of a file: no directory of this machine in the corpus."""
    import sysconfig

    paths = sysconfig.get_paths()
    roots = [paths["purelib"], paths["platlib"], paths["stdlib"]]  # the last holds the others
    root = next((root for root in roots if Path(path).is_relative_to(root)), Path(path).parent)
    return ".".join(Path(path).relative_to(root).with_suffix("").parts)


def write(files: list[str], out: Path, max_bytes: int, heldout_share: float, workers: int) -> str:
    """Write OUT/train.jsonl and OUT/heldout.jsonl of {"id", "text"}; return what was found."""
    from concurrent.futures import ProcessPoolExecutor

    from deberta_ds.corpus.tokenize import is_held_out

    seen: set[str] = set()
    counts, characters, duplicates = [0, 0], 0, 0
    with (atomic_path(out / "train.jsonl") as train, atomic_path(out / "heldout.jsonl") as heldout,
          open(train, "w", encoding="utf-8") as first,
          open(heldout, "w", encoding="utf-8") as second,
          ProcessPoolExecutor(workers) as pool):
        for found in pool.map(docstrings_of, [files[i:i + 64] for i in range(0, len(files), 64)]):
            for name, text in found:
                if text in seen:
                    duplicates += 1
                    continue
                seen.add(text)
                side = int(is_held_out(text, heldout_share))
                line = json.dumps({"id": name, "text": text}, ensure_ascii=False)
                (first, second)[side].write(line + "\n")
                counts[side] += 1
                characters += len(text)
            if characters >= max_bytes:
                pool.shutdown(cancel_futures=True)
                break
        if not all(counts):
            raise UserError(f"only {counts[0]} + {counts[1]} docstrings found in {len(files)} files"
                            " of this Python installation; use another corpus")
    return (f"{out}: {counts[0]:,} training and {counts[1]:,} held-out documents, "
            f"{characters / 1e6:.1f} M characters, {duplicates:,} duplicates left out")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=local, required=True,
                        help="directory for train.jsonl and heldout.jsonl")
    parser.add_argument("--max_bytes", type=positive, default=12_000_000,
                        help="stop after this size")
    parser.add_argument("--heldout_share", type=share, default=0.02,
                        help="share of held-out documents")
    parser.add_argument("--pinned", metavar="FILE",
                        help="use only six packages with much prose, in the versions of this "
                             "constraints file: the same corpus on every machine (default: all "
                             "installed packages)")
    add_workers(parser)
    args = parser.parse_args()
    files, notes = pinned_files(args.pinned) if args.pinned else (installed_files(), [])
    for note in notes:
        print(f"WARNING: {note}: the corpus differs from that of the pinned packages")
    print(write(files, Path(args.out), args.max_bytes, args.heldout_share, args.workers))


if __name__ == "__main__":
    exit_cleanly(main)
