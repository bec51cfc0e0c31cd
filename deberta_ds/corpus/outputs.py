"""Inputs and outputs of the prep commands that lie at a URL: worked on in a local directory.

A command that writes to a URL works in a directory of the cache that belongs to this URL alone, and
copies it there when it has finished, manifests last. What is at the URL already comes first: so a
finished job is known, another one is refused, and pack.py adds to a corpus. After an interruption
the same command goes on from the local directory, which may be removed once the copy is complete.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import xxhash

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import atomic_path, cache_directory, write_atomic
from deberta_ds.base.json_files import read_json
from deberta_ds.corpus.units import PLAN, Part, under_mpi
from deberta_ds.data import remote
from deberta_ds.data.shards import MANIFEST

CACHE = remote.DEFAULT_CACHE.directory
JOB = (PLAN, MANIFEST, "filters.*")  # what says which job a corpus is the output of


@contextmanager
def output(out: str, *, cache: str = CACHE, first: tuple[str, ...] = ("*",), part: Part = None
          ) -> Iterator[str]:
    """Context that yields where to write what `out` names: there, or locally if it is a URL.

    `first`: patterns of the files that are fetched from the URL before. UserError for jobs that
    share a directory.
    """
    if not remote.is_remote(out):
        yield out
        return
    if part or under_mpi():
        raise UserError(f"{out}: jobs that work together share a directory; give one that all of "
                        "them reach, and copy it with data_prep/upload.py afterwards")
    local = fetch(out, cache=cache, names=first)
    yield local
    _send(Path(local), out)


def check_outside(inputs: Iterable[str], *outs: str | None) -> None:
    """Raise UserError for an output inside of an input directory, which it would change."""
    for name, target in product(inputs, filter(None, outs)):
        where = Path(os.path.realpath(target))
        if "://" not in target and os.path.isdir(name) and (
                Path(os.path.realpath(name)) in (where, *where.parents)):
            raise UserError(f"{target}: lies in the input {name}, of which it would be a part "
                            "when the job goes on; choose a directory outside")


def fetch(url: str, *, cache: str = CACHE, names: tuple[str, ...] = ("*",)) -> str:
    """Return the local copy of what is at a URL (a local path is its own), with those of its files
    whose names match one of the patterns; nothing there is an empty directory.
    """
    if not remote.is_remote(url):
        return url
    url = url.rstrip("/")
    key = xxhash.xxh3_64_hexdigest(url.encode())
    local = cache_directory(cache) / "prepared" / key / url.rpartition("/")[2]
    system, root, found = remote.listed_at(url)
    # What a manifest names is known by its checksum there; other files by their state at the URL.
    is_named = any(path.endswith(f"/{MANIFEST}") for path in found)
    states_file = local.parent / ".states.json"
    states = read_json(states_file) if states_file.is_file() and not is_named else {}
    fetched = {}
    for path, info in found.items():
        name, size = path[len(root) + 1 :], info["size"]
        target = local / name if name else local
        if name.startswith(f"{remote.BLOCKS}/") or not any(fnmatch(name, one) for one in names):
            continue
        state = remote.state_of(info)
        if not target.is_file() or target.stat().st_size != size or target.name == MANIFEST or not (
                is_named or states.get(name) == state):
            _get(system, path, target, size, url)
            fetched[name] = state
    if fetched and not is_named:
        now = remote.listed_at(url)[2]
        for name, state in fetched.items():
            path = f"{root}/{name}" if name else root
            if path not in now or remote.state_of(now[path]) != state:
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

        remote.tried(get, f"{url}: {path}", lambda found: found == size)


def _send(local: Path, url: str) -> None:
    if (local / "tokens").is_dir():
        remote.upload(local, url)
        return
    system, root = remote.file_system(url)
    if local.is_file():
        remote.put(system, root, local)
        return
    files = [path for path in local.iterdir() if path.is_file()
             and (path.name == PLAN or not path.name.startswith("."))]
    for path in sorted(files, key=lambda path: (path.name == MANIFEST, path.name)):
        remote.put(system, f"{root}/{path.name}", path)
