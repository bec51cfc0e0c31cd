"""Corpora on anything that fsspec opens (s3://, gs://, https://, file://), read block by block.

A row of a remote corpus needs a few blocks of 128 KiB. Each is fetched once, written to its place
in a sparse local file and checked against its checksum every time it is read from there. So there
is no list of what is present: what is missing, cut short, evicted or half written after a crash
differs from its checksum and is fetched (again), and the processes of a host share the files
without locks. Where reading takes long, the loader's threads read the rows that come next.

    URL/blocks/manifest.json      block size, and {file: [bytes, xxh3-128 of its checksums]}
    URL/blocks/FILE               u64 xxh3 of each block of FILE
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import xxhash
from pydantic import NonNegativeInt

from deberta_ds.base.errors import UserError, naming, refuse_pipe
from deberta_ds.base.files import (
    MANIFEST,
    cache_directory,
    parse_json,
    read_file,
    typed,
    write_atomic,
)
from deberta_ds.files.remote import BLOCKS, Cache, file_system, put, remote_bytes, tried

BLOCK_BYTES = 1 << 17
_BLOCKS_BETWEEN_COUNTS = 256


@dataclass(frozen=True)
class _Blocks:
    """What blocks/manifest.json says; files {name: (bytes, xxh3-128 of its checksums)}."""

    version: int
    block_bytes: int
    files: dict[str, tuple[NonNegativeInt, str]]


@cache
def _system_of_process(url: str, process: int) -> tuple:
    """Return `file_system`, one for each process: clients do not survive a fork."""
    return file_system(url)


class RemoteCorpus:
    """A corpus at a URL, and its local files.

    Attributes: directory, which has the manifests at once and the shards block by block.
    """

    def __init__(self, url: str, cache: Cache):
        """Fetch the corpus's manifest and the one of its blocks; UserError if there is none."""
        self.url, self._cache = url.rstrip("/"), cache
        root = cache_directory(cache.directory)
        self.directory = root / xxhash.xxh3_64_hexdigest(self.url.encode())
        self._sums: dict[str, np.ndarray] = {}
        self._written = 0
        self.fetch(MANIFEST)
        data = self.fetch(f"{BLOCKS}/{MANIFEST}")
        try:
            blocks = typed(_Blocks, parse_json(data))
        except ValueError as error:
            raise UserError(f"{self.url}/{BLOCKS}/{MANIFEST}: damaged ({error}); upload the corpus "
                            "again") from None
        if blocks.block_bytes != BLOCK_BYTES:
            raise UserError(f"{url}: blocks of another version of data_prep/upload.py; upload the "
                            "corpus again")
        self._files = blocks.files

    def fetch(self, name: str) -> bytes:
        """Return a small file and write it to its place in the directory."""
        data = self._get(name, None, None, _is_json)
        path = self.directory / name
        if not path.exists() or read_file(path).data != data:
            write_atomic(path, data)
        return data

    def read(self, path: str, offset: int, count: int) -> bytes:
        """Return `count` bytes of a local file from `offset`, fetching the blocks that miss."""
        name = str(Path(path).relative_to(self.directory))
        first, last = offset // BLOCK_BYTES, (offset + count - 1) // BLOCK_BYTES
        data = b"".join(self._block(name, path, number) for number in range(first, last + 1))
        begin = offset - first * BLOCK_BYTES
        if len(data) < begin + count:
            raise UserError(f"{self.url}/{name}: ends before byte {offset + count}; upload the "
                            "corpus again")
        return data[begin : begin + count]

    def _block(self, name: str, path: str, number: int) -> bytes:
        sums, size = self._checksums(name), self._files[name][0]
        begin, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)
        expected = int(sums[number]) if number < len(sums) else -1

        def is_whole(data: bytes) -> bool:
            return len(data) == end - begin and xxhash.xxh3_64_intdigest(data) == expected

        os.makedirs(os.path.dirname(path), exist_ok=True)
        refuse_pipe(path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            data = os.pread(file, end - begin, begin)
            if is_whole(data):
                return data
            data = self._get(name, begin, end, is_whole)
            os.pwrite(file, data, begin)
        finally:
            os.close(file)
        self._written += 1
        if self._cache.gigabytes and self._written % _BLOCKS_BETWEEN_COUNTS == 0:
            self._make_room()
        return data

    def _checksums(self, name: str) -> np.ndarray:
        found = self._sums.get(name)
        if found is None:
            if name not in self._files:
                raise UserError(f"{self.url}/{name}: not among what was uploaded; run data_prep/"
                                "upload.py again")
            digest = self._files[name][1]
            data = self._get(f"{BLOCKS}/{name}", None, None,
                             lambda data: xxhash.xxh3_128_hexdigest(data) == digest)
            self._sums[name] = found = np.frombuffer(data, "<u8")
        return found

    def _get(self, name: str, begin: int | None, end: int | None, is_whole) -> bytes:
        """Return bytes of a remote file, tried again where an answer is cut short or damaged."""
        def get() -> bytes:
            system, root = _system_of_process(self.url, os.getpid())
            return system.cat_file(f"{root}/{name}", start=begin, end=end)

        try:
            return tried(get, f"{self.url}/{name}", is_whole)
        except FileNotFoundError:
            raise UserError(f"{self.url}/{name}: no such file; upload the corpus with data_prep"
                            "/upload.py, or give the right address") from None

    def _make_room(self) -> None:
        """Empty files, least recently written first, until a fifth of the limit is free."""
        root, limit = self.directory.parent, self._cache.gigabytes * 1e9
        files = [(path, path.stat()) for path in root.rglob("*.npy")
                 if path.relative_to(root).parts[0] != "prepared"]  # of a job under way
        used = sum(512 * status.st_blocks for _, status in files)
        if used <= limit:
            return
        for path, status in sorted(files, key=lambda item: item[1].st_mtime):
            if used <= 0.8 * limit:
                return
            used -= 512 * status.st_blocks
            os.truncate(path, 0)  # whoever reads it now fetches its blocks again


def upload(corpus: str | Path, url: str) -> tuple[int, int]:
    """Copy a corpus to `url`, manifests last; return (files, those copied just now)."""
    corpus, (system, root) = Path(corpus), file_system(url)
    files, copied, total = _uploaded_before(corpus, system, root), 0, 0
    data_files = sorted(path for directory in ("tokens", "ends", "documents", "rows-*")
                        for path in corpus.glob(f"{directory}/*") if path.name[0] != "."
                        and path.name != MANIFEST)
    for path in data_files:
        name = path.relative_to(corpus).as_posix()
        sums = _block_sums(path)
        files[name] = (path.stat().st_size, xxhash.xxh3_128_hexdigest(sums))
        total += 1
        if remote_bytes(system, f"{root}/{BLOCKS}/{name}") == sums:
            continue
        put(system, f"{root}/{name}", path)
        put(system, f"{root}/{BLOCKS}/{name}", sums)
        copied += 1
    for pattern in (".job.json", "*/.job.json", "filters.*", f"*/{MANIFEST}", MANIFEST):
        for path in sorted(corpus.glob(pattern)):
            put(system, f"{root}/{path.relative_to(corpus).as_posix()}", path)
    text = json.dumps({"version": 1, "block_bytes": BLOCK_BYTES, "files": files}, sort_keys=True)
    put(system, f"{root}/{BLOCKS}/{MANIFEST}", text.encode())
    return total, copied


def _uploaded_before(corpus: Path, system, root: str) -> dict[str, tuple[int, str]]:
    """Return the files of the same corpus that are there: this copy may lack some row plans."""
    blocks = remote_bytes(system, f"{root}/{BLOCKS}/{MANIFEST}")
    same = remote_bytes(system, f"{root}/{MANIFEST}") == read_file(corpus / MANIFEST).data
    try:
        return typed(_Blocks, parse_json(blocks)).files if same and blocks else {}
    except ValueError:  # half of one, or damaged: written again
        return {}


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(parse_json(data), dict)
    except ValueError:
        return False


def _block_sums(path: Path) -> bytes:
    sums = []
    with naming(path), open(path, "rb") as file:
        while data := file.read(BLOCK_BYTES):
            sums.append(xxhash.xxh3_64_intdigest(data))
    return np.array(sums, "<u8").tobytes()
