#!/usr/bin/env python
"""Collect the docstrings of this Python installation as a corpus of real English."""

from options import add_workers, share

from deberta_ds.base.command_line import local, parser_for, positive
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=local, required=True,
                        help="directory for train.jsonl and heldout.jsonl")
    parser.add_argument("--max_bytes", type=positive, default=12_000_000,
                        help="stop after this size")
    parser.add_argument("--heldout_share", type=share, default=0.02,
                        help="share of held-out documents")
    parser.add_argument("--pinned", metavar="FILE",
                        help="use only six packages with much prose, in the versions of this "
                             "constraints file: the same corpus on every machine (default: all "
                             "installed packages)")
    add_workers(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.docstrings import (
        installed_python_files,
        pinned_python_files,
        write_docstrings,
    )

    files, notes = pinned_python_files(args.pinned) if args.pinned else (
        installed_python_files(), [])
    for note in notes:
        print(f"WARNING: {note}: the corpus differs from that of the pinned packages")
    counts = write_docstrings(
        files, args.out, max_bytes=args.max_bytes,
        heldout_share=args.heldout_share, workers=args.workers)
    print(f"{args.out}: {counts['train']:,} training and {counts['heldout']:,} held-out documents, "
          f"{counts['characters'] / 1e6:.1f} M characters from {counts['files']:,} files, "
          f"{counts['duplicates']:,} duplicates left out")


if __name__ == "__main__":
    exit_cleanly(main)
