"""The tokenize stage beside the raw `tokenizers` library on the same documents, in one run.

    python benchmarks/tokenizer_speed.py --text novels/*.txt --tokenizers DIR [DIR ...]

raw: `Tokenizer.from_file(...).encode_batch(documents)` and `.ids`, documents in memory; raw_fast:
`encode_batch_fast`, which keeps no offsets; stage: what data_prep does with them (reading, looking
at the text, ids, shards, checksums), one unit after another. Seconds of processor time, the best
of the turns that the ways take one after another.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import tokenizers

from deberta_ds.data.prep.documents import ReadOptions, plan_units
from deberta_ds.data.prep.readers import read_unit
from deberta_ds.data.prep.tokenize import CleanOptions, tokenize_unit
from deberta_ds.files import write_atomic

READ = ReadOptions("match:(CHAPTER|Chapter) ")


def measure(paths: list[str], directory: Path, turns: int) -> dict:
    units = plan_units(paths, READ, 0)
    fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    fast.no_padding()
    fast.no_truncation()
    documents = [document.text for unit in units for document in read_unit(unit, READ)]
    scratch = tempfile.mkdtemp()

    def raw() -> int:
        return sum(len(one.ids) for one in fast.encode_batch(documents, add_special_tokens=False))

    def raw_fast() -> int:
        found = fast.encode_batch_fast(documents, add_special_tokens=False)
        return sum(len(one.ids) for one in found)

    def stage() -> int:
        found = 0
        for number, unit in enumerate(units):
            result = tokenize_unit(number, unit, [scratch], str(directory), READ, CleanOptions(),
                                   0.0, [])
            found += sum(shard["tokens"] for shard in result["shards"][0])
        return found

    ways = {"raw": raw, "raw_fast": raw_fast, "stage": stage}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, work in ways.items():
            begin = time.process_time()
            tokens = work()
            best[name] = min(best[name], time.process_time() - begin)
    shutil.rmtree(scratch)
    num_bytes = sum(len(text.encode()) for text in documents)
    return {"documents": len(documents), "bytes": num_bytes, "tokens": tokens,
            "raw_mb_a_core_second": round(num_bytes / 1e6 / best["raw"], 2),
            "stage_mb_a_core_second": round(num_bytes / 1e6 / best["stage"], 2),
            "stage_over_raw": round(best["raw"] / best["stage"], 3),
            "stage_over_raw_fast": round(best["raw_fast"] / best["stage"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/results/tokenizer_speed.json")
    args = parser.parse_args()
    figures = {}
    for directory in args.tokenizers:
        figures[directory.name] = measure(args.text, directory, args.turns)
        print(directory.name, json.dumps(figures[directory.name]), flush=True)
    write_atomic(args.out, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
