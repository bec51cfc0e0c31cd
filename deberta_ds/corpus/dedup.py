"""Find duplicate documents out of core: exact ones by hash, near ones by their 5-grams.

Stage "hash": each work unit writes tables of at most PART_DOCUMENTS documents: 128-bit hashes of
the normalized texts, sorted; for near duplicates also signatures, sketches and band keys. Stage
"exact": each range of hashes is read from every table, and of each group of equal hashes all but
the first document, in input order, are duplicates. Stage "near" does the same with band keys, and
compares the documents of a group. Memory is one part or one bucket, however many documents are
alike.

Duplicates across corpora are found by one call over all of them (findings.py).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from deberta_ds.base.errors import UserError, of_extra
from deberta_ds.corpus import findings
from deberta_ds.corpus.documents import Extent, ReadOptions
from deberta_ds.corpus.findings import FOUND, Findings, merge_found, number_of, save_found
from deberta_ds.corpus.units import Part, digest_of, extents_of, identified, job, run_units
from deberta_ds.data.corpus import map_array
from deberta_ds.data.shards import MANIFEST, save_array
from deberta_ds.tokenizer.text import TEXT_RULES_VERSION, UNSPACED

# Near duplicates: which pairs of documents are looked at, and how similar they are.
#
# A document is the set of its word 5-grams; in scripts written without spaces each character is a
# word. MinHash signatures cut into bands (package datasketch) say which documents meet. How
# similar two of them are is then counted on the sets themselves, which are kept as their 1,024
# smallest 32-bit hashes: exact for documents of up to so many 5-grams, and beyond an estimate with
# a standard deviation of at most 0.016.
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
    with of_extra("neardup", "--near"):
        import datasketch  # noqa: F401
    return next((PERMUTATIONS // entries, entries) for entries in range(PERMUTATIONS, 0, -1)
                if 1 - (1 - threshold**entries) ** (PERMUTATIONS // entries) >= _RECALL)


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
    """Documents that share a band: those that stay are remembered, at most 1,024."""

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._signatures = np.empty((2, PERMUTATIONS), dtype="<u4")
        self._sketches: list[np.ndarray] = []

    def has(self, signature: np.ndarray, sketch: np.ndarray) -> bool:
        """Return whether the document is like one that stays; if not, it stays too."""
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


PART_DOCUMENTS = 1 << 15  # of one table: about 100 MB with all that near duplicates need
BUCKET_DOCUMENTS = 1 << 21  # hashes in one bucket: about 200 MB
NEAR_BUCKET_KEYS = 1 << 18
NEAR_DOCUMENTS = 1 << 14  # read at a time: at most about 80 MB
_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("file", "<u4"), ("where", "<u8")])
_BAND = np.dtype([("high", "<u8"), ("low", "<u4"), ("row", "<u4")])


def find_duplicates(planned: list[list[Extent]], out: str | Path, *, read: ReadOptions,
                    near_threshold: float = 0.0, workers: int = 1, part: Part = None
                   ) -> dict[str, int]:
    """Write the duplicates to `out`; return counts of documents, exact and near; {} for a part."""
    out = Path(out)
    bands = near_bands(near_threshold) if near_threshold else (0, 0)
    units = identified(planned, out, part)
    description = {"version": findings.FINDINGS_VERSION, "read": asdict(read),
                   "text_rules": TEXT_RULES_VERSION, "near_threshold": near_threshold,
                   "bands": list(bands)}
    with job(out, description, finished=MANIFEST, part=part, units=units) as is_done:
        if not is_done:
            counts = _search(out, units, read, near_threshold, bands, workers, part)
            if not counts:
                return {}
            findings.finish_findings(out, units, read, "duplicate", counts)
    return Findings(out).counts


# A table, and the number among all inputs of each file of its unit. In the table, a file's number
# is that in its unit, so that it stays true when other inputs come and go.
Table = tuple[str, list[int]]


def _search(out: Path, units: dict[str, list[Extent]], read: ReadOptions, threshold: float,
            bands: tuple[int, int], workers: int, part: Part) -> dict[str, int]:
    """Run all stages and return the counts, {} after a part."""
    numbers = number_of(extents_of(units.values()))
    jobs: dict[str, tuple] = {name: (str(out), name, unit, read, bands)
                              for name, unit in units.items()}
    hashed = run_units(out, hash_unit, jobs, workers=workers, label="hash", part=part)
    if part:
        return {}
    tables = [(name, [numbers[source] for source in number_of(unit)])
              for unit, result in zip(units.values(), hashed, strict=True)
              for name in result["tables"]]
    findings.check_any_read(hashed)
    documents, digest = sum(result["documents"] for result in hashed), digest_of(units)
    exact = -(-documents // BUCKET_DOCUMENTS) if tables else 0  # of texts that are not empty
    jobs = {f"{digest}-exact-{bucket:05d}": (str(out), digest, tables, bucket, exact)
            for bucket in range(exact)}
    run_units(out, exact_bucket, jobs, workers=workers, label="exact")
    exact_count = merge_found(out, f"{digest}-exact", len(numbers))
    close = -(-documents * bands[0] // NEAR_BUCKET_KEYS) if tables else 0  # each once a band
    jobs = {f"{digest}-near-{bucket:05d}": (str(out), digest, tables, bucket, close, threshold)
            for bucket in range(close)}
    run_units(out, near_bucket, jobs, workers=workers, label="near")
    total = merge_found(out, digest, len(numbers))
    return {"documents": documents, "exact": exact_count, "near": total - exact_count}


def hash_unit(out: str, name: str, unit: list[Extent], read: ReadOptions, bands: tuple[int, int]
             ) -> dict:
    """Write the tables of one unit's documents; return their names and counts."""
    numbers = number_of(unit)
    sign = signer() if bands[0] else None
    rows: list[tuple[int, int, int, int]] = []
    signed: list[tuple[np.ndarray, np.ndarray]] = []
    tables: list[str] = []
    counts: dict = {}

    def flush() -> None:
        tables.append(f"{name}-{len(tables):03d}")
        table = np.array(rows, dtype=_HASH)
        save_array(_table(out, "hashes", tables[-1]), _ordered(table))
        if sign:
            _save_signed(out, tables[-1], signed, table, bands)
        rows.clear()
        signed.clear()

    for document, text in findings.read_normalized(unit, read, counts):
        if not text:
            continue
        digest = xxhash.xxh3_128_intdigest(text.encode())
        rows.append((digest >> 64, digest & (1 << 64) - 1, numbers[document.path], document.where))
        if sign:
            signed.append(sign(text))
        if len(rows) == PART_DOCUMENTS:
            flush()
    if rows:
        flush()
    return counts | {"tables": tables}


def _save_signed(out: str, name: str, signed: list, table: np.ndarray, bands: tuple) -> None:
    signatures, sketches = np.array([one[0] for one in signed]), [one[1] for one in signed]
    save_array(_table(out, "signatures", name), signatures)
    save_array(_table(out, "sketches", name), np.concatenate(sketches))
    save_array(_table(out, "sketch_ends", name), np.cumsum(list(map(len, sketches)), dtype="<i8"))
    save_array(_table(out, "places", name), table[["file", "where"]].astype(FOUND))
    keys = np.empty(len(signed) * bands[0], dtype=_BAND)
    for band in range(bands[0]):  # its key: a hash of a signature's entries in it
        part = keys[band * len(signed) : (band + 1) * len(signed)]
        part["high"] = [xxhash.xxh3_64_intdigest(row.tobytes(), seed=band)
                        for row in signatures[:, band * bands[1] : (band + 1) * bands[1]]]
        part["low"], part["row"] = band, np.arange(len(signed))
    order = np.lexsort((keys["row"], keys["low"], keys["high"]))
    save_array(_table(out, "bands", name), keys[order])


def exact_bucket(out: str, digest: str, tables: list[Table], bucket: int, count: int) -> dict:
    """Write the duplicates among the hashes of one bucket; all but the first of each group."""
    parts = list(_bucket_parts(out, "hashes", tables, bucket, count))
    for number, part in parts:
        part["file"] = np.array(tables[number][1])[part["file"]]
    table = _ordered(np.concatenate([part for _, part in parts]))
    later = np.flatnonzero(_same_as_before(table)) + 1
    found = table[["file", "where"]][later].astype(FOUND)
    save_found(out, f"{digest}-exact-{bucket:05d}", found)
    return {}


def near_bucket(out: str, digest: str, tables: list[Table], bucket: int, count: int,
                threshold: float) -> dict:
    """Write the near duplicates among the band keys of one bucket."""
    numbers, parts = zip(*_bucket_parts(out, "bands", tables, bucket, count), strict=True)
    keys = np.concatenate(parts)
    table_of = np.repeat(np.array(numbers), [len(part) for part in parts])
    order = np.lexsort((keys["row"], table_of, keys["low"], keys["high"]))
    keys, table_of = keys[order], table_of[order]
    same = _same_as_before(keys)
    begins_group = np.append(True, ~same)
    shared = np.flatnonzero(np.append(False, same) | np.append(same, False))
    found, group = [np.empty(0, FOUND)], Group(threshold)
    for start in range(0, len(shared), NEAR_DOCUMENTS):  # a group may go on in the next part
        part = shared[start : start + NEAR_DOCUMENTS]
        documents = _Documents(out, tables, table_of[part], keys["row"][part])
        later = []
        for item, begins in zip(documents.items, begins_group[part].tolist(), strict=True):
            if begins:
                group = Group(threshold)
            if group.has(documents.signatures[item], documents.sketches[item]):
                later.append(item)
        found.append(documents.places[later])
    save_found(out, f"{digest}-near-{bucket:05d}", np.unique(np.concatenate(found)))
    return {}


class _Documents:
    """Signatures, sketches and places of some documents, read one table at a time.

    Attributes: items, the number of each (table number, row) asked for; signatures, sketches and
    places by that number.
    """

    def __init__(self, out: str, tables: list[Table], table_of: np.ndarray, rows: np.ndarray):
        asked = table_of.astype(np.uint64) << np.uint64(32) | rows.astype(np.uint64)
        documents, items = np.unique(asked, return_inverse=True)
        self.items: list[int] = items.tolist()
        self.signatures = np.empty((len(documents), PERMUTATIONS), dtype="<u4")
        self.sketches: list[np.ndarray] = []
        self.places = np.empty(len(documents), FOUND)
        numbers, done = (documents >> np.uint64(32)).astype(np.int64), 0
        for number in np.unique(numbers).tolist():
            wanted = (documents[numbers == number] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            (name, files), here = tables[number], slice(done, done + len(wanted))
            self.signatures[here] = map_array(_table(out, "signatures", name))[wanted]
            sketches = map_array(_table(out, "sketches", name))
            ends = np.append(0, map_array(_table(out, "sketch_ends", name)))
            self.sketches += [np.array(sketches[ends[row] : ends[row + 1]]) for row in wanted]
            self.places[here] = map_array(_table(out, "places", name))[wanted]
            self.places["file"][here] = np.array(files)[self.places["file"][here]]
            done += len(wanted)


def _bucket_parts(out: str, kind: str, tables: list[Table], bucket: int, count: int
                 ) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (table number, its rows whose hash lies in the bucket's range)."""
    low_edge, high_edge = bucket * 2**64 // count, (bucket + 1) * 2**64 // count
    for number, (name, _) in enumerate(tables):
        table = map_array(_table(out, kind, name))
        low = int(np.searchsorted(table["high"], np.uint64(low_edge)))
        last = bucket + 1 == count
        high = len(table) if last else int(np.searchsorted(table["high"], np.uint64(high_edge)))
        yield number, np.array(table[low:high])


def _ordered(table: np.ndarray) -> np.ndarray:
    """Return hashes in order, equal ones by their places."""
    return table[np.lexsort((table["where"], table["file"], table["low"], table["high"]))]


def _same_as_before(table: np.ndarray) -> np.ndarray:
    """Return bool[n - 1]: whether each entry but the first has the hash of the one before it."""
    return (table["high"][1:] == table["high"][:-1]) & (table["low"][1:] == table["low"][:-1])


def _table(out: str, kind: str, name: str) -> Path:
    return Path(out) / kind / f"{name}.npy"
