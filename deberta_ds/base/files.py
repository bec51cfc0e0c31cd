"""Files written whole or not at all, checksums, and JSON that somebody else may have written.

A reader never sees half a file: data goes to a temporary name in the same directory, is flushed to
disk, and is then renamed over the final name.

The one parser of JSON takes nothing for good that is not. It rejects, beyond what `json` rejects, a
key that is written twice (Python would take the last one), NaN and infinities (JSON has none),
numbers that overflow, half characters, brackets without end.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from deberta_ds.base.errors import UserError, naming

MANIFEST = "manifest.json"  # what a directory of shards holds, with its checksums
_HOST = f"{zlib.crc32(socket.gethostname().encode()) % 0x1000:03x}"
_OLD_SECONDS = 60.0  # of a file of another host, whose lock may not be seen from here
_LARGEST = 1 << 100  # what a double, and so every computation with it, takes without overflow
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries in Rust pass one on


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success fsync it and rename it to `path`.

    An OSError of the writing names `path`.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # it would be replaced, by a rename
        raise UserError(f"{path}: is a device or a pipe; name a file to write")
    if not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # which names the parent
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    # Process ids repeat on other hosts and in containers, which may write the same file.
    temporary = path.with_name(f".{path.name}.{_HOST}{os.urandom(3).hex()[1:]}.tmp")
    try:
        _remove_leftovers(path.parent)
        with _new_and_locked(temporary) as begun:
            yield temporary
            mode = os.fstat(begun.fileno()).st_mode
            with open(temporary, "rb+") as file:
                if os.fstat(file.fileno()).st_mode != mode:  # safetensors puts its own, of 0600
                    os.fchmod(file.fileno(), mode & 0o777)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # a write to an open file names none
            error.filename = str(path)
        raise
    except Exception as error:
        if found := _OS_ERROR.search(str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    finally:
        with suppress(OSError):  # a directory that went away says more by the first error
            temporary.unlink(missing_ok=True)


def _new_and_locked(path: Path) -> BinaryIO:
    while True:
        file = open(path, "xb")
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # a leftover to who looked before it was locked


@cache
def _remove_leftovers(directory: Path) -> None:
    """Remove what killed processes have left of `atomic_path` here: nobody holds its lock."""
    for old in directory.glob(".*.????????.tmp"):
        with suppress(OSError), open(old, "rb") as file:
            age = time.time() - os.fstat(file.fileno()).st_mtime
            if old.name[-12:-9] == _HOST or age > _OLD_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                old.unlink()


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


class ReadFile(NamedTuple):
    """A file as it was read, once: who uses it, names it and copies it means these bytes."""

    path: Path
    data: bytes

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the file, without its directory."""
        return self.path.name


def read_file(path: str | Path) -> ReadFile:
    """Return a whole file; UserError names it."""
    with naming(path):
        return ReadFile(Path(path), Path(path).read_bytes())


def cache_directory(path: str | Path) -> Path:
    """Return `path` of a cache, where "~" is the home directory if that can be written.

    Else, as for the user without a name of a container, it is this user's temporary directory.
    """
    path = Path(path)
    with suppress(RuntimeError, OSError):  # no home directory, or one that cannot be written
        found = path.expanduser()
        if found == path:
            return path
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK):
            return found
    return temporary_directory() / path.name


def temporary_directory() -> Path:
    """Return this user's directory among the node's temporary files."""
    path = Path(tempfile.gettempdir(), f"deberta_ds-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise UserError(f"{path} belongs to another user, who could change what is in it; set "
                        "TMPDIR to a directory of your own")
    return path


def link(path: Path, to: Path) -> None:
    """Give a file a second name; a copy of it on another file system, or one without hard links."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def sync_directory(path: str | Path) -> None:
    """Make renames inside directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def xxh3(path: str | Path) -> str:
    """Return the xxh3-128 checksum of a file as 32 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Return the value of JSON text (bytes: UTF-8, a byte order mark may lead); else ValueError.

    `strict=False` leaves NaN, infinities and half characters to a caller who can name their key.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_int=_whole_number,
                            parse_constant=_refuse if strict else None,
                            parse_float=_finite if strict else None)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
    # The half of a pair: no file name and no output takes it.
    if strict and ("\\ud" in text or "\\uD" in text):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, {error.object[error.start]!a}") from None
    return values


def read_json(path: str | Path | ReadFile) -> dict:
    """Return the JSON object of a file; UserError if it is missing, damaged or something else."""
    try:
        file = path if isinstance(path, ReadFile) else read_file(path)
        values = parse_json(file.data)
    except UserError as error:
        raise UserError(f"{path}: cannot be read ({str(error).removeprefix(f'{path}: ')})"
                        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values


def typed(form: Any, values: Any) -> Any:
    """Return JSON values as a dataclass (or another type), strict about types; else ValueError."""
    from pydantic import ValidationError

    try:
        return _adapter(form).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


@cache
def _adapter(form: Any) -> Any:
    """Return what checks a form: it takes 5 ms to make, and a mixture opens many manifests."""
    from pydantic import TypeAdapter

    return TypeAdapter(form)


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Return {"section.key": value} for nested tables; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'"{twice}" is written twice')
    return found


def _refuse(text: str):
    raise ValueError(f"{text} is no number of JSON")


def _whole_number(text: str) -> int:
    """Return the number of JSON's digits; ValueError where no double takes it."""
    if len(text) > 40 or abs(int(text)) > _LARGEST:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return value
