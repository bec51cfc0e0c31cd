"""The tokenize stage compared with the raw library on the same documents, in one run.

    python benchmarks/tokenizer_speed.py --text novels/ --tokenizers DIR_OR_MODEL ...

raw: `Tokenizer.from_file(...).encode_batch_fast(documents)` of `tokenizers` and `.ids`, or of a
SentencePiece model (FILE.model) its `encode(documents, num_threads=1)`, to lists; documents in
memory, all of a unit in one call; raw_batches: 400 in a call, whose lists stay in the caches and
are thrown away. stage: what data_prep does with them: reading, text rules, ids, shards, checksums.
The text is cut to documents of one size and spread over files of JSON lines, one work unit each.

One core: raw and stage take turns at each unit, seconds of processor time, each way's best turn of
each unit; the ratio of the sums; and, of one stage alone, the share of its time that is the
library's (with the joining of its ids), the middle one of all turns, which other load on the
machine hardly moves. Workers:
the library on that many threads next to `tokenize_corpus` on that many
processes, seconds on the clock, and of the latter those from the first unit's end to the last
one's (what is before is the start of the workers).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sentencepiece
import tokenizers

from deberta_ds.base.files import write_atomic
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.tokenize import CleanOptions, tokenize_corpus, tokenize_unit
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.fast import FastEngine
from deberta_ds.tokenizer.spm import SentencePieceEngine

READ = ReadOptions()
_BATCH = 400  # documents
_UNIT_BYTES = 1 << 21  # a run's units have 4 MiB at least


def write_units(source: Path, out: Path, document_bytes: int, unit_bytes: int, units: int
                ) -> list[Path]:
    """Write documents of about one size, cut at spaces, as JSON lines; return the files."""
    files = sorted(source.rglob("*.txt"))
    share = -(-units * unit_bytes // len(files))
    text = "\n".join(path.read_text(encoding="utf-8-sig")[:share] for path in files)
    documents, begin = [], 0
    while begin < len(text):
        end = text.find(" ", begin + document_bytes)
        end = end if end > 0 else len(text)
        documents.append(text[begin:end])
        begin = end + 1
    paths, each = [], -(-len(documents) // units)
    for number in range(units):
        some = documents[number * each : (number + 1) * each]
        paths.append(out / f"{number:03d}.jsonl")
        write_atomic(paths[-1], "".join(json.dumps({"text": one}) + "\n" for one in some))
    return paths


def load(directory: Path) -> tokenizers.Tokenizer | sentencepiece.SentencePieceProcessor:
    if directory.is_file():
        return sentencepiece.SentencePieceProcessor(model_file=str(directory))
    fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    fast.no_padding()
    fast.no_truncation()
    return fast


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def raw_tokens(fast, documents: list[str], threads: int = 1) -> int:
    if isinstance(fast, sentencepiece.SentencePieceProcessor):
        return sum(map(len, fast.encode(documents, num_threads=threads)))
    found = fast.encode_batch_fast(documents, add_special_tokens=False)
    return sum(len(one.ids) for one in found)


def one_core(directory: Path, paths: list[Path], scratch: Path, turns: int) -> dict:
    """Return the speeds of one core and their ratios, the ways in turns."""
    fast, tokenizer = load(directory), Tokenizer(directory)
    units = [plan_units([str(path)], READ, 1 << 40)[0] for path in paths]
    bests, shares, tokens, num_bytes = [], [], 0, 0
    tiny = scratch.parent / "tiny.jsonl"
    write_atomic(tiny, '{"text": "what is loaded once"}\n')
    tokenize_unit(0, plan_units([str(tiny)], READ)[0], [str(scratch)], tokenizer, READ,
                  CleanOptions(), 0.0, [])
    engine = SentencePieceEngine if directory.is_file() else FastEngine
    encode, library = engine.encode_joined, [0.0]

    def timed(self, texts: list[str]) -> tuple:
        begin = time.process_time()
        found = encode(self, texts)
        library[0] += time.process_time() - begin
        return found

    engine.encode_joined = timed
    for number in range(len(units)):
        documents = texts(paths[number])
        num_bytes += sum(len(text.encode()) for text in documents)

        def raw(documents=documents) -> int:
            return raw_tokens(fast, documents)

        def raw_batches(documents=documents) -> int:
            return sum(raw_tokens(fast, documents[begin : begin + _BATCH])
                       for begin in range(0, len(documents), _BATCH))

        def stage(number=number) -> int:
            result = tokenize_unit(number, units[number], [str(scratch)], tokenizer, READ,
                                   CleanOptions(), 0.0, [])
            return sum(shard["tokens"] for shard in result["shards"][0])

        ways = [("raw", raw), ("stage", stage), ("raw_batches", raw_batches)]
        counts, best = {}, {name: float("inf") for name, _ in ways}
        for turn in range(turns):
            for name, work in ways[:: 1 if turn % 2 else -1]:
                begin, library[0] = time.process_time(), 0.0
                counts[name] = work()
                seconds = time.process_time() - begin
                best[name] = min(best[name], seconds)
                shares += [library[0] / seconds] if name == "stage" else []
        assert len(set(counts.values())) == 1, counts
        tokens += counts["raw"]
        bests.append((best["raw"], best["stage"], best["raw_batches"]))
    engine.encode_joined = encode
    raw, stage, batches = map(sum, zip(*bests, strict=True))
    return {"tokens": tokens, "raw_mb_a_second": num_bytes / 1e6 / raw,
            "raw_batches_mb_a_second": num_bytes / 1e6 / batches,
            "stage_mb_a_second": num_bytes / 1e6 / stage, "ratio": raw / stage,
            "ratio_to_batches": batches / stage, "library_share": statistics.median(shares)}


_RAW_THREADS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tokenizer_speed import load, raw_tokens, texts
fast, threads = load(Path(sys.argv[2])), int(sys.argv[3])
documents = [text for path in sys.argv[4:] for text in texts(Path(path))]
begin = time.perf_counter()
print(raw_tokens(fast, documents, threads), time.perf_counter() - begin)
"""


def with_workers(directory: Path, paths: list[Path], scratch: Path, workers: int, turns: int
                 ) -> dict:
    """Return the best seconds on the clock of the library's threads and of the stage's workers."""
    best = {"raw": float("inf"), "stage": float("inf"), "stage_started": float("inf")}
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers)}
    tokenizer = Tokenizer(directory)
    units = [plan_units([str(path)], READ, 1 << 40)[0] for path in paths]  # as written, one a file
    for turn in range(turns):
        shown = subprocess.run(
            [sys.executable, "-c", _RAW_THREADS, str(Path(__file__).parent), str(directory),
             str(workers), *map(str, paths)],
            env=environment, check=True, capture_output=True, text=True)
        best["raw"] = min(best["raw"], float(shown.stdout.split()[1]))
        begin = time.perf_counter()
        out = scratch / f"corpus-{turn}"
        tokenize_corpus(units, out, tokenizer, read=READ, clean=CleanOptions(), workers=workers)
        best["stage"] = min(best["stage"], time.perf_counter() - begin)
        ends = sorted(path.stat().st_mtime for path in (out / "tokens").iterdir())
        started = (ends[-1] - ends[workers - 1]) * len(ends) / (len(ends) - workers)
        best["stage_started"] = min(best["stage_started"], started)
    return {f"{name}_seconds": value for name, value in best.items()} | {
        "ratio": best["raw"] / best["stage"], "ratio_started": best["raw"] / best["stage_started"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True)
    parser.add_argument("--document_bytes", type=int, nargs="+", default=(300, 3000, 30000, 600000))
    parser.add_argument("--unit_bytes", type=int, default=_UNIT_BYTES)
    parser.add_argument("--units", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default="benchmarks/results/tokenizer_speed.json")
    args = parser.parse_args()
    if args.workers and args.units < 2 * args.workers:
        parser.error(f"--workers {args.workers} wants at least {2 * args.workers} --units")
    figures = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for directory in args.tokenizers:
        for size in args.document_bytes:
            with tempfile.TemporaryDirectory() as scratch:
                paths = write_units(args.text, Path(scratch) / "text", size, args.unit_bytes,
                                    args.units)
                if args.workers:
                    found = with_workers(directory, paths, Path(scratch), args.workers, args.turns)
                else:
                    found = one_core(directory, paths, Path(scratch) / "corpus", args.turns)
            place = f"{args.workers} workers" if args.workers else "one core"
            if args.unit_bytes != _UNIT_BYTES:
                place += f", units of {args.unit_bytes >> 20} MiB"
            found = {name: round(value, 3) for name, value in found.items()}
            figures.setdefault(place, {}).setdefault(directory.name, {})[str(size)] = found
            print(place, directory.name, size, json.dumps(found), flush=True)
            write_atomic(args.out, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
