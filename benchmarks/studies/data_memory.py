"""Measure the largest memory of a process of every prep command, on texts of several sizes.

    python -m benchmarks.studies.data_memory --text DIR_OF_TXT --scratch DIR --seconds 550

Texts: 50 MB and 500 MB of novels by chapter, and one file of 1 GB of JSON lines of about 1,000
characters. Commands that are done are kept in benchmarks/results/data_memory_commands.json; after
--seconds the last one is killed, and the same line goes on with it, until it prints "complete".
"""

import argparse
import json
import time
from pathlib import Path

from benchmarks.data import CHAPTERS, PREP, RESULTS, machine, novels, run

SIZES = {"50 MB": 50_000_000, "500 MB": 500_000_000, "1 GB of small documents": 1_000_000_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="directory of .txt files")
    parser.add_argument("--scratch", type=Path, required=True, help="directory to work in")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--only", default="", help="commands whose names begin so")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    end, out = time.monotonic() + args.seconds, RESULTS / "data_memory_commands.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    found |= {"machine": machine()}
    text, model = novels(args)
    lines = {size: commands(args, input_text(args.scratch, text, size, count), model)
             for size, count in SIZES.items()}
    # The slow ones come last.
    for name in [name for name in lines["50 MB"] if name.startswith(args.only)]:
        for size, of_size in lines.items():
            command = of_size[name]
            figures = found.setdefault("peak_mib", {}).setdefault(size, {})
            before = figures.get(name, {"peak_mib": 0, "seconds": 0.0, "ended": False})
            if before["ended"]:
                continue
            if end - time.monotonic() < 5:
                return
            now = run(*command, most_seconds=end - time.monotonic())
            figures[name] = {"peak_mib": max(now["peak_mib"], before["peak_mib"]),
                             "seconds": round(now["seconds"] + before["seconds"], 1),
                             "ended": now["ended"]}
            out.write_text(json.dumps(found, indent=1) + "\n")
            if not now["ended"]:
                return
    print("complete")


def input_text(scratch: Path, text: Path, size: str, count: int) -> Path:
    """Return a file of about `count` bytes, made once."""
    is_small = "small" in size
    path = scratch / f"{count // 1_000_000}{'.jsonl' if is_small else '.txt'}"
    if path.exists():
        return path
    temporary, written, number = path.with_suffix(".tmp"), 0, 0
    with open(temporary, "wb") as out:
        while written < count:
            with open(text, "rb") as source:
                while written < count and (part := source.read(1000 if is_small else 1 << 20)):
                    if is_small:
                        words = f"{number} {part.decode('utf-8', 'ignore')}"
                        part = json.dumps({"text": words, "id": f"doc-{number}"}).encode() + b"\n"
                    written += out.write(part)
                    number += 1
    temporary.rename(path)
    return path


def commands(args, source: Path, model: Path) -> dict[str, list]:
    """Return {name: command} in their order."""
    root = args.scratch / f"of_{source.stem}"
    read = ["--id_key", "id"] if source.suffix == ".jsonl" else CHAPTERS
    text, workers = [source, *read], ["--workers", 2]
    corpus, tokenizer = root / "corpus", ["--tokenizer", model]
    name = "doc-17" if source.suffix == ".jsonl" else f"{source}@0"
    # The larger text of novels is the smaller one repeated: its duplicates would leave little.
    left_out = root / ("found" if source.suffix == ".jsonl" else "contaminated")
    evaluation = args.scratch / "evaluation.txt"
    if not evaluation.exists():
        lines = (args.scratch / "text.txt").read_text("utf-8").splitlines()
        evaluation.write_text("\n".join(lines[5000:7000]))
    return {
        "train_tokenizer, 8 MiB sample": [PREP / "train_tokenizer.py", source, *read,
                                          "--vocab_size", 8000, "--sample_bytes", 8 << 20, "--out",
                                          root / "m.model"],
        "dedup": [PREP / "dedup.py", *text, "--out", root / "found", *workers],
        "decontaminate": [PREP / "decontaminate.py", *text, "--against", evaluation, "--out",
                          root / "contaminated", *workers],
        "tokenize_corpus": [PREP / "tokenize_corpus.py", *text, *tokenizer, "--out", corpus,
                            "--leave_out", left_out, *workers],
        "pack": [PREP / "pack.py", corpus, *tokenizer, "--seq_len", 512, *workers],
        "verify": [PREP / "verify.py", corpus],
        "stats": [PREP / "stats.py", corpus, *tokenizer],
        "find, a row": [PREP / "find.py", corpus, "--seq_len", 512, "--row", 3],
        "find, a document": [PREP / "find.py", corpus, "--seq_len", 512, "--document", name],
        "take_down": [PREP / "take_down.py", corpus, "--document", name, *tokenizer, "--out",
                      root / "taken", *workers],
        "upload": [PREP / "upload.py", corpus, "--to", f"file://{root}/store"],
        "filter, all rules": [
            PREP / "filter.py", *text, "--filters", PREP / "filters" / "web_en.toml", "--out",
            root / "filtered", *workers],
        "dedup --near 0.8": [PREP / "dedup.py", *text, "--near", 0.8, "--out", root / "near",
                             *workers],
    }


if __name__ == "__main__":
    main()
