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

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic, xxh3
from deberta_ds.data.corpus import Corpus, read_bytes
from deberta_ds.data.masking import IGNORE
from deberta_ds.data.shards import (
    HEADER_BYTES,
    MANIFEST,
    check_file,
    read_checked,
    save_array,
    token_dtype,
)

VERSION = 1


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


def draw_directory(directory: str | Path, draw: int) -> Path:
    """Return where the files of one draw lie."""
    old = Path(directory) / f"draw-{draw}"  # of 0.2.0
    return old if old.is_dir() else Path(directory) / f"sample-{draw}"


def shard_path(directory: str | Path, draw: int, name: str, kind: str) -> Path:
    """Return the file of one shard in one draw; `kind` is mask, ids or ends."""
    return draw_directory(directory, draw) / f"{name}.{kind}.npy"


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
        self._places = [draw_directory(directory, draw)
                        for draw in range(len(self.manifest.temperatures))]
        # {kind: (type of its numbers, how many a row or token has)}
        self._forms = {"mask": (np.dtype("u1"), -(-corpus.seq_len // 8)),
                       "ids": (token_dtype(corpus.manifest.vocab_size), 1),
                       "ends": (np.dtype("<i8"), 1)}

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
        is_replaced_L = np.unpackbits(self._items(draw, name, "mask", row, row + 1),
                                      count=len(ids_L)).astype(bool)
        end = int(self._items(draw, name, "ends", row, row + 1)[0])
        output_L = ids_L.copy()
        output_L[is_replaced_L] = self._items(draw, name, "ids",
                                              end - int(is_replaced_L.sum()), end)
        return output_L, np.where(is_replaced_L, ids_L, IGNORE)

    def _items(self, draw: int, name: str, kind: str, first: int, last: int) -> np.ndarray:
        """Return items [first, last) of a file; UserError if it ends before."""
        dtype, width = self._forms[kind]
        size = dtype.itemsize * width
        data = read_bytes(f"{self._places[draw]}/{name}.{kind}.npy", HEADER_BYTES + size * first,
                          size * (last - first))
        return np.frombuffer(data, dtype)
