"""Command-line options that several data_prep commands share."""

import argparse
import os
from typing import TYPE_CHECKING

from deberta_ds.base.command_line import checked, natural, positive
from deberta_ds.base.errors import UserError, tell

if TYPE_CHECKING:
    from deberta_ds.corpus.documents import ReadOptions


def seed(text: str) -> int:
    """Type of an option: a whole number that leaves room for a million samples in 64 bits."""
    value = natural(text)
    if value >= 1 << 43:
        raise argparse.ArgumentTypeError(f"{value} is not below {1 << 43:,}")
    return value


def share(text: str) -> float:
    """Type of an option: a share in (0, 1)."""
    return checked(text, float, lambda value: 0 < value < 1, "between 0 and 1")


def local(text: str) -> str:
    """Type of an option: a path that is no URL."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL; this takes a local (or mounted) path")
    return text


def add_input_options(parser: argparse.ArgumentParser, needed: str = "+") -> None:
    """Add the options that say what the inputs are and what a document is."""
    parser.add_argument(
        "inputs", nargs=needed,
        help="files, directories, patterns, remote URLs or hub:NAME[@CONFIG][#SPLIT]; .txt .md "
        ".jsonl .csv .tsv .warc .wet (also .gz .zst .xz .bz2 .lz4), .parquet, .arrow, directories "
        "of datasets")
    parser.add_argument(
        "--documents", default="",
        help="what a document is in a text file: file, line, blank_line or match:PATTERN "
        "(default: file, if none is large)")
    parser.add_argument("--text_key", default="text",
                        help="key or column of the text; meta.text is the key text under meta")
    parser.add_argument("--id_key", default="",
                        help="key or column of the document's id, kept with the shards")
    parser.add_argument("--label_key", default="", help="key or column of the label to count by "
                                                        "(language)")
    parser.add_argument(
        "--label_from_directory", action="store_true", help="use the name of the directory as the "
                                                            "label")
    parser.add_argument(
        "--max_document_bytes", type=positive, default=1 << 26,
        help="a longer document counts as unreadable")
    parser.add_argument(
        "--extract_html", action="store_true",
        help="take the main text of the pages in .warc files (needs resiliparse)")
    parser.add_argument(
        "--skip_bad_files", type=natural, default=0, metavar="N",
        help="leave out up to N files that are damaged, and list them; all inputs are read once "
        "more for it")
    parser.add_argument(
        "--unit_bytes", type=natural, default=0, help="size of a work unit; 0: automatic")


def read_options(args: argparse.Namespace) -> "ReadOptions":
    """Return the ReadOptions of parsed arguments."""
    from deberta_ds.corpus.documents import ReadOptions

    return ReadOptions(
        args.documents or "file", args.text_key, args.label_key, args.label_from_directory,
        args.max_document_bytes, args.id_key, args.extract_html)


def plan(args: argparse.Namespace, read: "ReadOptions") -> list:
    """Return the work units of the inputs; UserError for more bad files than --skip_bad_files."""
    from deberta_ds.corpus.damage import damaged_files, refuse_huge
    from deberta_ds.corpus.documents import plan_units

    bad, most = {}, args.skip_bad_files
    if most:
        bad = damaged_files(args.inputs, read, args.workers, getattr(args, "max_bad", 0))
        for why in bad.values():
            tell(f"bad file: {why}")
        if len(bad) > most:
            raise UserError(f"{next(iter(bad))}: bad, like {len(bad) - 1} more; --skip_bad_files "
                            f"allows {most}; repair or fetch them, or allow more")
    units = plan_units(args.inputs, read, args.unit_bytes, bad)
    if not args.documents:
        refuse_huge(units)
    return units


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add --workers; under mpirun the ranks are the workers instead."""
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)),
                        help="number of processes")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add --cache, for outputs at a URL."""
    parser.add_argument(
        "--cache", default="~/.cache/deberta_ds", metavar="DIRECTORY",
        help="working directory for outputs at a URL: they are made here, then copied")


def add_part(parser: argparse.ArgumentParser) -> None:
    """Add --part, for arrays of jobs without MPI."""
    parser.add_argument(
        "--part", type=part_of_array, metavar="I/N",
        help="do only the I-th of N parts of the work, as job I of a job array (Slurm: "
        "$SLURM_ARRAY_TASK_ID/N from 1); then run the same command without --part")


def part_of_array(text: str) -> tuple[int, int]:
    """Type of an option: I/N with 1 <= I <= N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with 1 <= I <= N, such as 3/8")
    return int(number), int(count)
