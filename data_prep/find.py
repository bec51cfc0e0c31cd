#!/usr/bin/env python
"""Find the documents of a sequence, or the sequences of a document.

find.py CORPUS --seq_len 512 --sequence 17 names the documents in sequence 17. show.py and messages
give such numbers. --document ID names the sequences of a document: its id (--id_key), or
SOURCE@PLACE.
"""

from options import add_cache

from deberta_ds.base.command_line import accept_old, natural, parser_for, positive
from deberta_ds.base.errors import UserError, exit_cleanly, still_at_work


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", help="corpus directory")
    parser.add_argument("--seq_len", type=positive, required=True, help="sequence length in tokens")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--sequence", type=natural, nargs="+", action="extend",
                        help="numbers of sequences of the corpus")
    accept_old(parser, "--row", "--sequence")
    wanted.add_argument("--document", nargs="+", action="extend", metavar="ID",
                        help="ids of documents")
    add_cache(parser)
    args = parser.parse_args()

    from deberta_ds.corpus.origins import Origins
    from deberta_ds.corpus.outputs import fetch
    from deberta_ds.data.corpus import Corpus

    path = fetch(args.corpus, cache=args.cache)
    corpus, origins = Corpus(path, seq_len=args.seq_len), Origins(path)
    for row in args.sequence or []:
        if row >= corpus.num_rows:
            raise UserError(f"{args.corpus}: has {corpus.num_rows:,} sequences of {args.seq_len} "
                            f"tokens, {row} is none of them")
        shard, documents = corpus.documents_of(row)
        for document in documents:
            origin = origins.of(shard, document)
            print(f"sequence {row}: {origin.name} ({origin.source}@{origin.place}, document "
                  f"{document} of shard {shard}{', ' + origin.label if origin.label else ''})")
    with still_at_work(lambda: f"{args.corpus}: looking"):
        found = origins.find(args.document) if args.document else {}
    for shard, documents in found.items():
        for document, name in documents.items():
            rows = ", ".join(map(str, corpus.rows_of(shard, document)))
            print(f"{name}: document {document} of shard {shard}, sequences {rows}")
    known = {name for documents in found.values() for name in documents.values()}
    if unknown := [name for name in args.document or [] if name not in known]:
        raise UserError(f"{args.corpus}: holds no document {', '.join(unknown)}")


if __name__ == "__main__":
    exit_cleanly(main)
