#!/usr/bin/env python
"""Build a corpus from a recipe: tokenizer, de-duplication, filters, shards, packed sequences.

    python data_prep/build.py --recipe corpus.toml --workers 8

Then data.corpus of a run file names the directory. After an interruption, run the same command
again: only what is missing is done. To override a value of the recipe, write --near=0.8.
`--explain` lists every key of a recipe, `--explain near` those that contain "near".
"""

import dataclasses
import re

from options import add_part, add_workers

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--recipe", metavar="TOML", help="recipe, such as examples/corpus.toml")
    parser.add_argument("--explain", nargs="?", const="", metavar="KEY",
                        help="explain a key of the recipe, or every key, and exit")
    parser.add_argument("--dry_run", action="store_true",
                        help="show inputs and stages, and do nothing")
    add_workers(parser)
    add_part(parser)
    args, overrides = parser.parse_known_args()

    from deberta_ds.config.options import explain, options_of
    from deberta_ds.corpus.recipe import Recipe

    known = options_of(Recipe)
    if args.explain is not None:
        return explain(known, args.explain, "recipe")
    if not args.recipe:
        parser.error("--recipe is needed")
    try:
        build(args, overrides)
    except UserError as error:  # stages name the options of single commands
        message = str(error)
        for key in (one.key for one in known):
            message = re.sub(rf"--{key.rpartition('.')[2]} (?=[\d.])", f"--{key}=", message)
            message = re.sub(rf"--{key.rpartition('.')[2]}\b(?!=)", key, message)
        raise UserError(message) from error


def build(args, overrides: list[str]) -> None:
    """Build, or say what would be done."""
    from deberta_ds.base.files import flatten
    from deberta_ds.base.numbers import counted
    from deberta_ds.corpus import recipe as recipes
    from deberta_ds.corpus.build import Build
    from deberta_ds.corpus.encode import left_out
    from deberta_ds.tracking.log import non_default_texts

    recipe, origins = recipes.load(args.recipe, overrides)
    job = Build(recipe, args.workers, args.part)
    values = flatten(dataclasses.asdict(recipe) | {
        "corpora": [corpus.name for corpus in recipe.corpora]})
    print("\n".join(non_default_texts(values, origins, "recipe")), flush=True)
    if args.dry_run:
        return print("\n".join(job.plan()))
    job.run()
    for target, manifest in job.manifests().items():
        print(f"{target}: {counted(manifest.documents, 'document')}, {manifest.tokens:,} tokens; "
              f"of all: {left_out(manifest.counts) or 'nothing left out'}")
    print(f'{job.out}: built; in the run file, [data] corpus = "{job.out}"')


if __name__ == "__main__":
    exit_cleanly(main)
