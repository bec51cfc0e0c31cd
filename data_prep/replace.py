#!/usr/bin/env python
"""Replace the masked tokens of a packed corpus by samples of a frozen generator, once.

    python data_prep/replace.py shards/web --generator runs/v3_base \\
        --seq_len 512 --out replaced/web --temperatures 2.0 1.5 1.0

A run with objective.kind = "rtd_cached" then trains a discriminator on them without a generator.
After a crash, run the same command again: only what is missing is done.
"""

from options import add_workers, seed, share

from deberta_ds.base.command_line import local, parser_for, positive, positive_number
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", type=local,
                        help="directory made by tokenize_corpus.py and pack.py")
    parser.add_argument("--generator", required=True,
                        help="run, checkpoint or exported directory with a masked LM")
    parser.add_argument("--out", type=local, required=True, help="directory for the replacements")
    parser.add_argument("--seq_len", type=positive, required=True, help="sequence length in tokens")
    parser.add_argument("--temperatures", type=positive_number, nargs="+", default=[1.0],
                        help="sample all sequences once per temperature, in this order")
    parser.add_argument("--rate", type=share, default=0.15,
                        help="mask rate: share of masked tokens")
    parser.add_argument("--max_ngram", type=positive, default=1,
                        help="longest masked span in words")
    parser.add_argument("--seed", type=seed, default=0, help="seed of masks and samples")
    parser.add_argument("--attend_across_documents", action="store_true",
                        help="document segments of a sequence attend to each other (as "
                             "data.attend_across_documents)")
    add_workers(parser)
    args = parser.parse_args()

    from deberta_ds.config.objective import MaskConfig
    from deberta_ds.corpus.replacements import Recipe, replace_corpus
    from deberta_ds.data.replaced import read_replaced_manifest

    recipe = Recipe(args.corpus, args.generator, args.seq_len, tuple(args.temperatures), args.seed,
                    MaskConfig(rate=args.rate, max_ngram=args.max_ngram),
                    args.attend_across_documents)
    replace_corpus(recipe, args.out, workers=args.workers)
    manifest, content_hash = read_replaced_manifest(args.out)
    size = sum(file[0] for shards in manifest.shards for files in shards.values()
               for file in files.values())
    print(f"{args.out}: {len(manifest.temperatures)} samples, {size / 1e6:,.1f} MB, "
          f"sha256 {content_hash[:16]}")


if __name__ == "__main__":
    exit_cleanly(main)
