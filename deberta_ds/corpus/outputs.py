"""Inputs and outputs of the prep commands that lie at a URL: worked on in a local directory.

A command that writes to a URL works in a directory of the cache that belongs to this URL alone, and
copies it there when it has finished, manifests last. What is at the URL already comes first: so a
finished job is known, another one is rejected, and pack.py adds to a corpus. After an interruption
the same command goes on from the local directory, which may be removed once the copy is complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import MANIFEST
from deberta_ds.corpus.units import PLAN, Part, under_mpi
from deberta_ds.data.remote import upload
from deberta_ds.files import remote
from deberta_ds.files.remote import fetch

CACHE = remote.DEFAULT_CACHE.directory
JOB = (PLAN, MANIFEST, "filters.*")  # what says which job a corpus is the output of


@contextmanager
def output(out: str, *, cache: str = CACHE, first: tuple[str, ...] = ("*",), part: Part = None
          ) -> Iterator[str]:
    """Context that yields where to write what `out` names: there, or locally if it is a URL.

    `first`: patterns of the files that are fetched from the URL before. UserError for jobs that
    share a directory.
    """
    if "://" not in out:
        yield out
        return
    if part or under_mpi():
        raise UserError(f"{out}: jobs that work together share a directory; give one that all of "
                        "them reach, and copy it with data_prep/upload.py afterwards")
    local = Path(fetch(out, cache=cache, names=first))
    yield str(local)
    if (local / "tokens").is_dir():
        upload(local, out)
        return
    system, root = remote.file_system(out)
    if local.is_file():
        remote.put(system, root, local)
        return
    files = [path for path in local.iterdir() if path.is_file()
             and (path.name == PLAN or not path.name.startswith("."))]
    for path in sorted(files, key=lambda path: (path.name == MANIFEST, path.name)):
        remote.put(system, f"{root}/{path.name}", path)
