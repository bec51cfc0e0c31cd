#!/usr/bin/env python
"""Check corpora against their manifests, or read inputs to their end, before work begins on them.

Of a corpus, the first bad shard is named. Of inputs, all damaged files are. Exit code 2 for either.
"""

import os

from options import add_cache, add_input_options, add_workers

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly, still_at_work


def main() -> int:
    parser = parser_for(__doc__)
    add_input_options(parser)
    parser.add_argument("--verify", choices=("sizes", "full"), default="full",
                        help="full: checksums of a corpus too")
    parser.add_argument("--tokenizer", help="tokenizer that must have made the corpora")
    add_workers(parser)
    add_cache(parser)
    args = parser.parse_args()

    from deberta_ds.base.numbers import counted
    from deberta_ds.config.toml_files import BUILT
    from deberta_ds.corpus.damage import damaged_files
    from deberta_ds.corpus.documents import input_kind
    from deberta_ds.corpus.outputs import fetch
    from deberta_ds.corpus.recipe import read_options_of
    from deberta_ds.corpus.stats import verify_corpus
    from deberta_ds.tokenizer import Tokenizer

    def is_corpus(path: str) -> bool:
        names = os.listdir(path) if os.path.isdir(path) else ["a file"]
        return not names or bool({".job.json", "manifest.json", BUILT} & {*names}) or (
            "://" in path and "*" not in path and input_kind(path) is None)

    corpora = list(filter(is_corpus, args.inputs))
    made_with = Tokenizer(fetch(args.tokenizer, cache=args.cache)).sha256 if args.tokenizer else ""
    for path in corpora:
        with still_at_work(lambda name=path: f"{name}: reading"):
            found = verify_corpus(fetch(path, cache=args.cache), args.verify, made_with)
        print("\n".join(found))
    inputs = [path for path in args.inputs if path not in corpora]
    if not inputs:
        return 0
    bad = damaged_files(inputs, read_options_of(args), args.workers)
    print(*bad.values(), counted(len(bad), "bad file"), sep="\n")
    return 2 if bad else 0


if __name__ == "__main__":
    exit_cleanly(main)
