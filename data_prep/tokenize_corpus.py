#!/usr/bin/env python
"""Normalize, filter and tokenize text of any size into a corpus of token shards.

On one machine use --workers N. On several (pip install mpi4py) use mpirun -n N python -m
mpi4py.futures data_prep/tokenize_corpus.py ... The shards are the same bytes for any number of
workers. After a crash, run the same command again: only what is missing is done.
"""

import sys
from contextlib import ExitStack

from options import add_fields, add_input_options, add_job_options, plan, say_part_is_done, share

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    from deberta_ds.corpus.recipe import CorpusRecipe, Recipe

    parser = parser_for(__doc__)
    add_input_options(parser)
    parser.add_argument("--out", required=True, help="directory of the corpus")
    parser.add_argument("--tokenizer", required=True,
                        help="a SentencePiece model, tokenizer.json, vocab.json next to "
                        "merges.txt, vocab.txt, or a directory with one of them")
    parser.add_argument("--heldout_out", help="directory for a held-out corpus (optional)")
    parser.add_argument("--heldout_share", type=share,
                        help="share of documents held out, by a hash of their text (default: 0.01)")
    parser.add_argument("--drop_heldout", action="store_true",
                        help="drop the documents that --heldout_share would hold out. Use it for "
                        "the other corpora of a mixture, so that no copies stay there")
    add_fields(parser, CorpusRecipe, "min_characters", "min_letter_share", "filters", "words")
    add_fields(parser, Recipe, "max_bad")
    parser.add_argument("--leave_out", "--duplicates", nargs="+", action="extend", default=[],
                        metavar="FOUND", help="skip the documents that dedup.py or "
                        "decontaminate.py listed in these directories; they must have read these "
                        "inputs")
    add_job_options(parser)
    args = parser.parse_args()
    if args.heldout_share and not (args.heldout_out or args.drop_heldout):
        parser.error("--heldout_share holds nothing out without --heldout_out or --drop_heldout")
    args.heldout_share = args.heldout_share or 0.01

    from deberta_ds.base.numbers import counted
    from deberta_ds.corpus.encode import left_out
    from deberta_ds.corpus.outputs import JOB, output

    options = {"cache": args.cache, "first": JOB, "part": args.part}
    with ExitStack() as stack:
        names = [args.out] + ([args.heldout_out] if args.heldout_out else [])
        outs = [stack.enter_context(output(name, **options)) for name in names]
        manifests = tokenize(args, *outs)
    if args.part:
        say_part_is_done(args, args.out)
    for name, manifest in zip(names, manifests.values(), strict=False):
        print(f"{name}: {counted(manifest.documents, 'document')}, "
              f"{manifest.tokens:,} tokens in {counted(len(manifest.shards), 'shard')}")
    for manifest in [*manifests.values()][:1]:  # both have the counts of the whole job
        listed = left_out(manifest.counts)
        print(f"left out or changed: {listed}" if listed else "nothing was left out")
    if args.heldout_out and manifests:
        say_if_empty(args, *(manifest.documents for manifest in manifests.values()))


def say_if_empty(args, documents: int, heldout_documents: int) -> None:
    """Say what to do where no document of a small corpus fell to the held-out part."""
    if documents + heldout_documents == 0:
        print(f"{args.out}: no document is left; give other text, filters or lists to leave out",
              file=sys.stderr)
    elif documents == 0:
        print(f"{args.out}: no document fell to it, all {heldout_documents:,} to "
              f"{args.heldout_out} (copies of a text go together); remove both directories and "
              "give more text, or a smaller --heldout_share", file=sys.stderr)
    elif heldout_documents == 0:
        from deberta_ds.corpus.damage import FEW_DOCUMENTS

        is_divided = documents < FEW_DOCUMENTS and not args.documents
        more = min(0.5, max(2 * args.heldout_share, FEW_DOCUMENTS / max(1, documents)))
        print(f"{args.heldout_out}: no document fell to it, and an evaluation needs some; remove "
              f"both directories and hold out more: --heldout_share {more:.2g}"
              f"{', or divide text files: --documents blank_line' * is_divided}",
              file=sys.stderr)


def tokenize(args, out: str, heldout_out: str | None = None) -> dict:
    """Do the work, into local directories; return {directory: manifest}."""
    from deberta_ds.base.files import read_json
    from deberta_ds.corpus.filter_rules import read_rules
    from deberta_ds.corpus.outputs import fetch
    from deberta_ds.corpus.tokenize import CleanOptions, tokenize_corpus
    from deberta_ds.tokenizer import Tokenizer

    units, read = plan(args, args.out, args.heldout_out)
    manifests = tokenize_corpus(
        units, out, Tokenizer(fetch(args.tokenizer, cache=args.cache)),
        read=read, clean=CleanOptions(args.min_characters, args.min_letter_share, args.max_bad),
        heldout_out=heldout_out, heldout_share=args.heldout_share, drop_heldout=args.drop_heldout,
        leave_out=[fetch(found, cache=args.cache) for found in args.leave_out],
        filters=read_rules(args.filters) if args.filters else None,
        words=args.words, workers=args.workers, part=args.part)
    if args.filters and not args.part:
        print(f"filters: {read_json(f'{out}/filters.json')['summary']}; all: {out}/filters.json")
    return manifests


if __name__ == "__main__":
    exit_cleanly(main)
