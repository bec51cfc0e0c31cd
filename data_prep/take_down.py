#!/usr/bin/env python
"""Remove documents from a finished corpus by id.

The result is a new directory. Only the shards of removed documents are written again; the other
files are hard links to those of the old corpus.
"""

from options import add_cache, add_workers

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", help="corpus directory")
    parser.add_argument("--out", required=True, help="directory of the new corpus")
    parser.add_argument("--tokenizer", required=True, help="tokenizer of the corpus")
    parser.add_argument("--document", nargs="+", action="extend", default=[], metavar="ID",
                        help="ids (--id_key), or SOURCE@PLACE as find.py prints them")
    parser.add_argument("--documents_from", metavar="FILE", help="a file with one ID per line")
    add_workers(parser)
    add_cache(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.origins import take_down
    from deberta_ds.corpus.outputs import fetch, output
    from deberta_ds.files.tables import text_lines
    from deberta_ds.tokenizer import Tokenizer

    names = list(args.document)
    if args.documents_from:
        names += [line for _, line in text_lines(args.documents_from)]
    names = [name for name in names if name]
    if not names:
        raise UserError("no documents named; give --document or --documents_from")
    tokenizer = Tokenizer(fetch(args.tokenizer, cache=args.cache))
    with output(args.out, cache=args.cache) as out:
        done = take_down(fetch(args.corpus, cache=args.cache), names, out, tokenizer,
                         workers=args.workers)
    print(f"{args.out}: {done['documents']:,} documents taken out, {done['shards']:,} shards "
          "written again")


if __name__ == "__main__":
    exit_cleanly(main)
