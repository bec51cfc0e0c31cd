#!/usr/bin/env python
"""Train a tokenizer with DeBERTa's special ids on a bounded sample of the corpus, or extend one.

    python data_prep/train_tokenizer.py corpus/*.jsonl --out spm.model
    python data_prep/train_tokenizer.py corpus/*.jsonl --kind bpe --out mine
    python data_prep/train_tokenizer.py --add_mask gpt2-directory --out mine
    python data_prep/train_tokenizer.py --extend a --add_tokens words --out b
    python data_prep/train_tokenizer.py --extend a --learn 2000 *.txt --out b
"""

from options import add_cache, add_fields, add_input_options, add_workers, plan

from deberta_ds.base.command_line import parser_for, positive
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    from deberta_ds.corpus.recipe import TRAINED, Recipe, TokenizerRecipe

    parser = parser_for(__doc__)
    add_input_options(parser, needed="*")
    parser.add_argument("--out", required=True, help="model file to write, such as spm.model; for "
                        "other kinds than unigram a directory")
    parser.add_argument("--add_mask", metavar="TOKENIZER",
                        help="do not train, but add the missing special tokens to this tokenizer")
    parser.add_argument("--extend", metavar="TOKENIZER",
                        help="do not train, but add tokens to this tokenizer; its ids stay")
    parser.add_argument("--learn", type=positive, default=0, metavar="N",
                        help="with --extend: add N subwords that save most tokens on the inputs")
    add_fields(parser, TokenizerRecipe, *TRAINED)
    add_fields(parser, Recipe, "max_bad")
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
    from deberta_ds.config.model import padded_rows
    from deberta_ds.corpus.outputs import fetch, output

    if args.add_mask:
        from deberta_ds.tokenizer.publish import add_special_tokens

        with output(args.out, cache=args.cache, first=()) as out:
            tokenizer, names = add_special_tokens(fetch(args.add_mask, cache=args.cache), out)
        print(f"{args.out}: added {', '.join(names) or 'nothing'}; {tokenizer.size:,} ids")
    else:
        args.extend = args.extend and fetch(args.extend, cache=args.cache)
        with output(args.out, cache=args.cache, first=()) as out:
            tokenizer, said = make(args, out)
        print(f"{args.out}: {said}, [MASK] = {tokenizer.mask_id}, "
              f"sha256 {tokenizer.sha256[:16]}")
    print(f"a model's vocabulary follows it: {padded_rows(tokenizer.size):,} rows")


def make(args, out: str):
    """Return the tokenizer trained or extended as the options say, and what was made."""
    from deberta_ds.config.options import validate
    from deberta_ds.corpus.extend_tokenizer import extend_tokenizer
    from deberta_ds.corpus.recipe import TRAINED, TokenizerRecipe
    from deberta_ds.corpus.train_tokenizer import read_symbols, sample_texts, train_tokenizer

    if args.extend and not args.learn:
        return extend_tokenizer(args.extend, out, read_symbols(args.add_tokens), 0, [])
    units, read = plan(args)
    if args.extend:
        texts = sample_texts(units, args.sample_bytes, read, max_bad=args.max_bad)
        return extend_tokenizer(args.extend, out, read_symbols(args.add_tokens), args.learn, texts)
    wanted = validate(TokenizerRecipe, {key: getattr(args, key) for key in TRAINED}, "options")
    tokenizer = train_tokenizer(units, out, wanted, read=read, workers=args.workers,
                                max_bad=args.max_bad)
    return tokenizer, f"{args.vocab_size:,} subwords"


if __name__ == "__main__":
    exit_cleanly(main)
