"""Python code of a user's own, named in a file of ours: FILE.py:NAME, or FILE.py for all of it.

A relative path is looked up from the working directory. What is hashed are the bytes that run.
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import site
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from deberta_ds.base.errors import UserError

_FORM = re.compile(r"(?P<file>.*\.py)(:(?P<name>[^\W\d]\w*))?")


def is_own(value: str) -> bool:
    """Return whether an option's value is written FILE.py or FILE.py:NAME."""
    return _FORM.fullmatch(value) is not None


def split(value: str) -> tuple[str, str]:
    """Return (FILE.py, NAME or "") of a value that `is_own`."""
    found = _FORM.fullmatch(value)
    assert found is not None, value
    return found["file"], found["name"] or ""


def short_name(value: str) -> str:
    """Return what people call a part: NAME, or FILE without its .py; another value is its own."""
    if not is_own(value):
        return value
    file, name = split(value)
    return name or Path(file).stem


@cache  # a row may ask for the function that chooses its masks
def load(key: str, value: str, takes: tuple[str, ...] = ()) -> Any:
    """Return what `value`, FILE.py or FILE.py:NAME, names; `key` is the option that holds it.

    UserError if it cannot be loaded or, with `takes`, is no function of these arguments.
    """
    file, name = split(value)
    module, _ = _module(key, file)
    if not name:
        return module
    found = getattr(module, name, None)
    if found is None:
        raise UserError(f"{key}: {file} has no {name}; define it there, or name another")
    if takes:
        wanted = f"{name}({', '.join(takes)})"
        if not callable(found):
            raise UserError(f"{key}: {name} of {file} is no function; write {wanted} there")
        try:
            inspect.signature(found).bind(*takes)
        except ValueError:  # of a built-in
            raise UserError(f"{key}: {name} of {file} is built in, and does not say what it takes; "
                            f"write {wanted} there, which calls it") from None
        except TypeError as error:
            raise UserError(f"{key}: {name} of {file} is called as {wanted}, and takes "
                            f"{inspect.signature(found)} ({error}); change its arguments") from None
    return found


class OwnCodeError(UserError):
    """A function of the user's own has failed, or returned what it must not."""


def call(function: Callable, name: str, text: str) -> Any:
    """Return `function(text)`; OwnCodeError for what it raises, with the line."""
    try:
        return function(text)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise OwnCodeError(f"{name} failed on this document: {type(error).__name__}: {error} "
                           f"({frame.filename}, line {frame.lineno})") from error


def digest(key: str, value: str) -> str:
    """Return the sha256 of the file that `value` names, as it was loaded."""
    return _module(key, split(value)[0])[1]


_LOADED: dict[str, tuple[ModuleType, str]] = {}  # by real path: a file runs once in a run


def forget() -> None:
    """Read files of one's own again, at the next run of this process."""
    _LOADED.clear()
    load.cache_clear()


def _module(key: str, file: str) -> tuple[ModuleType, str]:
    real, path = os.path.realpath(file), Path(file)
    if real in _LOADED:
        return _LOADED[real]
    if not path.is_file():
        raise UserError(f"{key}: {file}: no such file in {Path.cwd()}; write its path from there, "
                        "or a whole one")
    source = path.read_bytes()
    sha256 = _digest(source, {file})
    module = ModuleType(f"own_{path.stem}_{sha256[:12]}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        exec(compile(source, file, "exec"), vars(module))
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise UserError(f"{key}: {file} cannot be loaded ({type(error).__name__}: {error}); "
                        "fix it") from error
    _LOADED[real] = module, sha256
    return module, sha256


def _digest(source: bytes, seen: set[str]) -> str:
    """Return the sha256 of code, and of the modules that it imports from outside of the installed
    packages, if there are any.
    """
    digest = hashlib.sha256(source)
    for name in _imported(source):
        with suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
            file = spec.origin if spec else None
            if file and file.endswith(".py") and file not in seen and not _is_installed(file):
                seen.add(file)
                digest.update(f"{name} {_digest(Path(file).read_bytes(), seen)}".encode())
    return digest.hexdigest()


def _imported(source: bytes) -> list[str]:
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):  # said when it is run
        return []
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return sorted(names)


def _is_installed(file: str) -> bool:
    """Return whether a module belongs to Python, an installed package or this project."""
    path = os.path.realpath(file)
    roots = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]), *site.getsitepackages()}
    return any(path.startswith(os.path.realpath(root) + os.sep) for root in roots)


# The parts of a run that may be code of one's own (docs/how-to/extend.md): how they are called.
_TAKES = {
    "optim.schedule": ("step", "total_steps", "optim"),
    "optim.name": ("groups", "optim"),
    "objective.mask.selection": ("ids", "starts", "lengths", "budget", "rng"),
    "evaluate.metrics": ("total", "per_token"),
    "train.after_update": ("optimizer", "step"),
    "train.after_save": ("directory", "step"),
    "log.callbacks": ("record",),
}


def function(key: str, value: str) -> Callable:
    """Return the function that `value` of the option `key` names; UserError if it cannot be."""
    return load(key, value, _TAKES[key])


def problems(run: Any) -> list[str]:
    """Return what is wrong with a run's functions; its objective says so by itself."""
    found = []
    # Those that are only told of a run may be edited on the way: they are in no digest.
    told = [("train.after_save", one) for one in run.train.after_save]
    told += [("log.callbacks", one) for one in run.log.callbacks]
    for key, value in (*_functions(run), *told):
        try:
            function(key, value)
        except UserError as error:
            found.append(str(error))
    return found


def digests(run: Any) -> dict[str, str]:
    """Return {FILE.py:NAME: sha256 of the file} of all code of one's own that a run uses."""
    used = _functions(run)
    if is_own(run.objective.kind):
        used.append(("objective.kind", run.objective.kind))
    return {value: digest(key, value) for key, value in used}


def check_same(run: Any, known: Mapping[str, str], place: str) -> None:
    """Raise UserError if code of one's own that decides what a model computes or is scored by is
    not what it was when the checkpoint at `place` was saved, with the digests `known`.
    """
    unused = (run.optim.schedule, run.optim.name, *run.train.after_update)  # of training alone
    for value, digest in digests(run).items():
        if value not in unused and known.get(value, digest) != digest:
            raise UserError(f"{split(value)[0]}: has changed since {place} was saved (sha256 "
                            f"{known[value][:12]}..., now {digest[:12]}...); put the former file "
                            "there")


def _functions(run: Any) -> list[tuple[str, str]]:
    used = [("optim.schedule", run.optim.schedule), ("optim.name", run.optim.name),
            ("objective.mask.selection", run.objective.mask.selection),
            *(("train.after_update", value) for value in run.train.after_update),
            *(("evaluate.metrics", value) for value in run.evaluate.metrics)]
    return [(key, value) for key, value in used if is_own(value)]
