#!/usr/bin/env python
"""Check the files of corpora against their manifests; exit code 2 names the first bad shard."""

from pathlib import Path

from options import add_cache, parser_for

from deberta_ds.errors import UserError, exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="+", help="corpus directories")
    parser.add_argument("--verify", choices=("sizes", "full"), default="full", help="how closely")
    parser.add_argument("--tokenizer", help="tokenizer that the corpora must have been made with")
    add_cache(parser)
    args = parser.parse_args()

    from deberta_ds.data.corpus import Corpus
    from deberta_ds.data.prep.identity import DIRECTORY, Origins
    from deberta_ds.data.prep.outputs import fetch
    from deberta_ds.tokenizer import Tokenizer

    for path in (fetch(path, cache=args.cache) for path in args.corpus):
        lengths = sorted(int(p.parent.name[5:]) for p in Corpus.row_plans(path))
        if not lengths:
            raise UserError(f"{path}: no finished row plan; run data_prep/pack.py")
        if (Path(path) / DIRECTORY).exists():
            files = Origins(path).verify(args.verify)
            print(f"{path}/{DIRECTORY}: {files:,} files agree ({args.verify})")
        for seq_len in lengths:
            corpus = Corpus(path, seq_len=seq_len)
            if args.tokenizer:
                corpus.check_tokenizer(Tokenizer(args.tokenizer).sha256)
            files = corpus.verify(args.verify)
            print(f"{path}/rows-{seq_len}: {files:,} files agree ({args.verify}), "
                  f"{corpus.num_rows:,} rows, fingerprint {corpus.fingerprint[:16]}")


if __name__ == "__main__":
    exit_cleanly(main)
