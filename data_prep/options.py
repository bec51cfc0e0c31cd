"""Command-line options that several data_prep commands share."""

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deberta_ds.data.prep.documents import ReadOptions


def parser_for(description: str) -> argparse.ArgumentParser:
    """Return a parser that shows defaults."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the inputs are and what a document is."""
    parser.add_argument(
        "inputs", nargs="+",
        help="files, directories, patterns, remote URLs or hub:NAME[@CONFIG][#SPLIT]; .txt .md "
        ".jsonl (also .gz .zst), .parquet, .arrow",
    )
    parser.add_argument(
        "--documents", default="file",
        help="a document of a text file: file, line, blank_line or match:PATTERN",
    )
    parser.add_argument("--text_key", default="text", help="key or column of the text")
    parser.add_argument("--label_key", default="", help="key or column to count by (language)")
    parser.add_argument(
        "--label_from_directory", action="store_true", help="count by the name of the directory"
    )
    parser.add_argument(
        "--max_document_bytes", type=int, default=1 << 26, help="longer ones are bad documents"
    )
    parser.add_argument("--unit_bytes", type=int, default=0, help="size of a work unit; 0: chosen")


def read_options(args: argparse.Namespace) -> "ReadOptions":
    """Return the ReadOptions of parsed arguments."""
    from deberta_ds.data.prep.documents import ReadOptions

    return ReadOptions(
        args.documents, args.text_key, args.label_key, args.label_from_directory,
        args.max_document_bytes,
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add --workers; under mpirun the ranks are the workers instead."""
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes"
    )
