#!/usr/bin/env python
"""Copy a packed corpus to an object store or another file system that runs then read from.

The address is anything fsspec opens (s3://bucket/web); give it as a path of data.sources. Run the
same command again after an interruption: what is there already is not copied again.
"""

from options import local

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", type=local,
                        help="directory made by tokenize_corpus.py and pack.py")
    parser.add_argument("--to", required=True, metavar="URL", help="where it shall lie")
    args = parser.parse_args()

    from deberta_ds.corpus.pack import verify_corpus
    from deberta_ds.data.remote import upload

    verify_corpus(args.corpus, "full")  # readers check blocks against what is uploaded now
    total, copied = upload(args.corpus, args.to)
    print(f"{args.to}: {total:,} files, {copied:,} copied now")


if __name__ == "__main__":
    exit_cleanly(main)
