#!/usr/bin/env python
"""Find duplicate documents in text of any size.

Run this once over the inputs of all corpora of a mixture. Of each set of duplicates, the first in
the order of the inputs is kept. Give the result to tokenize_corpus.py --leave_out.
"""

from options import add_fields, add_input_options, add_job_options, work

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    from deberta_ds.corpus.recipe import Recipe

    parser = parser_for(__doc__)
    add_input_options(parser)
    parser.add_argument("--out", required=True, help="directory for the list of duplicates")
    add_fields(parser, Recipe, "near")
    add_job_options(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.dedup import find_duplicates

    if counts := work(args, find_duplicates, near_threshold=args.near):
        print(f"{args.out}: {counts['documents']:,} documents, {counts['exact']:,} exact and "
              f"{counts['near']:,} near duplicates")


if __name__ == "__main__":
    exit_cleanly(main)
