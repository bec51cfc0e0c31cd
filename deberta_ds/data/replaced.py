"""Rows whose masked tokens a frozen generator has replaced, stored next to a packed corpus.

    DIRECTORY/
      manifest.json              written last: what made it, the checksums
      sample-0/NAME.mask.npy     uint8 [rows, seq_len / 8]: which columns differ, a bit each
      sample-0/NAME.ids.npy      the tokens that stand there, row after row
      sample-0/NAME.ends.npy     int64 [rows]: where each row's tokens end
      sample-1/...               the same rows with other masks and samples

NAME is a shard of the corpus; 0.2.0 wrote draw-0 and so on. A sample that equals the original is
not stored: to a discriminator it is one.
"""

import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.files import write_atomic, xxh3
from deberta_ds.data.corpus import Corpus, read_bytes
from deberta_ds.data.masking import IGNORE
from deberta_ds.data.shards import MANIFEST, check_file, read_checked, save_array

VERSION = 1
_KINDS = ("mask", "ids", "ends")
_HEADER_BYTES = 128  # of a .npy file with one or two axes


@dataclass(frozen=True)
class ReplacedManifest:
    """What a directory of replacements holds.

    rows: content_hash of the row plan. made_by: what decided the replacements. shards: for each
    draw {shard name: {file kind: [bytes, xxh3]}}.
    """

    rows: str
    seq_len: int
    attend_across_documents: bool
    temperatures: list[float]
    made_by: dict
    shards: list[dict[str, dict[str, tuple[int, str]]]]
    version: int = VERSION


def shard_path(directory: str | Path, draw: int, name: str, kind: str) -> Path:
    """Return the file of one shard in one draw; `kind` is mask, ids or ends."""
    old = Path(directory) / f"draw-{draw}"  # of 0.2.0
    directory = old if old.is_dir() else Path(directory) / f"sample-{draw}"
    return directory / f"{name}.{kind}.npy"


def write_shard(directory: Path, draw: int, name: str, is_replaced_RL: np.ndarray,
                ids_N: np.ndarray) -> dict[str, list]:
    """Write a shard's three files and return {kind: [bytes, xxh3]}."""
    arrays = {"mask": np.packbits(is_replaced_RL, axis=1), "ids": ids_N,
              "ends": is_replaced_RL.sum(1).cumsum().astype("<i8")}
    written = {}
    for kind, array in arrays.items():
        path = shard_path(directory, draw, name, kind)
        save_array(path, array)
        written[kind] = [path.stat().st_size, xxh3(path)]
    return written


def write_replaced_manifest(directory: Path, manifest: ReplacedManifest) -> None:
    """Write the manifest, which makes a directory of replacements whole."""
    write_atomic(directory / MANIFEST, json.dumps(asdict(manifest), sort_keys=True) + "\n")


def read_replaced_manifest(directory: str | Path) -> tuple[ReplacedManifest, str]:
    """Return (manifest, sha256 of it); UserError if it is missing, damaged or too new."""
    return read_checked(directory, ReplacedManifest, VERSION, "no finished replacements",
                        "run data_prep/replace.py to the end, or give the right directory")


class Replacements:
    """The replacements of a corpus's rows, opened for reading.

    Attributes: manifest, content_hash (sha256 of it).
    """

    def __init__(self, directory: str | Path, corpus: Corpus, attend_across_documents: bool):
        self.directory = Path(directory)
        self.manifest, self.content_hash = read_replaced_manifest(directory)
        if self.manifest.rows != corpus.rows_content_hash:
            raise UserError(f"{directory}: made for other sequences than {corpus.path} has at "
                            f"length {corpus.seq_len}; run data_prep/replace.py for them")
        if self.manifest.attend_across_documents != attend_across_documents:
            raise UserError(
                f"{directory}: made with attend_across_documents = "
                f"{self.manifest.attend_across_documents}, the run has {attend_across_documents}")
        self._files: dict[tuple[int, str], list[_Stored]] = {}

    def verify(self, mode: str) -> None:
        """Check every file's size and, for "full", its checksum; UserError names a bad one."""
        for draw, shards in enumerate(self.manifest.shards):
            for name, kinds in shards.items():
                for kind, (size, digest) in kinds.items():
                    check_file(shard_path(self.directory, draw, name, kind), size,
                               digest if mode == "full" else None,
                               "copy it again from its source, or run data_prep/replace.py again")

    def apply(self, draw: int, name: str, row: int, ids_L: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
        """Return (row with replacements, labels: the original ids there, -100 elsewhere)."""
        files = self._files.get((draw, name))
        if files is None:
            files = self._files[draw, name] = [
                _Stored.look(shard_path(self.directory, draw, name, kind)) for kind in _KINDS]
        mask, ids, ends = files
        is_replaced_L = np.unpackbits(mask.items(row, row + 1), count=len(ids_L)).astype(bool)
        end = int(ends.items(row, row + 1)[0])
        output_L = ids_L.copy()
        output_L[is_replaced_L] = ids.items(end - int(is_replaced_L.sum()), end)
        return output_L, np.where(is_replaced_L, ids_L, IGNORE)


class _Stored(NamedTuple):
    """A .npy file that is read by parts, with no descriptor of its own (data/corpus.py)."""

    path: str
    begin: int
    dtype: np.dtype
    width: int  # numbers in an item of the first axis

    @staticmethod
    def look(path: Path) -> "_Stored":
        """Read the header; UserError for another or a damaged one."""
        header = io.BytesIO(read_bytes(str(path), 0, _HEADER_BYTES))
        with naming(path):
            np.lib.format.read_magic(header)
            shape, _, dtype = np.lib.format.read_array_header_1_0(header)
        return _Stored(str(path), header.tell(), dtype, math.prod(shape[1:]))

    def items(self, first: int, last: int) -> np.ndarray:
        """Return items [first, last), one after another; UserError if the file ends before."""
        size = self.dtype.itemsize * self.width
        data = read_bytes(self.path, self.begin + size * first, size * (last - first))
        return np.frombuffer(data, self.dtype)
