"""A tokenized, packed corpus opened for reading by row number.

Memory is O(shards) plus an LRU of open memory maps; opening reads two manifests and no data.
"""

from collections import OrderedDict
from pathlib import Path

import numpy as np

from deberta_ds.data.shards import (
    MANIFEST,
    read_manifest,
    read_rows_manifest,
    rows_directory,
)
from deberta_ds.errors import UserError
from deberta_ds.files import xxh3

OPEN_SHARDS = 128
VERIFY_MODES = ("sizes", "full")


class Corpus:
    """Rows of one corpus at one sequence length.

    Attributes: path, seq_len, manifest, rows_manifest, num_rows, fingerprint (hex; covers
    every byte through the checksums in both manifests).
    """

    def __init__(
        self, path: str | Path, *, seq_len: int, part: tuple[float, float] = (0.0, 1.0)
    ):
        """Open a finished corpus; UserError if it or its plan for `seq_len` is missing or stale.

        `part` (from, to) in [0, 1] opens only that stretch of the shards: stages of other lengths
        that take other parts share no token.
        """
        self.path = Path(path)
        self.seq_len = seq_len
        self.manifest, self.corpus_fingerprint = read_manifest(self.path)
        rows_path = rows_directory(self.path, seq_len)
        if not (rows_path / MANIFEST).exists():
            found = sorted(p.parent.name for p in self.plans(self.path))
            names = ", ".join(found) or "none"
            raise UserError(
                f"{self.path}: no row plan for seq_len {seq_len} (found: {names}); "
                f"run data_prep/pack.py {self.path} --seq_len {seq_len}"
            )
        self.rows_manifest, self.fingerprint = read_rows_manifest(rows_path)
        if self.rows_manifest.corpus != self.corpus_fingerprint:
            raise UserError(
                f"{rows_path}: planned for another version of {self.path / MANIFEST}; remove the "
                f"directory and run data_prep/pack.py {self.path} --seq_len {seq_len}"
            )
        self._shards = _part_of(
            list(zip(self.manifest.shards, self.rows_manifest.shards, strict=True)), part, self.path
        )
        if part != (0.0, 1.0):
            self.fingerprint += f"[{part[0]}:{part[1]}]"
        counts = [rows.rows for _, rows in self._shards]
        self._cumulative = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_rows = int(self._cumulative[-1])
        if self.num_rows == 0:
            raise UserError(f"{rows_path}: the corpus has no rows; prepare it from more text")
        self._maps: OrderedDict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = OrderedDict()

    @staticmethod
    def plans(path: str | Path) -> list[Path]:
        """Return the manifests of the finished row plans of a corpus directory."""
        return list(Path(path).glob(f"rows-*/{MANIFEST}"))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": OrderedDict()}

    def check_tokenizer(self, sha256: str) -> None:
        """UserError unless the corpus was made with the tokenizer of this checksum."""
        if self.manifest.tokenizer_sha256 != sha256:
            raise UserError(
                f"{self.path / MANIFEST}: made with tokenizer sha256 "
                f"{self.manifest.tokenizer_sha256[:16]}..., but this run's tokenizer is "
                f"{sha256[:16]}...; give the corpus's own spm.model or tokenize the text again"
            )

    def verify(self, mode: str = "sizes", *, rank: int = 0, world_size: int = 1) -> int:
        """Check the files of shards rank::world_size and return how many files were checked.

        "sizes" compares sizes, "full" also xxh3 checksums. UserError names the first bad file.
        """
        if mode not in VERIFY_MODES:
            raise UserError(f"verify is {mode!r}; it must be one of {', '.join(VERIFY_MODES)}")
        checked = 0
        rows_path = rows_directory(self.path, self.seq_len)
        for shard, rows in self._shards[rank::world_size]:
            remake = f"remove it and run data_prep/pack.py {self.path} --seq_len {self.seq_len}"
            fetch = "copy the shard again from its source, or make the corpus again"
            name = f"{shard.name}.npy"
            starts = rows_path / f"{rows.name}.starts.npy"
            for path, size, digest, remedy in (
                (self.path / "tokens" / name, shard.bytes, shard.xxh3, fetch),
                (self.path / "ends" / name, shard.ends_bytes, shard.ends_xxh3, fetch),
                (rows_path / name, rows.bytes, rows.xxh3, remake),
                (starts, rows.starts_bytes, rows.starts_xxh3, remake),
            ):
                check_file(path, size, digest if mode == "full" else None, remedy)
                checked += 1
        return checked

    def row(self, index: int) -> list[np.ndarray]:
        """Return the pieces of row `index`: token arrays without special tokens, in order."""
        shard = int(np.searchsorted(self._cumulative, index, side="right")) - 1
        if not (0 <= index < self.num_rows):
            raise IndexError(f"row {index} is outside the {self.num_rows} rows of {self.path}")
        tokens, pieces, starts = self._open(shard)
        local = index - int(self._cumulative[shard])
        first, last = int(starts[local]), int(starts[local + 1])
        return [tokens[start : start + length] for start, length in pieces[first:last].tolist()]

    def place(self, index: int) -> str:
        """Return where row `index` lies, for messages: shard file and row in it."""
        shard = int(np.searchsorted(self._cumulative, index, side="right")) - 1
        name = self._shards[shard][0].name
        return f"{self.path / 'tokens' / name}.npy (row {index - self._cumulative[shard]} of it)"

    def _open(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        maps = self._maps.get(shard)
        if maps is None:
            name = self._shards[shard][0].name
            rows_path = rows_directory(self.path, self.seq_len)
            maps = (
                map_array(self.path / "tokens" / f"{name}.npy"),
                map_array(rows_path / f"{name}.npy"),
                map_array(rows_path / f"{name}.starts.npy"),
            )
            self._maps[shard] = maps
            if len(self._maps) > OPEN_SHARDS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(shard)
        return maps


def _part_of(shards: list, part: tuple[float, float], path: Path) -> list:
    low, high = part
    if not 0.0 <= low < high <= 1.0:
        raise UserError(f"{path}: part {part} must be 0 <= from < to <= 1")
    chosen = shards[round(low * len(shards)) : round(high * len(shards))]
    if not chosen:
        raise UserError(
            f"{path}: part {part} of {len(shards)} shards is empty; widen it, or make smaller "
            "shards with tokenize_corpus.py --unit_bytes"
        )
    return chosen


def check_file(path: Path, size: int, digest: str | None, remedy: str) -> None:
    """UserError unless `path` has this size and, if given, this xxh3-128 digest."""
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error
    if actual != size:
        raise UserError(f"{path}: {actual} bytes, the manifest says {size}; {remedy}")
    if digest is not None and xxh3(path) != digest:
        raise UserError(f"{path}: xxh3 checksum differs from the manifest; {remedy}")


def map_array(path: Path) -> np.ndarray:
    """Return a read-only memory map of a .npy file as a plain array (cheap to slice)."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be mapped ({error}); run data_prep/verify.py --verify full"
        ) from error
