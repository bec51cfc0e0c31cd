"""A tokenized, packed corpus opened for reading by row number.

Memory is O(shards), and a bounded number of small row plans; opening reads two manifests and no
data. A row is read with a few small reads at known places, from many threads, so that a failing or
missing file is one clear error. Memory maps would each keep a descriptor, touch 128 KiB around a
row of 1 KB, and turn an error of the file system into a killed process. One cache of open files
serves all corpora of a process; it leaves some of the limit of descriptors, which it raises first
as far as allowed.
"""

import errno
import os
import resource
import stat
import struct
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from deberta_ds.base.errors import UserError, naming
from deberta_ds.data.remote import RemoteCorpus
from deberta_ds.data.shards import (
    FRAME_TOKENS,
    MANIFEST,
    RowShardInfo,
    ShardInfo,
    check_file,
    files_of,
    plan_files_of,
    planned_lengths,
    read_manifest,
    read_rows_manifest,
    rows_directory,
)
from deberta_ds.files.remote import DEFAULT_CACHE, Cache

_MOST_DESCRIPTORS = 1 << 16
_lock = threading.Lock()
_APART_ROWS = 4  # segments that lie within so many rows of tokens are read at once


class Corpus:
    """Rows of one corpus at one sequence length.

    Attributes: path, seq_len, manifest, rows_manifest, num_rows, content_hash (hex; covers
    every byte through the checksums in both manifests).
    """

    def __init__(self, path: str | Path, *, seq_len: int, part: tuple[float, float] = (0.0, 1.0),
                 cache: Cache = DEFAULT_CACHE):
        """Open a finished corpus; UserError if it or its plan for `seq_len` is missing or stale.

        `part` (from, to) in [0, 1] opens only that part of the shards: stages of other lengths
        that take other parts share no token. Parts are cut from the shards ordered by a hash of
        their names, so that each is a sample of all inputs. `path` may be a URL where
        data_prep/upload.py has put the corpus.
        """
        self._remote = RemoteCorpus(str(path), cache) if "://" in str(path) else None
        self.path = self._remote.directory if self._remote else Path(path)
        self._read = self._remote.read if self._remote else read_bytes
        self._plans = SmallFiles(self._read)
        self.seq_len = seq_len
        try:
            self._read_manifests()
        except UserError as error:
            if self._remote is None:
                raise
            raise UserError(f"{self._remote.url}: {error}") from None  # else it names the cache
        self._shards = _part_of(
            list(zip(self.manifest.shards, self.rows_manifest.shards, strict=True)), part,
            self.path)
        if part != (0.0, 1.0):
            self.content_hash += f"[{part[0]}:{part[1]}]"
        counts = [rows.rows for _, rows in self._shards]
        self._cumulative = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_rows = int(self._cumulative[-1])
        if self.num_rows == 0:
            raise UserError(f"{self._rows_path}: the corpus has no sequences; prepare it from more "
                            "text")
        self._dtype = np.dtype(self.manifest.dtype)

    def _read_manifests(self) -> None:
        self._rows_path = rows_path = rows_directory(self.path, self.seq_len)
        self.manifest, self.corpus_content_hash = read_manifest(self.path)
        if self._remote:
            self._remote.fetch(f"{rows_path.name}/{MANIFEST}")
        if not (rows_path / MANIFEST).exists():
            names = ", ".join(f"rows-{one}" for one in planned_lengths(self.path)) or "none"
            raise UserError(f"{self.path}: no sequence plan for seq_len {self.seq_len} (found: "
                            f"{names}); run {self._pack()}")
        self.rows_manifest, self.rows_content_hash = read_rows_manifest(rows_path)
        self.content_hash = self.rows_content_hash
        remedy = f"remove the directory and run {self._pack()}"
        if self.rows_manifest.corpus != self.corpus_content_hash:
            raise UserError(f"{rows_path}: planned for another version of {self.path / MANIFEST}; "
                            f"{remedy}")
        planned, there = len(self.rows_manifest.shards), len(self.manifest.shards)
        if planned != there:
            raise UserError(f"{rows_path / MANIFEST}: damaged: plans {planned} shards of {there}; "
                            f"{remedy}")

    def check_tokenizer(self, sha256: str, whose: str = "this run's tokenizer") -> None:
        """UserError unless the corpus was made with the tokenizer of this checksum."""
        if self.manifest.tokenizer_sha256 != sha256:
            place = self._remote.url if self._remote else self.path
            raise UserError(
                f"{place}/{MANIFEST}: made with tokenizer sha256 "
                f"{self.manifest.tokenizer_sha256[:16]}..., but {whose} is "
                f"{sha256[:16]}...; give the corpus's own tokenizer or tokenize the text again")

    def verify(self, mode: str = "sizes", *, rank: int = 0, world_size: int = 1) -> int:
        """Check the files of shards rank::world_size and return how many files were checked.

        "sizes" compares sizes, "full" also xxh3 checksums and every row of the plan. UserError
        names the first bad file. Of a remote corpus nothing is checked: its blocks are, as they
        are read.
        """
        if self._remote:
            return 0
        fetch = "copy the shard again from its source, or make the corpus again"
        remake = self._remake()
        for number in range(rank, len(self._shards), world_size):
            shard, rows = self._shards[number]
            paths = self._paths(number)
            for path, size, digest, remedy in (
                (paths.tokens, shard.bytes, shard.xxh3, fetch),
                (paths.ends, shard.ends_bytes, shard.ends_xxh3, fetch),
                (paths.segments, rows.bytes, rows.xxh3, remake),
                (paths.starts, rows.starts_bytes, rows.starts_xxh3, remake)):
                check_file(path, size, digest if mode == "full" else None, remedy)
            if mode == "full":
                self._check_rows(number)
        return 4 * len(range(rank, len(self._shards), world_size))

    def _check_rows(self, number: int) -> None:
        """UserError naming the first row of a shard that `row` would reject."""
        shard, rows = self._shards[number]
        paths = self._paths(number)
        segments, starts = map_array(paths.segments), map_array(paths.starts).astype(np.int64)
        if segments.shape != (rows.pieces, 2) or starts.shape != (rows.rows + 1,):
            raise UserError(f"{paths.segments}: {segments.shape} segments, {starts.shape} sequences"
                            f": not what the manifest says; {self._remake()}")
        bad = (starts[1:] <= starts[:-1]) | (starts[1:] > rows.pieces)
        if not bad.any():
            begin, length = segments[:, 0].astype(np.int64), segments[:, 1].astype(np.int64)
            outside = (length < 1) | (begin + length > shard.tokens)
            sizes = np.add.reduceat(length + FRAME_TOKENS, starts[:-1]) if rows.rows else length
            bad = np.add.reduceat(outside, starts[:-1]) if rows.rows else outside
            bad = bad.astype(bool) | (sizes > self.seq_len)
        if bad.any():
            raise self._bad_row(number, int(bad.argmax()))

    def row(self, index: int) -> list[np.ndarray]:
        """Return the ids of row `index` by segment, no special ones; UserError as `stored_row`."""
        segments = self.stored_row(index)
        size = self.manifest.vocab_size
        return [segment % size for segment in segments] if self.manifest.words else segments

    def stored_row(self, index: int) -> list[np.ndarray]:
        """Return the segments of row `index` as the shard holds them (shards.py).

        UserError if the plan leads outside of the shard or gives more than a row holds.
        """
        number, local = self._find(index)
        shard, rows = self._shards[number]
        paths = self._paths(number)
        header = rows.starts_bytes - 4 * (rows.rows + 1)
        first, last = struct.unpack_from("<2I", *self._plans.part(
            paths.starts, rows.starts_bytes, header + 4 * local, 8))
        count = last - first
        if not 0 < count <= self.seq_len or last > rows.pieces:
            raise self._bad_row(number, local)
        header = rows.bytes - 8 * rows.pieces
        numbers = struct.unpack_from(f"<{2 * count}I", *self._plans.part(
            paths.segments, rows.bytes, header + 8 * first, 8 * count))
        begins, lengths = numbers[::2], numbers[1::2]
        ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        if (min(lengths) < 1 or sum(lengths) + FRAME_TOKENS * count > self.seq_len
                or max(ends) > shard.tokens):
            raise self._bad_row(number, local)
        low, high = min(begins), max(ends)
        if high - low <= _APART_ROWS * self.seq_len:
            tokens = self._tokens(number, low, high)
            return [tokens[begin - low : end - low]
                    for begin, end in zip(begins, ends, strict=True)]
        return [self._tokens(number, begin, end) for begin, end in zip(begins, ends, strict=True)]

    def _tokens(self, number: int, first: int, last: int) -> np.ndarray:
        shard, size = self._shards[number][0], self._dtype.itemsize
        offset = shard.bytes - size * (shard.tokens - first)
        data = self._read(self._paths(number).tokens, offset, size * (last - first))
        return np.frombuffer(data, self._dtype)

    def _find(self, index: int) -> tuple[int, int]:
        """Return (shard number, row in it) of row `index`."""
        if not (0 <= index < self.num_rows):
            raise IndexError(f"{self.path}: no sequence {index} in its {self.num_rows}")
        number = int(self._cumulative.searchsorted(index, side="right")) - 1
        return number, index - int(self._cumulative[number])

    def _bad_row(self, number: int, local: int) -> UserError:
        return UserError(f"{self._paths(number).segments}: sequence {local} of this plan is "
                         f"outside its shard or has over {self.seq_len} tokens; the plan is "
                         f"damaged: {self._remake()}")

    def _remake(self) -> str:
        return f"remove {self._rows_path} and run {self._pack()}"

    def _pack(self) -> str:
        """Return the command that makes the row plan; whose the tokenizer is, the user knows."""
        return f"data_prep/pack.py {self.path} --seq_len {self.seq_len} --tokenizer TOKENIZER"

    def _paths(self, number: int) -> "_Paths":
        name = self._shards[number][0].name
        return _Paths(*files_of(self.path, name), *plan_files_of(self._rows_path, name))

    def shard_row(self, index: int) -> tuple[str, int]:
        """Return (name of the shard, row in it) of row `index`."""
        number, local = self._find(index)
        return self._shards[number][0].name, local

    @property
    def shard_rows(self) -> dict[str, range]:
        """Return {name of a shard: its rows} in order."""
        return {shard.name: range(int(first), int(last)) for (shard, _), first, last in zip(
            self._shards, self._cumulative[:-1], self._cumulative[1:], strict=True)}

    def documents_of(self, index: int) -> tuple[str, list[int]]:
        """Return (shard, its documents that row `index` holds segments of, in the row's order)."""
        number, local = self._find(index)
        paths = self._paths(number)
        first, last = map_array(paths.starts)[local : local + 2].tolist()
        begins = map_array(paths.segments)[first:last, 0].astype(np.int64)
        found = map_array(paths.ends).searchsorted(begins, side="right")
        return self._shards[number][0].name, found.tolist()

    def rows_of(self, shard: str, document: int) -> list[int]:
        """Return the rows that hold segments of a document of a shard."""
        number = [info.name for info, _ in self._shards].index(shard)
        paths = self._paths(number)
        ends = map_array(paths.ends)
        begin, end = int(ends[document - 1]) if document else 0, int(ends[document])
        starts = map_array(paths.segments)[:, 0]
        segments = np.flatnonzero((starts >= begin) & (starts < end))
        rows = map_array(paths.starts).searchsorted(segments, side="right") - 1
        return sorted(set((int(self._cumulative[number]) + rows).tolist()))

    def place(self, index: int) -> str:
        """Return where row `index` lies, for messages: shard file and row in it."""
        number, local = self._find(index)
        return f"{self._paths(number).tokens} (sequence {local} of it)"


class _Paths(NamedTuple):
    """The four files of one shard."""

    tokens: str
    ends: str
    segments: str
    starts: str


def _part_of(shards: list[tuple[ShardInfo, RowShardInfo]], part: tuple[float, float], path: Path
            ) -> list[tuple[ShardInfo, RowShardInfo]]:
    low, high = part
    if not 0.0 <= low < high <= 1.0:
        raise UserError(f"{path}: part {part} must be 0 <= from < to <= 1")
    if not shards:
        raise UserError(f"{path}: has no documents; look at what tokenize_corpus.py left out, or "
                        "hold out more documents (its --heldout_share) if it is the held-out part")
    order = sorted(range(len(shards)), key=lambda number: xxhash.xxh3_64_hexdigest(
        shards[number][0].name.encode()))
    chosen = order[round(low * len(shards)) : round(high * len(shards))]
    if not chosen:
        raise UserError(f"{path}: part {part} of {len(shards)} shards is empty; widen it, or make "
                        "smaller shards with tokenize_corpus.py --unit_bytes")
    return [shards[number] for number in sorted(chosen)]


def open_shard(corpus: str | Path, shard: ShardInfo) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, ends) of a shard, mapped; UserError if either file is not what it was."""
    tokens, ends = files_of(corpus, shard.name)
    remedy = "the shard is damaged: copy it again, or make the corpus again"
    check_file(tokens, shard.bytes, shard.xxh3, remedy)
    check_file(ends, shard.ends_bytes, shard.ends_xxh3, remedy)
    return map_array(tokens), map_array(ends)


def map_array(path: str | Path) -> np.ndarray:
    """Return a read-only memory map of a .npy file as a plain array (cheap to slice)."""
    with naming(path):
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


class OpenFile:
    """A descriptor that is closed when nobody uses it any more, whatever the cache has dropped."""

    def __init__(self, path: str):
        # O_NONBLOCK: to open a pipe would wait for who writes to it; files know nothing of it.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise UserError(f"{path}: is no file but a pipe, a device or a directory; run "
                            "data_prep/verify.py and copy the damaged file again")
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self, close=os.close):
        if hasattr(self, "descriptor"):
            close(self.descriptor)


def read_bytes(path: str, offset: int, count: int) -> bytes:
    """Return `count` bytes of a file from `offset`; UserError if it has fewer or is unreadable."""
    try:
        file = _open(path)
        data = os.pread(file.descriptor, count, offset)
        while len(data) < count:  # a signal, or a network file system
            more = os.pread(file.descriptor, count - len(data), offset + len(data))
            if not more:
                raise UserError(f"{path}: ends at byte {offset + len(data)}, cut short; run "
                                "data_prep/verify.py and copy the damaged file again")
            data += more
    except OSError as error:
        remedy = "run data_prep/verify.py and copy the damaged file again"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit of open files (ulimit -n)"
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    return data


def _open(path: str) -> OpenFile:
    try:
        return kept_open()(path)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    kept_open().cache_clear()  # others have taken what was left: give ours back and try once more
    return kept_open()(path)


@cache
def kept_open():
    """Return `OpenFile` with a cache of this process's open files."""
    return lru_cache(most_open_files())(OpenFile)


@cache
def most_open_files() -> int:
    """Return how many files the cache keeps open: most of the limit, which is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return limit // 2 if limit < 1024 else limit - max(limit // 8, 256)


class SmallFiles:
    """Files of at most 64 KiB, read whole and kept from then on, as long as the process has room
    for them; of all others, the part that is asked for. Nothing that is kept makes way for others:
    rows come in a random order.
    """

    most_bytes = 1 << 16
    room_bytes = 1 << 25  # of all instances together

    def __init__(self, read: Callable[[str, int, int], bytes]):
        """`read`: as `read_bytes`."""
        self._read = read
        self._kept: dict[str, bytes] = {}

    def part(self, path: str, size: int, offset: int, count: int) -> tuple[bytes, int]:
        """Return (bytes, place of byte `offset` of the file among them); errors as of `read`."""
        data = self._kept.get(path)
        if data is None:
            if size > min(self.most_bytes, SmallFiles.room_bytes):
                return self._read(path, offset, count), 0
            data = self._read(path, 0, size)
            with _lock:
                SmallFiles.room_bytes -= size if path not in self._kept else 0
                self._kept[path] = data
        return data, offset

    def __del__(self):
        type(self).room_bytes += sum(map(len, self._kept.values()))
