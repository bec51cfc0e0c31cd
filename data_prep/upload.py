#!/usr/bin/env python
"""Copy a packed corpus to an object store or another file system.

The URL is any that fsspec opens (s3://bucket/web). Then use it as a path in data.sources. After an
interruption, run the same command again: only what is missing is copied.
"""

from deberta_ds.base.command_line import local, parser_for
from deberta_ds.base.errors import exit_cleanly, still_at_work


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", type=local,
                        help="directory made by tokenize_corpus.py and pack.py")
    parser.add_argument("--to", required=True, metavar="URL", help="URL of the copy")
    args = parser.parse_args()

    from deberta_ds.corpus.stats import verify_corpus
    from deberta_ds.data.remote import upload

    with still_at_work(lambda: f"{args.to}: uploading"):
        verify_corpus(args.corpus, "full")  # readers check blocks against what is uploaded now
        total, copied = upload(args.corpus, args.to)
    print(f"{args.to}: {total:,} files, {copied:,} copied now")


if __name__ == "__main__":
    exit_cleanly(main)
