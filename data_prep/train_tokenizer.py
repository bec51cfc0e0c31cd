#!/usr/bin/env python
"""Train a SentencePiece tokenizer with DeBERTa's special ids on a bounded sample of the corpus."""

from options import (
    add_input_options,
    fraction,
    parser_for,
    positive,
    read_options,
)

from deberta_ds.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    add_input_options(parser)
    parser.add_argument("--out", required=True, help="the model file to write, such as spm.model")
    parser.add_argument("--pieces", type=positive, default=32000,
                        help="pieces; [MASK] comes after them")
    parser.add_argument("--sample_bytes", type=positive, default=1 << 26, help="text to train on")
    parser.add_argument("--character_coverage", type=fraction, default=0.9995,
                        help="rarer characters are spelled in bytes")
    parser.add_argument("--threads", type=positive, default=2,
                        help="part of the recipe: it rounds sums")
    args = parser.parse_args()

    from deberta_ds.data.prep.documents import plan_units
    from deberta_ds.data.prep.train_spm import train_tokenizer

    read = read_options(args)
    tokenizer = train_tokenizer(
        plan_units(args.inputs, read, args.unit_bytes), args.out, pieces=args.pieces,
        sample_bytes=args.sample_bytes, read=read, character_coverage=args.character_coverage,
        threads=args.threads,
    )
    print(f"{args.out}: {tokenizer.mask_id:,} pieces, [MASK] = {tokenizer.mask_id}, "
          f"sha256 {tokenizer.sha256[:16]}")


if __name__ == "__main__":
    exit_cleanly(main)
