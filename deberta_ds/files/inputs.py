"""Opening inputs: local or remote (fsspec), plain or compressed, or streamed from the Hub."""

import bz2
import codecs
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import zstandard

from deberta_ds.base.errors import UserError, first_line, of_extra, refuse_pipe
from deberta_ds.files.remote import file_system, remote_state, state_of, tried

COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".lz4")
_REMOTE_BYTES = 1 << 22
_MOST_BYTES = 1 << 22
_CHUNK_BYTES = 1 << 17
_PARTS = 16  # read of a remote file between two looks at its version
_LONGEST_WINDOW = 1 << 31  # of zstd --long=31


def suffix_of(path: str | Path) -> str:
    """Return the suffix that tells the kind of a file, in lower case: of a.CSV.gz it is .csv."""
    path = Path(path)
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def is_compressed(path: str | Path) -> bool:
    """Return whether a file's name says that it is compressed."""
    return str(path).lower().endswith(COMPRESSED_SUFFIXES)


def open_bytes(path: str):
    """Open for reading bytes, decompressing by suffix; local files without detour.

    UserError if a file whose name does not say so is compressed.
    """
    refuse_pipe(path)
    if "://" in path:
        file = _Streamed if path.startswith("http") else _RemoteFile  # not all servers give parts
        raw: Any = io.BufferedReader(file(path), _REMOTE_BYTES)
    else:
        raw = open(path, "rb")
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _FRAMES:
        return io.BufferedReader(_Frames(raw, _FRAMES[suffix]), 1 << 20)
    if suffix == ".lz4":
        with of_extra("archives", path):
            import lz4.frame
        return lz4.frame.LZ4FrameFile(raw)
    if raw.seekable():  # a part may be read of it: no whole buffer of a remote file's front
        head = raw.raw.read(6)
        raw.raw.seek(0, os.SEEK_SET)
    else:
        head = raw.peek(6)
    for form, mark in _MARKS.items():
        if head.startswith(mark):
            raw.close()
            raise UserError(f"{path}: is compressed; rename it to {os.path.basename(path)}{form}")
    return raw


def open_seekable(path: str):
    """As `open_bytes`, for formats that are not read in order: in memory if compressed."""
    file = open_bytes(path)
    if file.seekable():
        return file
    with file:
        return io.BytesIO(file.read())


class _RemoteFile(io.RawIOBase):
    """A remote file read by parts, each tried again where a connection breaks; all of one version.
    """

    _parts = 0

    def __init__(self, url: str):
        self._url, self._position, (self._system, self._path) = url, 0, file_system(url)
        detail = tried(lambda: self._system.info(self._path), url,
                       lambda info: info["size"] is not None)
        self._size, self._state = detail["size"], state_of(detail)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer) -> int:
        begin, end = self._position, min(self._position + len(buffer), self._size)
        if begin >= end:
            return 0
        data = tried(lambda: self._system.cat_file(self._path, start=begin, end=end), self._url,
                     lambda data: len(data) == end - begin)
        buffer[: len(data)] = data
        self._position = end
        self._parts += 1
        is_time = end == self._size or self._parts % _PARTS == 0
        if is_time and remote_state(self._url) != self._state:
            raise UserError(f"{self._url}: changed while this command read it; when nothing writes "
                            "to it any more, run the same command again")
        return len(data)


class _Streamed(_RemoteFile):
    """A remote file read from its front to its end. Where a connection breaks, the server is asked
    for the rest; what one without parts sends again is skipped.
    """

    _answer: Any = None
    _version: tuple | None = None

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer) -> int:
        if self._position >= self._size:
            return 0
        data = tried(lambda: self._next(len(buffer)), f"{self._url}, byte {self._position}", bool)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _next(self, count: int) -> bytes:
        try:
            if self._answer is None:
                self._ask()
            if data := self._answer.read(count):
                return data
            raise EOFError(f"it ends before byte {self._size}")
        except Exception:
            if self._answer is not None:
                self._answer.close()
            self._answer = None
            raise

    def _ask(self) -> None:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={self._position}-"}
        self._answer = self._system.open(self._path, "rb", block_size=0, size=self._size,
                                         headers=headers)
        version = tuple(map(self._answer.r.headers.get, ("ETag", "Last-Modified")))
        if version != (self._version or version):
            raise UserError(f"{self._url}: changed while this command read it; run it again")
        left, self._version = self._position * (self._answer.r.status != 206), version
        while left and (data := self._answer.read(min(left, _REMOTE_BYTES))):
            left -= len(data)


class _Frames(io.RawIOBase):
    """A compressed file that is read from its front to its end."""

    def __init__(self, raw, new_frame: Callable):
        self._raw, self._blocks = raw, _blocks(raw, new_frame)
        self._ready, self._given = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._given

    def readinto(self, buffer) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        self._given += count
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _blocks(raw, new_frame: Callable) -> Iterator[bytes]:
    """Yield what is in a compressed file of one frame or more, as `cat a.xz b.xz` makes it.

    The readers of zstandard, lzma and bz2 take what is damaged behind the first frame for its end.
    """
    rest, is_empty = b"", True
    while rest := rest or raw.read(_CHUNK_BYTES):
        if not (rest := rest.lstrip(b"\0")):  # gzip and xz may be padded
            continue
        frame, is_empty = new_frame(), False
        # All but zstd give no more than they are asked for; a block of zeros is 2 GB to bz2.
        limit = (_MOST_BYTES,) if hasattr(frame, "needs_input") else ()
        while not frame.eof:
            is_asking = not limit or frame.needs_input
            given = (rest or raw.read(_CHUNK_BYTES)) if is_asking else b""
            rest, block = b"", frame.decompress(given, *limit)
            if is_asking and not (given or block or frame.eof):
                raise EOFError("it has no end")
            yield block
        rest = frame.unused_data
    if is_empty:
        raise EOFError("nothing is in it")


class _GzipFrame:
    """zlib's decompressor with the interface of those of lzma and bz2."""

    def __init__(self):
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def __getattr__(self, name: str) -> Any:  # eof, unused_data
        return getattr(self._zlib, name)

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    def decompress(self, data: bytes, limit: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, limit)


_FRAMES: dict[str, Callable] = {
    ".gz": _GzipFrame, ".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()}
_MARKS = {".gz": b"\x1f\x8b\x08", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\0"}


def is_json_list(path: str) -> bool:
    """Return whether a .json file is one list over all of the file, not a value per line."""
    if suffix_of(path) != ".json":
        return False
    with open_bytes(path) as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def line_number(path: str, offset: int) -> int:
    """Return the 1-based line in which byte `offset` of the (decompressed) file lies."""
    lines, left = 1, offset
    with open_bytes(path) as file:
        while left > 0 and (chunk := file.read(min(left, 1 << 22))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
    return lines


def revision_of(name: str) -> str:
    """Return the commit of a dataset of the Hub, which all of a job reads; "" where none is known.
    """
    from huggingface_hub import HfApi

    path, _, _ = _hub_parts(name)
    if os.path.exists(path):
        return ""
    with suppress(OSError, ValueError):  # said by whoever opens it
        return HfApi().dataset_info(path).sha or ""
    return ""


def _hub_parts(name: str) -> tuple[str, str | None, str | None]:
    match = re.fullmatch(r"hub:([^@#]+)(?:@([^#]+))?(?:#(.+))?", name)
    if match is None:
        raise UserError(f"{name}: write hub:NAME, hub:NAME@CONFIG or hub:NAME@CONFIG#SPLIT")
    path, config, split = match.groups()
    return path, config, split


def open_stream(name: str, revision: str = ""):
    """Return a dataset of the Hub at a commit ("": the newest) as a stream."""
    import datasets

    path, config, split = _hub_parts(name)
    try:
        return datasets.load_dataset(path, config, split=split or "train", streaming=True,
                                     revision=revision or None)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be opened ({first_line(error)})") from error
