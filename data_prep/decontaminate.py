#!/usr/bin/env python
"""Find documents that contain text of evaluation files (contaminated documents).

A document is contaminated if it shares 13 successive words with an evaluation file, or a whole
shorter text of at least 8 words. Every field of the files is compared: JSON lines (SuperGLUE,
BLiMP), tables (GLUE), parquet, Arrow or text. Give the result to tokenize_corpus.py --leave_out.
"""

from options import add_input_options, add_job_options, work

from deberta_ds.base.command_line import parser_for, positive
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    add_input_options(parser)
    parser.add_argument("--against", nargs="+", action="extend", required=True,
                        help="evaluation files, directories or patterns")
    parser.add_argument("--out", required=True, help="directory for the list of contaminated "
                                                     "documents and report.json")
    parser.add_argument("--words", type=positive, default=13, help="number of successive words")
    add_job_options(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.contamination import MANY, SHORTEST, find_contamination

    report = work(args, find_contamination, against=args.against, words=args.words)
    if report is None:
        return
    for name, (searched, found, *more) in report.examples.items():
        short, shared = [*more, 0, 0][:2]
        print(f"{name}: {found:,} of {searched:,} examples found"
              + f", {shared:,} of them only by words that more than {MANY} examples have (a "
              "license or an instruction? then leave it out of the file)" * bool(shared)
              + f"; {short:,} more have fewer than {SHORTEST} words and were not searched" * bool(
                  short))
    for sample in report.samples[:10]:
        print(f"  {sample['document']}: \"{sample['words']}\" ({sample['example']})")
    print(f"{args.out}: {report.documents[1]:,} of {report.documents[0]:,} documents contaminated; "
          f"tokenize_corpus.py --leave_out {args.out} leaves them out")


if __name__ == "__main__":
    exit_cleanly(main)
