#!/usr/bin/env python
"""Print the [[data.sources]] of a run for several corpora, with shares and epochs.

Natural shares are the tokens of each corpus; a temperature above 1 raises the small ones, as for
the languages of a multilingual model (XLM-R and mT5 use about 3.3).
"""

from options import parser_for

from deberta_ds.data.corpus import Corpus
from deberta_ds.data.mixture import SLOTS, build_mixture, temperature_weights
from deberta_ds.errors import UserError, exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="+", help="packed corpus directories")
    parser.add_argument("--seq_len", type=int, required=True, help="tokens in a row")
    parser.add_argument("--temperature", type=float, default=1.0, help="1: natural shares")
    parser.add_argument("--weights", type=float, nargs="+", help="shares, instead of a temperature")
    parser.add_argument("--rows", type=int, default=0, help="rows of the run; 0: one epoch in sum")
    args = parser.parse_args()
    corpora = [Corpus(path, seq_len=args.seq_len) for path in args.corpus]
    sizes = [corpus.num_rows for corpus in corpora]
    if args.weights and len(args.weights) != len(corpora):
        raise UserError(f"{len(args.weights)} weights for {len(corpora)} corpora; give one each")
    weights = args.weights or temperature_weights(sizes, args.temperature)
    mixture = build_mixture(weights)
    rows = args.rows or sum(sizes)
    used = mixture.consumed(rows)
    for path, size, count, weight, taken in zip(
        args.corpus, sizes, mixture.counts, weights, used, strict=True
    ):
        print(f"[[data.sources]]  # {size:,} rows, {count / SLOTS:.2%} of the run, "
              f"{taken / size:.2f} epochs in {rows:,} rows")
        print(f'path = "{path}"\nweight = {weight:.6g}\n')


if __name__ == "__main__":
    exit_cleanly(main)
