"""Near duplicates: which pairs of documents are looked at, and how similar they are.

A document is the set of its word 5-grams; in scripts written without spaces each character is a
word. MinHash signatures cut into bands (package datasketch) say which documents meet. How similar
two of them are is then counted on the sets themselves, which are kept as their 1,024 smallest
32-bit hashes: exact for documents of up to so many 5-grams, and beyond an estimate with a standard
deviation of at most 0.016.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import xxhash

from deberta_ds.data.prep.words import UNSPACED
from deberta_ds.errors import UserError

PERMUTATIONS, SHINGLE_WORDS, SKETCH_HASHES = 128, 5, 1024
_RECALL = 0.99  # of pairs just at the threshold: how many of them meet in a band
_SIGNATURE_ERROR = 0.14  # four standard deviations of a similarity estimated by signatures
_REPRESENTATIVES = 1024  # bounds the comparisons where a band is shared by very many documents
_WORD = re.compile(f"[{UNSPACED}]|[^\\s{UNSPACED}]+")
_BATCH = 1 << 12
_hash32 = partial(xxhash.xxh32_intdigest, seed=0)


def near_bands(threshold: float) -> tuple[int, int]:
    """Return (bands, entries of a band): the longest bands that meet 99 % at the threshold."""
    if not 0.3 <= threshold < 1:
        raise UserError(f"--near {threshold}: must be in [0.3, 1)")
    try:
        import datasketch  # noqa: F401
    except ImportError as error:
        raise UserError(
            "near-duplicate removal needs the package datasketch: pip install datasketch"
        ) from error
    for entries in range(PERMUTATIONS, 1, -1):
        bands = PERMUTATIONS // entries
        if 1 - (1 - threshold**entries) ** bands >= _RECALL:
            return bands, entries
    return PERMUTATIONS, 1


def signer() -> Callable[[str], tuple[np.ndarray, np.ndarray]]:
    """Return the function text -> (MinHash signature u32[128], sketch: sorted u32 hashes)."""
    from datasketch import MinHash

    empty = MinHash(PERMUTATIONS, seed=1, hashfunc=int)  # it is given hashes

    def sign(text: str) -> tuple[np.ndarray, np.ndarray]:
        words = _WORD.findall(text.lower()) or [""]
        shingles = {" ".join(words[i : i + SHINGLE_WORDS]).encode()
                    for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
        hashes = np.unique(np.fromiter(map(_hash32, shingles), "<u4", len(shingles)))
        minhash = empty.copy()
        for start in range(0, len(hashes), _BATCH):  # a batch takes 1 KiB for each hash
            minhash.update_batch(hashes[start : start + _BATCH].tolist())
        return minhash.hashvalues.astype("<u4"), hashes[:SKETCH_HASHES]

    return sign


def band_keys(signatures: np.ndarray, bands: tuple[int, int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (band, 64-bit key of each signature's entries in that band)."""
    for band in range(bands[0]):
        part = np.ascontiguousarray(signatures[:, band * bands[1] : (band + 1) * bands[1]])
        yield band, [xxhash.xxh3_64_intdigest(row.tobytes(), seed=band) for row in part]


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Jaccard similarity of two sketches (module text)."""
    merged = np.concatenate([first, second])
    merged.sort()
    twice = merged[1:] == merged[:-1]
    distinct = len(merged) - int(twice.sum())
    if distinct <= SKETCH_HASHES or max(len(first), len(second)) < SKETCH_HASHES:
        return (len(merged) - distinct) / distinct
    # The 1,024 smallest of both together: of larger ones a sketch may have left some out.
    is_new = np.append(True, ~twice)
    last = np.flatnonzero(is_new)[SKETCH_HASHES]
    return int(twice[: last - 1].sum()) / SKETCH_HASHES


class Group:
    """Documents that share a band, one after another; those that stay are remembered, at most
    1,024 of them.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._signatures = np.empty((2, PERMUTATIONS), dtype="<u4")
        self._sketches: list[np.ndarray] = []

    def has(self, signature: np.ndarray, sketch: np.ndarray) -> bool:
        """Return whether the similarity of this document to one that stays is at least the
        threshold; if not, it stays too.
        """
        count = len(self._sketches)
        estimates = (self._signatures[:count] == signature).mean(axis=1)
        likely = np.flatnonzero(estimates >= self._threshold - _SIGNATURE_ERROR)
        nearest_first = likely[np.argsort(-estimates[likely], kind="stable")].tolist()
        if any(similarity(self._sketches[number], sketch) >= self._threshold
               for number in nearest_first):
            return True
        if count < _REPRESENTATIVES:
            if count == len(self._signatures):
                self._signatures = np.concatenate([self._signatures, self._signatures])
            self._signatures[count] = signature
            self._sketches.append(sketch)
        return False
