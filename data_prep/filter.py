#!/usr/bin/env python
"""Try filters on text: show what they would drop and change, by reason, with samples.

Writes OUT/filters.json, with more samples than are shown. Nothing is tokenized.
When the filters do what you want, give the same file to tokenize_corpus.py --filters.
"""

from options import add_input_options, add_job_options, work

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    add_input_options(parser)
    parser.add_argument("--filters", required=True, metavar="TOML",
                        help="rules and thresholds, such as data_prep/filters/web_en.toml")
    parser.add_argument("--out", required=True, help="directory for filters.json")
    parser.add_argument("--tokenizer", default="", help="count tokens too, with this tokenizer")
    add_job_options(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.filter_rules import read_rules
    from deberta_ds.corpus.filters import report_lines, try_filters
    from deberta_ds.corpus.outputs import fetch
    from deberta_ds.tokenizer import Tokenizer

    rules = read_rules(args.filters)
    tokenizer = Tokenizer(fetch(args.tokenizer, cache=args.cache)) if args.tokenizer else None
    if report := work(args, try_filters, rules=rules, tokenizer=tokenizer):
        print("\n".join(report_lines(report)))
        print(f"{report['summary']}; all samples: {args.out}/filters.json")


if __name__ == "__main__":
    exit_cleanly(main)
