"""Command-line options that several data_prep commands share."""

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from deberta_ds.base.command_line import checked, natural, positive

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


def add_input_options(parser: argparse.ArgumentParser, needed: str = "+") -> None:
    """Add the options that say what the inputs are and what a document is."""
    from deberta_ds.corpus.recipe import READING, CorpusRecipe, Recipe

    parser.add_argument(
        "inputs", nargs=needed,
        help="files, directories, patterns, remote URLs or hub:NAME[@CONFIG][#SPLIT]; .txt .md "
        ".jsonl .csv .tsv .warc .wet (also .gz .zst .xz .bz2 .lz4), .parquet, .arrow, directories "
        "of datasets")
    add_fields(parser, CorpusRecipe, *READING)
    add_fields(parser, Recipe, "skip_bad_files", "unit_bytes")


def add_fields(parser: argparse.ArgumentParser, cls: type, *names: str) -> None:
    """Add options for fields of a recipe, with their meanings and defaults."""
    from deberta_ds.config.options import Option, options_of, problems_of

    def value_of(text: str, one: Option):
        value = checked(text, type(one.default), lambda _: True, f"a {one.kind}")
        for problem in problems_of(cls, {one.key: value}):  # others: of keys that are not given
            if problem.startswith((f"{one.key} ", f"{one.key}:")):
                raise argparse.ArgumentTypeError(problem)
        return value

    for one in options_of(cls):
        if one.key in names:
            kinds = {int: "N", float: "X"}
            how = {"action": "store_true"} if one.default is False else {
                "type": partial(value_of, one=one), "metavar": kinds.get(type(one.default))}
            if known := list(filter(None, re.findall(r'"(\w*)"', one.kind))):
                how |= {"choices": known, "metavar": None}
            parser.add_argument(f"--{one.key}", default=one.default, help=one.meaning, **how)


def plan(args: argparse.Namespace, *outs: str | None) -> tuple[list, "ReadOptions"]:
    """Return the work units of the inputs and how they are read; UserError for more bad files than
    --skip_bad_files, and for an output that lies in an input.
    """
    from deberta_ds.corpus.damage import plan_whole
    from deberta_ds.corpus.recipe import read_options_of

    read, max_bad = read_options_of(args), getattr(args, "max_bad", 0)
    return plan_whole(args.inputs, read, args.unit_bytes, *outs, max_bad=max_bad,
                      skip_bad_files=args.skip_bad_files, workers=args.workers,
                      is_divided=bool(args.documents)), read


def work(args: argparse.Namespace, stage: Callable, **options) -> Any:
    """Return what a stage returns that reads the inputs and writes to --out. After a part, of which
    it returns nothing, say what follows.
    """
    from deberta_ds.corpus.outputs import output

    units, read = plan(args, args.out)
    with output(args.out, cache=args.cache, part=args.part) as out:
        found = stage(units, out=out, read=read, workers=args.workers, part=args.part, **options)
    if args.part:
        say_part_is_done(args, args.out)
    return found


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that works in units, also as an array of jobs or to a URL."""
    add_workers(parser)
    add_part(parser)
    add_cache(parser)


def say_part_is_done(args: argparse.Namespace, out: str) -> None:
    """Say what follows a part of the work on `out`."""
    print(f"{out}: part {args.part[0]} of {args.part[1]} is done; when all are, run this without "
          "--part")


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
        "$SLURM_ARRAY_TASK_ID/N from 1); then run the same command without --part (build.py: each "
        "part waits for the others, and all end with the finished corpus)")


def part_of_array(text: str) -> tuple[int, int]:
    """Type of an option: I/N with 1 <= I <= N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with 1 <= I <= N, such as 3/8")
    return int(number), int(count)
