#!/usr/bin/env python
"""Train a tokenizer with DeBERTa's special ids on a bounded sample of the corpus.

    python data_prep/train_tokenizer.py corpus/*.jsonl --out spm.model
    python data_prep/train_tokenizer.py corpus/*.jsonl --kind bpe --out mine
    python data_prep/train_tokenizer.py --add_mask gpt2-directory --out mine
"""

from options import add_cache, add_input_options, add_workers, plan, read_options

from deberta_ds.base.command_line import fraction, natural, parser_for, positive, positive_number
from deberta_ds.base.errors import exit_cleanly

KINDS = ("unigram", "byte_bpe", "bpe", "wordpiece")


def main() -> None:
    parser = parser_for(__doc__)
    add_input_options(parser, needed="*")
    parser.add_argument("--out", required=True, help="model file to write, such as spm.model; for "
                        "other kinds than unigram a directory")
    parser.add_argument("--kind", choices=KINDS, default="unigram",
                        help="unigram: SentencePiece; byte_bpe: as GPT-2 and DeBERTa v1; bpe: with "
                        "space marks, and bytes for rare characters; wordpiece: as BERT, cased")
    parser.add_argument("--add_mask", metavar="TOKENIZER",
                        help="do not train, but add the missing special tokens to this tokenizer")
    parser.add_argument("--vocab_size", type=positive, default=32000,
                        help="vocabulary size without [MASK], which is added at the end")
    parser.add_argument("--sample_bytes", type=positive, default=1 << 26,
                        help="size of the text to train on")
    parser.add_argument("--temperature", type=positive_number, metavar="T",
                        help="take each language (--label_key, --label_from_directory) in "
                        "proportion to its characters to the power of 1/T (1: as they are, 3.3: as "
                        "XLM-R). Reads the input twice, to count and to sample")
    parser.add_argument("--max_bad", type=natural, default=0,
                        help="unreadable documents allowed (skipped and named)")
    parser.add_argument("--character_coverage", type=fraction, default=0.9995,
                        help="rarer characters are spelled in bytes (wordpiece: unknown)")
    parser.add_argument("--threads", type=positive, default=2,
                        help="threads of unigram training; the model depends on their number")
    add_workers(parser)
    add_cache(parser)
    args = parser.parse_args()
    if bool(args.inputs) == bool(args.add_mask):
        parser.error("name either inputs to train on, or a tokenizer with --add_mask")
    from deberta_ds.release.shape import padded_rows

    if args.add_mask:
        from deberta_ds.tokenizer.publish import add_special_tokens

        tokenizer, names = add_special_tokens(args.add_mask, args.out)
        print(f"{args.out}: added {', '.join(names) or 'nothing'}; {tokenizer.size:,} ids")
    else:
        from deberta_ds.corpus.outputs import output

        with output(args.out, cache=args.cache, first=()) as out:
            tokenizer = train(args, out)
        print(f"{args.out}: {tokenizer.mask_id:,} subwords, [MASK] = {tokenizer.mask_id}, "
              f"sha256 {tokenizer.sha256[:16]}")
    print(f"a model's vocabulary follows it: {padded_rows(tokenizer.size):,} rows")


def train(args, out: str):
    """Return the tokenizer trained as the options say."""
    from deberta_ds.corpus.train_tokenizer import languages_of, train_fast, train_tokenizer

    read = read_options(args)
    units = plan(args, read)
    recipe = {"pieces": args.vocab_size, "sample_bytes": args.sample_bytes, "read": read,
              "character_coverage": args.character_coverage, "max_bad": args.max_bad}
    if args.temperature is not None:
        recipe["languages"] = languages_of(units, read, args.sample_bytes, args.temperature,
                                           args.workers, args.max_bad)
    if args.kind == "unigram":
        return train_tokenizer(units, out, threads=args.threads, **recipe)
    return train_fast(units, out, kind=args.kind, **recipe)


if __name__ == "__main__":
    exit_cleanly(main)
