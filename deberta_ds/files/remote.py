"""Files and directories on anything that fsspec opens (s3://, gs://, https://, file://)."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from deberta_ds.base.errors import UserError, first_line, refuse_pipe
from deberta_ds.base.files import (
    MANIFEST,
    atomic_path,
    cache_directory,
    read_file,
    read_json,
    write_atomic,
)

BLOCKS = "blocks"  # of a corpus: how it is read in parts, see data/remote.py
TRIES = 8
FIRST_WAIT_SECONDS = 0.1  # doubled at each try: 13 s in all


@dataclass(frozen=True)
class Cache:
    """Where blocks are kept on this host, and how much of them; 0: all that are read."""

    directory: str = "~/.cache/deberta_ds"
    gigabytes: float = 0.0


DEFAULT_CACHE = Cache()


def file_system(url: str):
    """Return (file system, path in it). s3:// needs no package where s3fs is not installed: Arrow
    has a client (AWS_ENDPOINT_URL names another server than Amazon's).
    """
    try:
        options: dict[str, Any] = {}
        if url.startswith("http"):  # whose client allows five minutes for all of a file
            from aiohttp import ClientTimeout

            options["client_kwargs"] = {
                "timeout": ClientTimeout(total=None, sock_connect=60, sock_read=60)}
        system, path = fsspec.core.url_to_fs(url, **options)
        return _Files() if type(system) is LocalFileSystem else system, path
    except ImportError as error:
        if url.startswith("s3://"):
            return _arrow_s3(), url.removeprefix("s3://").rstrip("/")
        raise UserError(f"{url}: needs another package: {error}") from error
    except ValueError as error:  # an unknown protocol
        raise UserError(f"{url}: {error}") from error


def stamp_of(status: os.stat_result) -> str:
    """Return how a local file looks from outside."""
    return (f"{status.st_size} bytes of {status.st_mtime_ns}, inode {status.st_ino}, changed "
            f"{status.st_ctime_ns}")


def state_of(detail: dict) -> str:
    """Return how a file looks from outside, of what its file system says of it."""
    known = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
    return f"{detail['size']} bytes, " + ", ".join(str(detail[key]) for key in known
                                                   if key in detail)


def remote_state(url: str) -> str:
    """Return `state_of` the file that is at a URL now."""
    system, path = file_system(url)
    system.invalidate_cache()
    try:
        return tried(lambda: state_of(system.info(path)), url, bool)
    except FileNotFoundError:
        return "nothing"


def listed_at(url: str) -> tuple[Any, str, dict[str, dict]]:
    """Return the file system and the path of a URL, and all files there; UserError names `url`."""
    found: dict[str, dict] = {}
    with reached(url, "cannot be listed", "check the address and the credentials"):
        system, root = file_system(url)
        system.invalidate_cache()
        with suppress(FileNotFoundError):
            found = system.find(root, detail=True)
    return system, root, found


@contextmanager
def reached(url: str, problem: str, remedy: str) -> Iterator[None]:
    """Context in which whatever a file system raises is a UserError: each has errors of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{url}: {problem} ({type(error).__name__}: {first_line(error)}); {remedy}"
                        ) from error


def check_writable(url: str) -> None:
    """Write, list, read and remove a small file at `url`; UserError names `url`."""
    with reached(url, "must allow to write, list, read and delete files", "check the address and "
                 "the rights of the credentials, or choose another place"):
        system, root = file_system(url)
        place = f"{root}/check-{os.urandom(4).hex()}.tmp"
        system.makedirs(root, exist_ok=True)
        system.pipe_file(place, b"from --check")
        system.ls(root)
        system.cat_file(place)
        system.rm_file(place)


class _Files(LocalFileSystem):
    """Files of this host (file://), where opening a pipe would wait for ever."""

    def _open(self, path, *arguments, **options):
        refuse_pipe(path)
        return super()._open(path, *arguments, **options)


def _arrow_s3():
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import S3FileSystem

    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    scheme, _, host = endpoint.rpartition("://")
    options = {"endpoint_override": host, "scheme": scheme or "https"} if endpoint else {}

    class ArrowS3(ArrowFSWrapper):
        protocol = "s3"

        def cat_file(self, path, start=None, end=None, **_):  # the wrapper's own cannot seek
            with self.fs.open_input_file(path) as file:
                start, end = start or 0, file.size() if end is None else end
                return file.read_at(end - start, start)

    # A small file is then one request, not the three of an upload in parts.
    return ArrowS3(S3FileSystem(region=os.environ.get("AWS_REGION"), allow_delayed_open=True,
                                **options))


def tried(get: Callable[[], Any], name: str, is_whole: Callable[[Any], bool], what: str = "read"
          ) -> Any:
    """Return what `get` returns once it is whole, in several tries; UserError names `name`.

    FileNotFoundError is left to the caller.
    """
    wait, problem = FIRST_WAIT_SECONDS, ""
    for number in range(TRIES):
        try:
            found = get()
            if is_whole(found):
                return found
            problem = "damaged: it differs from its checksum or size; put it there again"
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:  # each file system has errors of its own
            problem = f"{type(error).__name__}: {first_line(error)}"
        if number < TRIES - 1:
            time.sleep(wait * random.uniform(0.5, 1.0))  # ranks shall not all ask at once
            wait *= 2
    raise UserError(f"{name}: cannot be {what} in {TRIES} tries ({problem}); check the connection "
                    "and the credentials, and run the same command again")


def fetch(url: str, *, cache: str = DEFAULT_CACHE.directory, names: tuple[str, ...] = ("*",)
          ) -> str:
    """Return the local copy of what is at a URL (a local path is its own), with those of its files
    whose names match one of the patterns; nothing there is an empty directory.
    """
    if "://" not in url:
        return url
    url = url.rstrip("/")
    key = xxhash.xxh3_64_hexdigest(url.encode())
    local = cache_directory(cache) / "prepared" / key / url.rpartition("/")[2]
    system, root, found = listed_at(url)
    # What a manifest names is known by its checksum there; other files by their state at the URL.
    is_named = any(path.endswith(f"/{MANIFEST}") for path in found)
    states_file = local.parent / ".states.json"
    states = read_json(states_file) if states_file.is_file() and not is_named else {}
    fetched = {}
    for path, info in found.items():
        name, size = path[len(root) + 1 :], info["size"]
        target = local / name if name else local
        if name.startswith(f"{BLOCKS}/") or not any(fnmatch(name, one) for one in names):
            continue
        state = state_of(info)
        if not target.is_file() or target.stat().st_size != size or target.name == MANIFEST or not (
                is_named or states.get(name) == state):
            _get(system, path, target, size, url)
            fetched[name] = state
    if fetched and not is_named:
        now = listed_at(url)[2]
        for name, state in fetched.items():
            path = f"{root}/{name}" if name else root
            if path not in now or state_of(now[path]) != state:
                raise UserError(f"{url}: {name or 'it'} changed while it was fetched; run the same "
                                "command again")
        write_atomic(states_file, json.dumps(states | fetched))
    return str(local)


def _get(system, path: str, target: Path, size: int, url: str) -> None:
    """Fetch one file; whoever reads it holds its checksum against its manifest."""
    with atomic_path(target) as temporary:
        def get() -> int:
            system.get_file(path, str(temporary))
            return os.path.getsize(temporary)

        tried(get, f"{url}: {path}", lambda found: found == size)


def remote_bytes(system, path: str) -> bytes | None:
    """Return what is in a file of a file system, None if it cannot be read."""
    try:
        return system.cat_file(path)
    except Exception:  # each file system has errors of its own for what is not there
        return None


def put(system, path: str, data: bytes | Path) -> None:
    """Write bytes or a local file to a path of a file system, in several tries."""
    if isinstance(data, Path) and data.stat().st_size < 1 << 26:
        data = read_file(data).data

    def write() -> bool:
        if directory := os.path.dirname(path):
            system.makedirs(directory, exist_ok=True)
        if isinstance(data, bytes):
            system.pipe_file(path, data)
        else:
            system.put_file(str(data), path)
        return True

    with reached(path, "cannot be written", "run the same command again"):  # a bucket that is gone
        tried(write, path, bool, "written")
