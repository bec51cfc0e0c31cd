"""A corpus of real English that every machine has: the docstrings of its Python installation.

Files are parsed, never imported. Blocks of code inside docstrings (doctest lines) are left out. Of
packages in pinned versions alone, the corpus is the same on every machine that has them.
"""

import ast
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import xxhash
from tqdm import tqdm

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import atomic_path
from deberta_ds.corpus.tokenize import is_held_out
from deberta_ds.corpus.units import FORK
from deberta_ds.tokenizer.text import BadTextError, letter_share, normalise

MIN_CHARACTERS = 200
MIN_LETTER_SHARE = 0.7
_FILES_PER_TASK = 64
_DOCTEST = (">>>", "...")
_NOT_PROSE = {"test", "tests", "testing", "idlelib", "encodings", "lib2to3", "ensurepip", "pip"}
_PROSE_FIRST = ("numpy", "scipy", "sklearn", "pandas", "networkx", "matplotlib", "torch")
# Pinned packages with much prose, whose files are the same for every machine (torch's are not).
_PINNED_PROSE = ("numpy", "scipy", "scikit-learn", "pandas", "networkx", "matplotlib")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def installed_python_files() -> list[str]:
    """Return the .py files of the standard library, then of the installed packages, in order:
    first the packages whose docstrings are longest (fewer files to parse), then the rest by name.
    """
    paths = sysconfig.get_paths()
    found = list(_python_files(paths["stdlib"], _NOT_PROSE | {"site-packages", "dist-packages"}))
    packages: list[tuple[int, str]] = []
    for directory in sorted({paths["purelib"], paths["platlib"]}):
        for path in _python_files(directory, _NOT_PROSE):
            package = os.path.relpath(path, directory).split(os.sep)[0]
            first = package in _PROSE_FIRST
            packages.append((_PROSE_FIRST.index(package) if first else len(_PROSE_FIRST), path))
    return found + [path for _, path in sorted(packages, key=lambda pair: pair[0])]


def pinned_python_files(constraints: str | Path) -> tuple[list[str], list[str]]:
    """Return the .py files of the _PINNED_PROSE of a constraints file, and what is not as pinned.

    The standard library is not among them: it differs by version of Python.
    """
    lines = Path(constraints).read_text(encoding="utf-8").splitlines()
    pins = {pin[1]: pin[2] for line in lines if (pin := _PIN.fullmatch(line.strip()))}
    files, notes = [], []
    for name in _PINNED_PROSE:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            notes.append(f"{name} is not installed")
            continue
        if package.version != pins.get(name):
            notes.append(f"{name} is {package.version}, not {pins.get(name, 'pinned')}")
        found = sorted(file.parts for file in package.files or [] if file.suffix == ".py"
                       and not _NOT_PROSE & set(file.parts) and ".." not in file.parts)
        files += [str(package.locate_file("/".join(parts))) for parts in found]
    return files, notes


def write_docstrings(files: list[str], out: str | Path, *, max_bytes: int, heldout_share: float,
                     workers: int) -> dict[str, int]:
    """Write OUT/train.jsonl and OUT/heldout.jsonl of {"id", "text"}; return counts.

    Stops after about `max_bytes` of text. Exact duplicates are left out. UserError if nothing is
    found.
    """
    counts = {"files": 0, "train": 0, "heldout": 0, "duplicates": 0, "characters": 0}
    tasks = [files[i : i + _FILES_PER_TASK] for i in range(0, len(files), _FILES_PER_TASK)]
    seen: set[int] = set()
    out = Path(out)
    with (atomic_path(out / "train.jsonl") as train_path,
          atomic_path(out / "heldout.jsonl") as heldout_path,
          open(train_path, "w", encoding="utf-8") as train,
          open(heldout_path, "w", encoding="utf-8") as heldout,
          tqdm(total=max_bytes, desc="docstrings", unit="B", unit_scale=True, disable=None) as bar,
          ProcessPoolExecutor(workers, FORK) as pool):
        for found in pool.map(docstrings_of, tasks):
            counts["files"] += _FILES_PER_TASK
            for name, text in found:
                digest = xxhash.xxh3_128_intdigest(text.encode())
                if digest in seen:
                    counts["duplicates"] += 1
                    continue
                seen.add(digest)
                part = "heldout" if is_held_out(text, heldout_share) else "train"
                line = json.dumps({"id": name, "text": text}, ensure_ascii=False)
                (heldout if part == "heldout" else train).write(line + "\n")
                counts[part] += 1
                counts["characters"] += len(text)
            bar.update(min(counts["characters"], max_bytes) - bar.n)
            if counts["characters"] >= max_bytes:
                pool.shutdown(cancel_futures=True)
                break
        counts["files"] = min(counts["files"], len(files))
        if not (counts["train"] and counts["heldout"]):
            raise UserError(f"only {counts['train']} + {counts['heldout']} docstrings found in "
                            f"{len(files)} files of this Python installation; use another corpus")
    return counts


def docstrings_of(paths: list[str]) -> list[tuple[str, str]]:
    """Return (name, normalised text) of the docstrings of some files that are long and English."""
    return [pair for path in paths for pair in _file_docstrings(path)]


def _file_docstrings(path: str) -> Iterator[tuple[str, str]]:
    data = Path(path).read_bytes()
    if b'"""' not in data and b"'''" not in data:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return  # not Python of this version: templates, Python 2
    for node in ast.walk(tree):
        if isinstance(node, _OWNERS) and (raw := ast.get_docstring(node)):
            lines = [line for line in raw.splitlines() if not line.lstrip().startswith(_DOCTEST)]
            try:
                text = normalise("\n".join(lines))
            except BadTextError:
                continue  # an escaped surrogate in a docstring: not text
            if len(text) >= MIN_CHARACTERS and letter_share(text) >= MIN_LETTER_SHARE:
                yield f"{_module(path)}.{getattr(node, 'name', '__doc__')}", text


def _module(path: str) -> str:
    """Return the dotted name of a file: no directory of this machine in the corpus."""
    paths = sysconfig.get_paths()
    roots = [paths["purelib"], paths["platlib"], paths["stdlib"]]  # the last holds the others
    root = next((root for root in roots if Path(path).is_relative_to(root)), Path(path).parent)
    return ".".join(Path(path).relative_to(root).with_suffix("").parts)


def _python_files(directory: str, skipped: set[str]) -> Iterator[str]:
    for base, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if name not in skipped)
        yield from (os.path.join(base, name) for name in sorted(names) if name.endswith(".py"))
