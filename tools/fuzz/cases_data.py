"""Broken corpora, shards, tokenizers and what else data_prep reads."""

import bz2
import csv
import gzip
import json
import lzma
import tomllib
from pathlib import Path
from random import Random

import zstandard

from tools.fuzz import mutate
from tools.fuzz.case import Case
from tools.fuzz.commands import Command
from tools.fuzz.readers import READERS
from tools.fuzz.toml_text import toml


def corpus(random: Random, place: Path) -> Case:
    """Text files of every kind, broken, and options of data_prep with broken values."""
    path = _as_some_format(random, place)
    script, arguments = random.choice([
        ("tokenize_corpus", ["--out", "new", "--tokenizer", "spm.model", "--workers", "1"]),
        ("tokenize_corpus", ["--out", "new", "--tokenizer", "spm.model", "--workers", "2",
                             "--heldout_out", "new2", "--heldout_share", "0.3"]),
        ("train_tokenizer", ["--out", "new.model", "--vocab_size", "400"]),
        ("train_tokenizer", ["--out", "new.model", "--vocab_size", "400", "--label_from_directory",
                             "--temperature", random.choice(["3.3", "nan", "-1", "0", "inf"])]),
        ("dedup", ["--out", "new", "--workers", "1"]),
    ])
    what, nonsense = f"{path.name} as it is", False
    if random.random() < 0.6:
        change = mutate.file(random, path)
        what, nonsense = change
    else:
        arguments += random.choice(
            [["--documents", "match:["], ["--documents", "page"], ["--documents", "match:"],
             ["--text_key", "nothing"], ["--text_key", ""], ["--max_document_bytes", "0"],
             ["--max_document_bytes", "-5"], ["--unit_bytes", "-1"], ["--unit_bytes", "1"],
             ["--workers", "0"], ["--workers", "-2"], ["--heldout_share", "2"],
             ["--heldout_share", "nan"], ["--heldout_share", "-1", "--heldout_out", "new2"],
             ["--heldout_out", "new"], ["--vocab_size", "0"], ["--vocab_size", "-7"],
             ["--vocab_size", "10"], ["--sample_bytes", "0"], ["--character_coverage", "nan"],
             ["--threads", "0"], ["--character_coverage", "5"], ["--near", "nan"], ["--near", "2"],
             ["--near", "-1"], ["--max_bad", "-1"], ["--min_letter_share", "nan"],
             ["--min_letter_share", "2"], ["--min_characters", "-1"], ["--duplicates", "train"],
             ["--duplicates", "nowhere"], ["--label_key", "none"], ["--max_bad", "100000"],
             ["--temperature", "2"], ["--extract_html"], ["--out", "nosuch://there/new"],
             ["--out", "train"], ["--out", "train.jsonl"], ["--out", "/proc/new"]])
        what = f"{path.name} {' '.join(arguments[-2:])}"
        nonsense = arguments[-2:] in _NONSENSE_OPTIONS
    return Case(Command(f"data_prep/{script}.py", (path.name, *arguments)), f"{script} {what}",
                (path.name, "--", "new", "train", "nowhere"), nonsense)


_NONSENSE_OPTIONS = [["--unit_bytes", "-1"], ["--max_document_bytes", "0"],
                     ["--max_document_bytes", "-5"], ["--heldout_share", "2"],
                     ["--heldout_share", "nan"], ["--heldout_out", "new"], ["--workers", "-2"],
                     ["--near", "nan"], ["--near", "2"], ["--min_letter_share", "nan"],
                     ["--max_bad", "-1"], ["--vocab_size", "-7"]]


def shards(random: Random, place: Path) -> Case:
    """A prepared corpus with a broken file."""
    name = random.choice(["train", "train", "heldout"])
    return _broken(random, place / name, READERS["shards"], (name,))


def replaced(random: Random, place: Path) -> Case:
    """Stored replacements with a broken file."""
    return _broken(random, place / "replaced", READERS["replaced"], ("replaced", "train"))


def findings(random: Random, place: Path) -> Case:
    """Duplicates that a search has found, broken, and left out of a corpus."""
    return _broken(random, place / "found", READERS["findings"], ("found",))


def remote(random: Random, place: Path) -> Case:
    """A corpus at an address, with a broken file there."""
    return _broken(random, place / "store", READERS["remote"], ("store",))


def filters(random: Random, place: Path) -> Case:
    """A filters file with a broken value or byte."""
    path = place / "filters.toml"
    values, change = mutate.tree(random, tomllib.loads(path.read_text()))
    path.write_text(toml(values))
    if random.random() < 0.3:
        change = mutate.file(random, path)
    return Case(random.choice(READERS["filters"]), change.text, ("filters.toml",), change.nonsense)


def against(random: Random, place: Path) -> Case:
    """Evaluation files that a corpus is searched for, broken."""
    change = mutate.something_in(random, place / "superglue/CB")
    return Case(READERS["against"][0], change.text, ("superglue",))


def pairs(random: Random, place: Path) -> Case:
    """Minimal pairs, broken."""
    change = mutate.jsonl_file(random, place / "pairs.jsonl")
    return Case(random.choice(READERS["pairs"]), f"pairs.jsonl {change.text}", ("pairs.jsonl",))


def _broken(random: Random, directory: Path, commands: list[Command], names: tuple[str, ...]
            ) -> Case:
    what = mutate.something_in(random, directory)
    return Case(random.choice(commands), what.text, names)


def tokenizer(random: Random, place: Path) -> Case:
    """A SentencePiece model with a broken byte."""
    change = mutate.file(random, place / "spm.model")
    command = random.choice(READERS["shards"])
    read = "spm.model" in command.arguments or "pretrain" in command.script
    return Case(command, change.text, ("spm.model", "train", "heldout", "out"),
                change.nonsense and read)


def _as_some_format(random: Random, place: Path) -> Path:
    """Write the small corpus in one of the known formats; return the file."""
    source = place / "heldout.jsonl"
    text = source.read_bytes()
    kind = random.choice(["jsonl", "jsonl", "txt", "jsonl.gz", "jsonl.zst", "parquet", "arrow",
                          "csv", "tsv", "wet", "wet.gz", "jsonl.xz", "jsonl.bz2"])
    path = place / f"text.{kind}"
    if kind == "jsonl":
        path.write_bytes(text)
    elif kind == "txt":
        path.write_text("\n\n".join(json.loads(line)["text"] for line in text.splitlines()))
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress(text, mtime=0))
    elif kind.endswith("zst"):
        path.write_bytes(zstandard.ZstdCompressor().compress(text))
    elif kind.endswith("xz"):
        path.write_bytes(lzma.compress(text))
    elif kind.endswith("bz2"):
        path.write_bytes(bz2.compress(text))
    elif kind in ("csv", "tsv"):
        with open(path, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            rows.writerows([["text"], *([json.loads(line)["text"]] for line in text.splitlines())])
    elif kind.startswith("wet"):
        records = [_record(json.loads(line)["text"].encode()) for line in text.splitlines()]
        path.write_bytes(b"".join(gzip.compress(record, mtime=0) if kind.endswith("gz") else record
                                  for record in records))
    else:
        _write_arrow([json.loads(line)["text"] for line in text.splitlines()], path)
    return path


def _record(text: bytes) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text + b"\r\n\r\n"


def _write_arrow(texts: list[str], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": texts})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
