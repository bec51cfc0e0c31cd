#!/usr/bin/env python
"""Check the files of corpora against their manifests. Exit code 2: the first bad shard is named."""

from options import add_cache

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="+", help="corpus directories")
    parser.add_argument("--verify", choices=("sizes", "full"), default="full",
                        help="full: checksums too")
    parser.add_argument("--tokenizer", help="tokenizer that must have made the corpora")
    add_cache(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.outputs import fetch
    from deberta_ds.corpus.pack import verify_corpus
    from deberta_ds.tokenizer import Tokenizer

    made_with = Tokenizer(args.tokenizer).sha256 if args.tokenizer else ""
    for path in args.corpus:
        found = fetch(path, cache=args.cache)
        print("\n".join(verify_corpus(found, args.verify, made_with)))


if __name__ == "__main__":
    exit_cleanly(main)
