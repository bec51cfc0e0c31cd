"""Kill -9 while a tokenizer of each kind is trained, and while each tokenizes; then run again.

    python tools/faults/tokenizer_kills.py --work DIR --out FILE [--text novels/ --megabytes 8]

What is there in the end must be, file for file and byte for byte, what an undisturbed run leaves,
and nothing else (no temporary files). The moments are shares of the undisturbed run's time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import tokenizer_cases as cases  # noqa: E402
from data_helpers import random_documents  # noqa: E402

from deberta_ds.base.errors import exit_cleanly  # noqa: E402
from deberta_ds.base.files import write_atomic, xxh3  # noqa: E402

TRAINED = {"unigram": "spm.model", "byte_bpe": "tokenizer", "bpe": "tokenizer",
           "wordpiece": "tokenizer"}
IMPORTED = ("roberta", "bert", "unigram_bytes", "llama", "deberta_v1")


def start(words: list) -> subprocess.Popen:
    """Start a script in a process group of its own, so that kill -9 takes its workers along."""
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(words: list) -> float:
    """Run to the end; return the seconds it took."""
    begin = time.perf_counter()
    process = start(words)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    return time.perf_counter() - begin


def kill(words: list, after_seconds: float) -> bool:
    """Kill -9 a run after some seconds; return whether it was still under way."""
    process = start(words)
    try:
        process.communicate(timeout=after_seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True


def contents(directory: Path) -> dict[str, str]:
    """Return {file: checksum} of all that a directory holds."""
    return {str(path.relative_to(directory)): xxh3(path)
            for path in sorted(directory.rglob("*")) if path.is_file()}


def disturbed(command, work: Path, shares: list[float]) -> dict:
    """Run `command(directory)` undisturbed, and again with kills at shares of its time."""
    seconds = run(command(work / "whole"))
    killed = sum(kill(command(work / "killed"), share * seconds) for share in shares)
    run(command(work / "killed"))
    whole, found = contents(work / "whole"), contents(work / "killed")
    assert whole == found, {name: (whole.get(name), found.get(name))
                            for name in whole.keys() | found.keys()
                            if whole.get(name) != found.get(name)}
    return {"seconds": round(seconds, 1), "killed": killed, "files": len(whole)}


def take(name: str, text: Path, place: Path, pieces: int, shares: list[float]) -> dict:
    """Train (one of TRAINED) or make a tokenizer, and tokenize with it, in `place`."""
    row = {}
    if name in TRAINED:
        tokenizer = place / "train/whole" / TRAINED[name]
        row["train"] = disturbed(
            lambda out: ["data_prep/train_tokenizer.py", text, "--kind", name, "--vocab_size",
                         pieces, "--out", out / TRAINED[name]],
            place / "train",
            shares)
    else:
        tokenizer = cases.MAKERS[name](place / "tokenizer")
    row["tokenize"] = disturbed(
        lambda out: ["data_prep/tokenize_corpus.py", text, "--tokenizer", tokenizer, "--out",
                     out / "train", "--heldout_out", out / "heldout", "--heldout_share", 0.1,
                     "--unit_bytes", 1 << 17, "--workers", 2], place / "tokenize", shares)
    return row


def write_text(source: Path | None, megabytes: float, out: Path) -> None:
    if source is None:
        documents = random_documents(int(megabytes * 2600))
    else:
        size = int(megabytes * 1e6) // len(list(source.rglob("*.txt")))
        texts = [path.read_text(encoding="utf-8-sig")[:size] for path in sorted(
            source.rglob("*.txt"))]
        documents = [text[at : at + 3000] for text in texts for at in range(0, len(text), 3000)]
    write_atomic(out, "".join(json.dumps({"text": one}) + "\n" for one in documents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for all files")
    parser.add_argument("--text", type=Path, help="directory of .txt files")
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--vocab_size", type=int, default=600)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.85, 0.95])
    parser.add_argument("--names", nargs="+", default=[*TRAINED, *IMPORTED])
    parser.add_argument("--out", type=Path, required=True, help="JSON file, rows are added to it")
    args = parser.parse_args()
    work = args.work.resolve()
    text = work / "all.jsonl"
    if not text.exists():
        write_text(args.text, args.megabytes, text)
    found = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in [name for name in args.names if name not in found]:
        found[name] = take(name, text, work / f"{name}-{time.time_ns()}", args.vocab_size,
                           args.shares)
        print(name, json.dumps(found[name]), flush=True)
        write_atomic(args.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    exit_cleanly(main)
