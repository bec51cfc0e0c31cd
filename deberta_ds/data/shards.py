"""The on-disk format of a tokenized corpus: plain .npy shards and JSON manifests with checksums.

    corpus/
      manifest.json          written last; its sha256 is the corpus content hash
      tokens/NAME.npy        uint16 if the tokenizer's size <= 65536 else uint32; documents
                             back to back, no special tokens. With `words` in the manifest,
                             id + vocab_size where a token starts a word that its id does not,
                             or the other way round (tokenizer/segmented.py)
      ends/NAME.npy          int64, cumulative document ends
      rows-512/
        manifest.json        written last; its sha256 joins the content_hash
        NAME.npy             uint32 [segments, 2]: (start, length) in row order
        NAME.starts.npy      uint32 [rows + 1]: row r = segments[starts[r] : starts[r + 1]]

A crash leaves no manifest, hence no half corpus that opens. numpy.load opens every file.

Each row holds whole document segments, each framed as [CLS] segment [SEP]. They are placed best-fit
among 64 open rows in stream order: 99.2 to 99.8 % fill, no sort, neighbors stay together. A
document longer than a row is cut, and the cut moves back to a word start so that no segment begins
inside a word; only a word longer than half a row is cut hard (and counted).
"""

import hashlib
import itertools
import json
import os
from bisect import bisect_left, insort
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from deberta_ds.base.errors import UserError, naming, refuse_pipe
from deberta_ds.base.files import MANIFEST, atomic_path, parse_json, typed, write_atomic, xxh3
from deberta_ds.config.toml_files import BUILT

FRAME_TOKENS = 2  # [CLS] and [SEP] of every segment
OPEN_ROWS = 64
PACKER_VERSION = 1
FORMAT_VERSION = 1
HEADER_BYTES = 128
_UNFINISHED = "not a finished corpus"
# Of a label: documents, characters, tokens.
_LabelCounts = Annotated[list[int], Field(min_length=3, max_length=3)]
_BUFFER_BYTES = 1 << 16  # a call of the system for each short document would take longer


@dataclass(frozen=True)
class ShardInfo:
    """One token shard: counts, and size and xxh3-128 of its two files."""

    name: str
    tokens: int
    documents: int
    bytes: int
    xxh3: str
    ends_bytes: int
    ends_xxh3: str


@dataclass(frozen=True)
class RowShardInfo:
    """The row plan of one token shard: counts, and size and xxh3-128 of its two files."""

    name: str
    rows: int
    pieces: int  # document segments; another key would change the corpus's content hash
    tokens: int
    bytes: int
    xxh3: str
    starts_bytes: int
    starts_xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a corpus directory holds."""

    dtype: str
    vocab_size: int  # the tokenizer's size; the name in the file is older than that rule
    tokenizer_sha256: str
    special_ids: dict[str, int]
    counts: dict[str, int]
    labels: dict[str, _LabelCounts]
    shards: tuple[ShardInfo, ...]
    words: str = ""  # FILE.py:NAME and sha256 of the function that said where words start
    version: int = FORMAT_VERSION

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class RowsManifest:
    """What a rows-L directory holds; `corpus` is the content hash of the corpus it plans."""

    seq_len: int
    packer_version: int
    corpus: str
    hard_cuts: int
    shards: tuple[RowShardInfo, ...]
    version: int = FORMAT_VERSION


def token_dtype(tokenizer_size: int) -> np.dtype:
    """Return the dtype of token shards: uint16 if every id fits, else uint32."""
    return np.dtype("<u2") if tokenizer_size <= 1 << 16 else np.dtype("<u4")


def files_of(corpus: str | Path, shard: str) -> tuple[str, str]:
    """Return the files of a shard's tokens and of its documents' ends."""
    return f"{corpus}/tokens/{shard}.npy", f"{corpus}/ends/{shard}.npy"


def plan_files_of(directory: str | Path, shard: str) -> tuple[str, str]:
    """Return the files of a shard's segments and of the rows' starts, in a rows-L directory."""
    return f"{directory}/{shard}.npy", f"{directory}/{shard}.starts.npy"


def rows_directory(corpus: str | Path, seq_len: int) -> Path:
    """Return the directory of the row plan for `seq_len`."""
    return Path(corpus) / f"rows-{seq_len}"


def planned_lengths(corpus: str | Path) -> list[int]:
    """Return the lengths of the finished row plans of a corpus directory, in order."""
    names = (path.parent.name.removeprefix("rows-")
             for path in Path(corpus).glob(f"rows-*/{MANIFEST}"))
    return sorted(int(name) for name in names if name.isdecimal())  # no rows-512.old


def canonical_json(value: Manifest | RowsManifest) -> str:
    """Return the one text form of a manifest: sorted keys, one shard a line."""
    fields = asdict(value)
    if not fields.get("words", True):  # most corpora; their hashes are older than this field
        del fields["words"]
    shards = [json.dumps(shard, sort_keys=True) for shard in fields.pop("shards")]
    head = json.dumps(fields, sort_keys=True)[:-1]
    return head + ', "shards": [\n' + ",\n".join(shards) + "\n]}\n"


def content_hash_of(value: Manifest | RowsManifest) -> str:
    """Return the content hash that a manifest has once it is written."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_manifest(directory: str | Path, value: Manifest | RowsManifest) -> str:
    """Write manifest.json atomically and return its content hash."""
    write_atomic(Path(directory) / MANIFEST, canonical_json(value))
    return content_hash_of(value)


def read_manifest(directory: str | Path) -> tuple[Manifest, str]:
    """Return (manifest, content_hash) of a corpus; UserError if missing, damaged or too new."""
    remedy = "run data_prep/tokenize_corpus.py to the end, or give the right directory"
    if (Path(directory) / BUILT).exists():
        remedy = f"build.py made it; name one of the corpora in {directory}/train"
    return read_checked(directory, Manifest, FORMAT_VERSION, _UNFINISHED, remedy)


def read_rows_manifest(directory: str | Path) -> tuple[RowsManifest, str]:
    """Return (manifest, content_hash) of a rows-L directory; errors as in `read_manifest`."""
    return read_checked(directory, RowsManifest, FORMAT_VERSION, _UNFINISHED,
                        "run data_prep/pack.py for this length")


def read_checked(directory: str | Path, form: type, version: int, unfinished: str, remedy: str
                 ) -> tuple[Any, str]:
    """Return (the manifest in a directory as a `form`, the sha256 of its file).

    UserError if it is missing (the directory is then `unfinished`), damaged, or has not `version`.
    """
    path = Path(directory) / MANIFEST
    try:
        with naming(path):
            data = path.read_bytes()
    except UserError as error:
        raise UserError(f"{error}: {unfinished}; {remedy}") from error
    try:
        fields = parse_json(data)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        if (found := fields.get("version")) == version:
            return typed(form, fields), hashlib.sha256(data).hexdigest()
    except ValueError as error:
        raise UserError(f"{path}: damaged manifest ({error}); {remedy}") from error
    raise UserError(f"{path}: format version {found!r:.40}, and this program reads {version}; make "
                    "it again in a new directory, or use the version that made it")


def check_file(path: str | Path, size: int, digest: str | None, remedy: str) -> None:
    """UserError unless `path` has this size and, if given, this xxh3-128 digest."""
    refuse_pipe(path)
    try:
        actual = os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error
    if actual != size:
        raise UserError(f"{path}: {actual} bytes, the manifest says {size}; {remedy}")
    if digest is not None and xxh3(path) != digest:
        raise UserError(f"{path}: xxh3 checksum differs from the manifest; {remedy}")


def npy_header(dtype: np.dtype, count: int) -> bytes:
    """Return a .npy version 1.0 header of exactly 128 bytes for a 1-D array of `count` items."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    text = text.ljust(HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


def save_array(path: Path, array: np.ndarray) -> None:
    """Write one .npy file atomically.

    Not by numpy.save: on a full disk it raises an OSError without an errno.
    """
    array = np.ascontiguousarray(array)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data if array.size else b"")


class ShardWriter:
    """Streams the documents of one shard to disk; memory is O(documents), not O(tokens).

    Use: `append` each document, then `finish()` -> ShardInfo. `abandon()` removes the temporaries.
    """

    def __init__(self, corpus: str | Path, name: str, dtype: np.dtype):
        self.name = name
        self.tokens = 0
        self._dtype = np.dtype(dtype)
        self._path, self._ends_path = map(Path, files_of(corpus, name))
        self._ends: list[int] = []
        self._context = atomic_path(self._path)
        self._temporary = self._context.__enter__()
        self._file = open(self._temporary, "wb", buffering=_BUFFER_BYTES)
        self._file.write(npy_header(self._dtype, 0))

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._ends)

    def append(self, ids: np.ndarray) -> None:
        """Add one document; an empty one is an error of the caller."""
        self.append_many(ids, [len(ids)])

    def append_many(self, ids: np.ndarray, lengths: list[int]) -> None:
        """Add one document or more, which lie back to back in `ids`; none may be empty."""
        assert all(lengths), "an empty document has no place in a shard"
        self._ends += itertools.accumulate(lengths[1:], initial=self.tokens + lengths[0])
        self.tokens += len(ids)
        try:
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def finish(self) -> ShardInfo:
        """Complete both files and return their sizes and checksums."""
        with naming(self._path):
            self._file.seek(0)
            self._file.write(npy_header(self._dtype, self.tokens))
            self._file.close()
        digest, size = xxh3(self._temporary), self._temporary.stat().st_size
        ends = np.array(self._ends, dtype="<i8")
        save_array(self._ends_path, ends)
        self._context.__exit__(None, None, None)
        return ShardInfo(name=self.name, tokens=self.tokens, documents=len(ends), bytes=size,
                         xxh3=digest, ends_bytes=self._ends_path.stat().st_size,
                         ends_xxh3=xxh3(self._ends_path))

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class RowPlan:
    """`segments` u32[num_segments, 2] of (start, length) in row order; row r is
    segments[starts[r]:starts[r + 1]] with `starts` u32[num_rows + 1].
    """

    segments: np.ndarray
    starts: np.ndarray
    hard_cuts: int


def plan_rows(ends: np.ndarray, tokens: np.ndarray, word_starts: np.ndarray, seq_len: int
             ) -> RowPlan:
    """Return the rows of one shard: `ends` i64[documents], `tokens` [n], `word_starts` bool[V]."""
    starts, lengths, hard_cuts = cut_documents(ends, tokens, word_starts, seq_len - FRAME_TOKENS)
    row_of_segment, num_rows = best_fit(lengths + FRAME_TOKENS, seq_len)
    order = np.argsort(row_of_segment, kind="stable")
    segments = np.stack([starts[order], lengths[order]], axis=1).astype(np.uint32)
    per_row = np.bincount(row_of_segment, minlength=num_rows)
    row_starts = np.concatenate([[0], np.cumsum(per_row)]).astype(np.uint32)
    return RowPlan(segments, row_starts, hard_cuts)


def cut_documents(ends: np.ndarray, tokens: np.ndarray, word_starts: np.ndarray, room: int
                 ) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (starts i64, lengths i64, hard cuts): segments of at most `room` tokens, in order."""
    ends = np.asarray(ends, dtype=np.int64)
    begins = np.concatenate([[0], ends])[:-1].astype(np.int64)
    long_documents = np.flatnonzero(ends - begins > room)
    all_starts, hard_cuts, done = [], 0, 0
    for document in long_documents.tolist():
        all_starts.append(begins[done:document])
        cuts, hard = _cut_one(int(begins[document]), int(ends[document]), tokens, word_starts, room)
        all_starts.append(np.array(cuts, dtype=np.int64))
        hard_cuts += hard
        done = document + 1
    all_starts.append(begins[done:])
    starts = np.concatenate(all_starts)
    total = ends[-1:] if len(ends) else np.zeros(1, dtype=np.int64)
    lengths = np.diff(np.concatenate([starts, total]))
    return starts, lengths, hard_cuts


def _cut_one(begin: int, end: int, tokens: np.ndarray, word_starts: np.ndarray, room: int
            ) -> tuple[list[int], int]:
    cuts, hard = [begin], 0
    while end - begin > room:
        low = begin + room - room // 2
        candidates = np.flatnonzero(word_starts[tokens[low : begin + room + 1]])
        hard += not len(candidates)
        begin = low + int(candidates[-1]) if len(candidates) else begin + room
        cuts.append(begin)
    return cuts, hard


def best_fit(sizes: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Return (row of each size i64, number of rows): each goes to the open row it fills best.

    When all 64 rows are open and none has room, the fullest is closed. Ties: the older row.
    """
    row_of_segment = np.empty(len(sizes), dtype=np.int64)
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    num_rows = 0
    for index, size in enumerate(sizes.tolist()):
        place = bisect_left(open_rows, (size, -1))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            if len(open_rows) == OPEN_ROWS:
                del open_rows[0]
            room, row = seq_len, num_rows
            num_rows += 1
        row_of_segment[index] = row
        if room > size:
            insort(open_rows, (room - size, row))
    return row_of_segment, num_rows
