#!/usr/bin/env python
"""Train a tokenizer with DeBERTa's special ids on a bounded sample of the corpus, or extend one.

    python data_prep/train_tokenizer.py corpus/*.jsonl --out spm.model
    python data_prep/train_tokenizer.py corpus/*.jsonl --kind bpe --out mine
    python data_prep/train_tokenizer.py --add_mask gpt2-directory --out mine
    python data_prep/train_tokenizer.py --extend a --add_tokens words --out b
    python data_prep/train_tokenizer.py --extend a --learn 2000 *.txt --out b
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
    parser.add_argument("--extend", metavar="TOKENIZER",
                        help="do not train, but add tokens to this tokenizer; its ids stay")
    parser.add_argument("--learn", type=positive, default=0, metavar="N",
                        help="with --extend: add N subwords that save most tokens on the inputs")
    parser.add_argument("--add_tokens", metavar="FILE",
                        help="file of symbols, one a line, each a token wherever it stands")
    parser.add_argument("--normalization", choices=("nfkc",), default="",
                        help="nfkc in place of nfc: full-width letters, ligatures and the like "
                        "become plain ones")
    parser.add_argument("--lower_case", action="store_true", help="all letters become lower case")
    parser.add_argument("--split_digits", action="store_true", help="each digit is a token")
    parser.add_argument("--keep_white_space", action="store_true",
                        help="keep line ends, tabs and runs of spaces, as code needs it (unigram "
                        "and byte_bpe)")
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
    chosen = (args.normalization, args.lower_case, args.split_digits, args.keep_white_space)
    if bool(args.inputs) == bool(args.add_mask or args.extend and not args.learn):
        parser.error("name inputs to train on or to --learn from; --add_mask and --extend without "
                     "--learn take none")
    if args.learn and not args.extend or args.add_mask and (args.extend or args.add_tokens) or (
            any(chosen) and (args.extend or args.add_mask)):
        parser.error("--learn needs --extend; --add_mask goes alone; a tokenizer that exists keeps "
                     "its normalization and the like")
    if args.lower_case and args.keep_white_space and not args.normalization:
        parser.error("--lower_case with --keep_white_space needs --normalization nfkc")
    from deberta_ds.config.model import padded_rows
    from deberta_ds.corpus.outputs import output

    if args.add_mask:
        from deberta_ds.tokenizer.publish import add_special_tokens

        tokenizer, names = add_special_tokens(args.add_mask, args.out)
        print(f"{args.out}: added {', '.join(names) or 'nothing'}; {tokenizer.size:,} ids")
    else:
        with output(args.out, cache=args.cache, first=()) as out:
            tokenizer, said = train(args, out, chosen)
        print(f"{args.out}: {said}, [MASK] = {tokenizer.mask_id}, "
              f"sha256 {tokenizer.sha256[:16]}")
    print(f"a model's vocabulary follows it: {padded_rows(tokenizer.size):,} rows")


def train(args, out: str, chosen: tuple):
    """Return the tokenizer trained or extended as the options say, and what was made."""
    from deberta_ds.corpus import extend_tokenizer as extension
    from deberta_ds.corpus import train_tokenizer as training

    read = read_options(args)
    units = plan(args, read) if args.inputs else []
    symbols = extension.read_symbols(args.add_tokens) if args.add_tokens else []
    if args.extend:
        texts = training.sample_texts(units, args.sample_bytes, read, max_bad=args.max_bad)
        return extension.extend_tokenizer(args.extend, out, symbols, args.learn, texts)
    recipe = {"pieces": args.vocab_size, "sample_bytes": args.sample_bytes, "read": read,
              "character_coverage": args.character_coverage, "max_bad": args.max_bad,
              "choices": training.TextChoices(tuple(symbols), *map(bool, chosen))}
    if args.temperature is not None:
        recipe["languages"] = training.languages_of(
            units, read, args.sample_bytes, args.temperature, args.workers, args.max_bad)
    if args.kind == "unigram":
        tokenizer = training.train_tokenizer(units, out, threads=args.threads, **recipe)
    else:
        tokenizer = training.train_fast(units, out, kind=args.kind, **recipe)
    return tokenizer, f"{args.vocab_size:,} subwords"


if __name__ == "__main__":
    exit_cleanly(main)
