#!/usr/bin/env python
"""Pack a tokenized corpus into sequences of one or more lengths."""

from options import add_job_options, say_part_is_done

from deberta_ds.base.command_line import parser_for, positive
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="+", help="directories made by tokenize_corpus.py")
    parser.add_argument("--tokenizer", required=True, help="tokenizer of the corpus (for word "
                                                           "starts)")
    parser.add_argument("--seq_len", type=positive, nargs="+", action="extend", required=True,
                        help="sequence lengths in tokens")
    add_job_options(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.outputs import fetch, output
    from deberta_ds.corpus.pack import pack_corpus
    from deberta_ds.tokenizer import Tokenizer

    tokenizer = Tokenizer(fetch(args.tokenizer, cache=args.cache))
    for corpus in args.corpus:
        for seq_len in args.seq_len:
            with output(corpus, cache=args.cache, part=args.part) as local:
                manifest = pack_corpus(local, tokenizer, seq_len, workers=args.workers,
                                       part=args.part)
            if manifest is None:
                say_part_is_done(args, f"{corpus}/rows-{seq_len}")
                continue
            rows = sum(shard.rows for shard in manifest.shards)
            used = sum(shard.tokens + 2 * shard.pieces for shard in manifest.shards)
            fill = used / max(rows * seq_len, 1)
            print(f"{corpus}/rows-{seq_len}: {rows:,} sequences, {fill:.2%} full, "
                  f"{manifest.hard_cuts:,} cuts inside a word")


if __name__ == "__main__":
    exit_cleanly(main)
