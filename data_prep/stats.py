#!/usr/bin/env python
"""Show statistics of corpora: lengths, packing, tokens by label, most frequent tokens."""

from options import add_cache

from deberta_ds.base.command_line import parser_for, positive
from deberta_ds.base.errors import exit_cleanly, still_at_work


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="+", help="corpus directories")
    parser.add_argument("--tokenizer", required=True, help="tokenizer of the corpus")
    parser.add_argument("--top", type=positive, default=20,
                        help="number of most frequent tokens to list")
    add_cache(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.outputs import fetch
    from deberta_ds.corpus.stats import corpus_stats, stats_text
    from deberta_ds.tokenizer import Tokenizer

    tokenizer = Tokenizer(fetch(args.tokenizer, cache=args.cache))
    for path in [fetch(path, cache=args.cache) for path in args.corpus]:
        with still_at_work(lambda name=path: f"{name}: counting"):
            stats = corpus_stats(path, tokenizer)
        print(stats_text(stats, tokenizer, args.top), end="\n\n")


if __name__ == "__main__":
    exit_cleanly(main)
