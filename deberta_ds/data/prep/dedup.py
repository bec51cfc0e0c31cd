"""Find duplicate documents out of core: exact ones by hash, near ones by MinHash.

Stage "hash": each work unit writes the 128-bit hashes of its normalised documents, sorted. Stage
"bucket": each range of hashes is read from every unit's file (a binary search in a memory map), and
of each group of equal hashes all but the first document, in input order, are duplicates. Memory is
one bucket. tokenize_corpus leaves the duplicates out.

Near duplicates (optional, package datasketch) add stage "near": MinHash signatures of word 5-grams,
cut into bands. A document is dropped if it shares a band with an earlier document and the share of
equal signature entries, an estimate of the Jaccard similarity, reaches the threshold. Of the
documents that share a band it is compared with each earlier one that is no duplicate itself, up to
1,024 of them. Bands are chosen for recall, since the signatures decide: at a threshold of 0.8, 16
bands of 8 entries meet 95 % of the pairs of similarity 0.8 and 99.4 % of those of 0.85.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from deberta_ds.data.corpus import map_array
from deberta_ds.data.prep.documents import Extent, ReadOptions
from deberta_ds.data.prep.readers import read_unit
from deberta_ds.data.prep.text import TEXT_RULES_VERSION, BadTextError, normalise
from deberta_ds.data.prep.units import close_job, open_job, run_units
from deberta_ds.data.shards import MANIFEST, save_array
from deberta_ds.errors import UserError
from deberta_ds.files import write_atomic

BUCKET_DOCUMENTS = 1 << 21  # documents in one bucket: about 200 MB
PERMUTATIONS, SHINGLE_WORDS = 128, 5
_ERROR_WEIGHTS = (0.05, 0.95)  # of a needless comparison and of a pair never compared
_REPRESENTATIVES = 1024  # bounds the comparisons where a band is shared by very many documents
_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("index", "<u4")])
_FOUND = np.dtype([("unit", "<u4"), ("index", "<u4")])


def find_duplicates(
    units: list[list[Extent]],
    out: str | Path,
    *,
    read: ReadOptions,
    near_threshold: float = 0.0,
    workers: int = 1,
) -> dict[str, int]:
    """Write the directory `out` of duplicates and return {"documents", "exact", "near"} counts."""
    out = Path(out)
    if near_threshold and not 0.3 <= near_threshold < 1:
        raise UserError(f"near threshold {near_threshold} must be in [0.3, 1)")
    bands = near_bands(near_threshold) if near_threshold else (0, 0)
    plan = {
        "units": units_digest(units), "read": asdict(read), "text_rules": TEXT_RULES_VERSION,
        "near_threshold": near_threshold,
    } | ({"bands": list(bands)} if near_threshold else {})
    if not open_job(out, plan, finished=MANIFEST):
        jobs = {f"hash-{number:05d}": (str(out), number, unit, read, bands)
                for number, unit in enumerate(units)}
        hashed = run_units(out, hash_unit, jobs, workers=workers, label="hash")
        documents = sum(result["documents"] for result in hashed)
        count = max(1, -(-documents // BUCKET_DOCUMENTS))
        jobs = {f"exact-{bucket:05d}": (str(out), len(units), bucket, count)
                for bucket in range(count)}
        exact = run_units(out, exact_bucket, jobs, workers=workers, label="exact")
        near_count = -(-documents * bands[0] // BUCKET_DOCUMENTS)  # each document once a band
        jobs = {f"near-{bucket:05d}": (str(out), len(units), bucket, near_count, near_threshold)
                for bucket in range(near_count)}
        run_units(out, near_bucket, jobs, workers=workers, label="near")
        counts = {"documents": documents, "exact": sum(r["found"] for r in exact), "near": 0}
        if near_threshold:
            total = sum(len(duplicates_of(out, number)) for number in range(len(units)))
            counts["near"] = total - counts["exact"]
        manifest = {"version": 1, "units": plan["units"], "buckets": count, "counts": counts}
        write_atomic(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    close_job(out)
    return json.loads((out / MANIFEST).read_bytes())["counts"]


def units_digest(units: list[list[Extent]]) -> str:
    """Return the digest of a plan: it ties a job, and its duplicates, to its inputs."""
    digest = hashlib.sha256()
    for unit in units:
        for extent in unit:
            digest.update(f"{extent.path}\0{extent.kind}\0{extent.start}\0{extent.end}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def check_duplicates(directory: str | Path, units: list[list[Extent]]) -> None:
    """UserError unless `directory` holds the finished duplicates of these very units."""
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not finished ({error}); run data_prep/dedup.py first") from error
    if manifest.get("units") != units_digest(units):
        raise UserError(
            f"{path}: found for other inputs or reading options; run data_prep/dedup.py with the "
            "same inputs, --documents and --unit_bytes into a new directory"
        )


def duplicates_of(directory: str | Path, unit: int) -> np.ndarray:
    """Return the sorted numbers of the documents of one unit that are to be left out."""
    parts = [np.zeros(0, dtype=np.uint32)]
    for path in sorted((Path(directory) / "found").glob("*.npy")):
        found = map_array(path)
        low, high = np.searchsorted(found["unit"], [unit, unit + 1])
        parts.append(np.array(found["index"][low:high]))
    return np.unique(np.concatenate(parts))


def hash_unit(
    out: str, number: int, unit: list[Extent], read: ReadOptions, bands: tuple[int, int]
) -> dict:
    """Write the sorted hashes of one unit's documents (and signatures, if bands are asked for)."""
    high, low, index = array("Q"), array("Q"), array("I")
    signature_of = _signer() if bands[0] else None
    signatures: list[np.ndarray] = []
    total = 0
    for position, text in _texts(unit, read):
        total += 1
        if not text:
            continue
        digest = xxhash.xxh3_128_intdigest(text.encode())
        high.append(digest >> 64)
        low.append(digest & (1 << 64) - 1)
        index.append(position)
        if signature_of:
            signatures.append(signature_of(text))
    table = np.empty(len(index), dtype=_HASH)
    table["high"], table["low"], table["index"] = high, low, index
    save_array(_table(out, "hashes", number), table[np.lexsort((index, low, high))])
    if signature_of:
        stacked = np.array(signatures, dtype="<u4").reshape(-1, PERMUTATIONS)
        save_array(_table(out, "signatures", number), stacked)
        save_array(_table(out, "positions", number), np.array(index, dtype="<u4"))
        save_array(_table(out, "bands", number), _band_table(stacked, bands))
    return {"documents": total}


def exact_bucket(out: str, num_units: int, bucket: int, count: int) -> dict:
    """Write the duplicates among the hashes of one bucket; all but the first of each group."""
    unit, table = _in_hash_order(_bucket_parts(out, "hashes", num_units, bucket, count))
    later = np.flatnonzero(_same_as_before(table)) + 1
    _save_found(out, f"exact-{bucket:05d}", unit[later], table["index"][later])
    return {"found": len(later)}


def near_bands(threshold: float) -> tuple[int, int]:
    """Return (bands, entries of a band) that datasketch finds best for `threshold`."""
    try:
        from datasketch import MinHashLSH
    except ImportError as error:
        raise UserError(
            "near-duplicate removal needs the package datasketch: pip install datasketch"
        ) from error
    index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=_ERROR_WEIGHTS)
    return index.b, index.r


def near_bucket(out: str, num_units: int, bucket: int, count: int, threshold: float) -> dict:
    """Write the near duplicates among the band keys of one bucket."""
    signatures = [map_array(_table(out, "signatures", number)) for number in range(num_units)]
    positions = [map_array(_table(out, "positions", number)) for number in range(num_units)]
    unit, table = _in_hash_order(_bucket_parts(out, "bands", num_units, bucket, count))
    new_key = np.append(True, ~_same_as_before(table))
    edges = np.append(np.flatnonzero(new_key), len(table))
    found = []
    for group in np.flatnonzero(np.diff(edges) > 1).tolist():
        first, last = edges[group], edges[group + 1]
        rows = zip(unit[first:last].tolist(), table["index"][first:last].tolist(), strict=True)
        later = similar_to_earlier((signatures[number][row] for number, row in rows), threshold)
        found += [(unit[first + item], positions[unit[first + item]][table["index"][first + item]])
                  for item in later]
    pairs = np.array(found, dtype="<u4").reshape(-1, 2)
    _save_found(out, f"near-{bucket:05d}", pairs[:, 0], pairs[:, 1])
    return {"found": len(pairs)}


def similar_to_earlier(signatures: Iterable[np.ndarray], threshold: float) -> list[int]:
    """Return the numbers of the signatures that agree in at least `threshold` of their entries with
    an earlier one that is not itself returned.
    """
    kept = np.empty((_REPRESENTATIVES, PERMUTATIONS), dtype="<u4")
    found, count = [], 0
    for number, signature in enumerate(signatures):
        if count and (kept[:count] == signature).mean(axis=1).max() >= threshold:
            found.append(number)
        elif count < _REPRESENTATIVES:
            kept[count] = signature
            count += 1
    return found


def _texts(unit: list[Extent], read: ReadOptions) -> Iterator[tuple[int, str]]:
    """Yield (document number, normalised text; "" where tokenize_corpus will complain)."""
    for position, document in enumerate(read_unit(unit, read)):
        try:
            yield position, "" if document.problem else normalise(document.text)
        except BadTextError:
            yield position, ""


def _signer():
    from datasketch import MinHash

    def sign(text: str) -> np.ndarray:
        words = text.lower().split()
        shingles = {" ".join(words[i : i + SHINGLE_WORDS])
                    for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
        sketch = MinHash(PERMUTATIONS, seed=1, hashfunc=_hash32)
        sketch.update_batch([shingle.encode() for shingle in sorted(shingles)])
        return sketch.hashvalues.astype("<u4")

    return sign


_hash32 = partial(xxhash.xxh32_intdigest, seed=0)


def _band_table(signatures: np.ndarray, bands: tuple[int, int]) -> np.ndarray:
    """Return the sorted band keys of one unit: `index` is the row of its signature table."""
    table = np.empty(len(signatures) * bands[0], dtype=_HASH)
    for band in range(bands[0]):
        part = np.ascontiguousarray(signatures[:, band * bands[1] : (band + 1) * bands[1]])
        rows = table[band * len(signatures) : (band + 1) * len(signatures)]
        rows["high"] = [xxhash.xxh3_64_intdigest(row.tobytes(), seed=band) for row in part]
        rows["low"] = band
        rows["index"] = np.arange(len(signatures))
    return table[np.lexsort((table["index"], table["low"], table["high"]))]


def _bucket_parts(
    out: str, kind: str, num_units: int, bucket: int, count: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (unit, its rows whose hash lies in the bucket's range)."""
    low_edge, high_edge = bucket * 2**64 // count, (bucket + 1) * 2**64 // count
    for number in range(num_units):
        table = map_array(_table(out, kind, number))
        low = int(np.searchsorted(table["high"], np.uint64(low_edge)))
        last = bucket + 1 == count
        high = len(table) if last else int(np.searchsorted(table["high"], np.uint64(high_edge)))
        yield number, np.array(table[low:high])


def _in_hash_order(parts: Iterator[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (unit, table) of all parts, sorted by hash, then in input order."""
    numbers, tables = zip(*parts, strict=True)
    unit = np.repeat(np.array(numbers, dtype="<u4"), [len(table) for table in tables])
    table = np.concatenate(tables)
    order = np.lexsort((table["index"], unit, table["low"], table["high"]))
    return unit[order], table[order]


def _same_as_before(table: np.ndarray) -> np.ndarray:
    """Return bool[n - 1]: whether each entry but the first has the hash of the one before it."""
    return (table["high"][1:] == table["high"][:-1]) & (table["low"][1:] == table["low"][:-1])


def _table(out: str, kind: str, number: int) -> Path:
    return Path(out) / kind / f"{number:05d}.npy"


def _save_found(out: str, name: str, unit: np.ndarray, index: np.ndarray) -> None:
    found = np.empty(len(unit), dtype=_FOUND)
    found["unit"], found["index"] = unit, index
    order = np.lexsort((found["index"], found["unit"]))
    save_array(Path(out) / "found" / f"{name}.npy", found[order])
