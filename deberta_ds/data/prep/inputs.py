"""Opening inputs: local or remote (fsspec), plain or compressed, or streamed from the Hub."""

import bz2
import gzip
import io
import lzma
import re

import fsspec
import zstandard

from deberta_ds.errors import UserError, refuse_pipe

COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".lz4")
_LONGEST_WINDOW = 1 << 31  # of zstd --long=31


def open_bytes(path: str):
    """Open for reading bytes, decompressing by suffix; local files without detour."""
    refuse_pipe(path)
    raw = _open_remote(path) if "://" in path else open(path, "rb")
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(raw), 1 << 20)
    if path.endswith(".xz"):
        return lzma.LZMAFile(raw)
    if path.endswith(".bz2"):
        return bz2.BZ2File(raw)
    return _open_lz4(raw, path) if path.endswith(".lz4") else raw


def _open_remote(path: str):
    try:
        return fsspec.open(path, "rb").open()
    except ImportError as error:
        raise UserError(f"{path}: needs another package: {error}") from error


def _open_lz4(raw, path: str):
    try:
        import lz4.frame
    except ImportError as error:
        raise UserError(f"{path}: needs the package lz4: pip install lz4") from error
    return lz4.frame.LZ4FrameFile(raw)


class _ZstdFile(io.RawIOBase):
    """A .zst file of any number of frames; unlike zstandard.open it notices a missing end."""

    def __init__(self, raw):
        self._raw, self._ready = raw, b""
        self._frame, self._inside = _zstd_frame(), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            chunk = b""
            if self._frame.eof:
                chunk = self._frame.unused_data
                self._frame, self._inside = _zstd_frame(), False
            chunk = chunk or self._raw.read(1 << 17)
            if not chunk:
                if self._inside:
                    raise EOFError("the last zstd frame has no end")
                return 0
            self._ready, self._inside = self._frame.decompress(chunk), True
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _zstd_frame():
    return zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()


def line_number(path: str, offset: int) -> int:
    """Return the 1-based line in which byte `offset` of the (decompressed) file lies."""
    lines, left = 1, offset
    with open_bytes(path) as file:
        while left > 0 and (chunk := file.read(min(left, 1 << 22))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
    return lines


def open_stream(name: str):
    import datasets

    match = re.fullmatch(r"hub:([^@#]+)(?:@([^#]+))?(?:#(.+))?", name)
    if match is None:
        raise UserError(f"{name}: write hub:NAME, hub:NAME@CONFIG or hub:NAME@CONFIG#SPLIT")
    path, config, split = match.groups()
    try:
        return datasets.load_dataset(path, config, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be opened ({str(error).splitlines()[0]})") from error
