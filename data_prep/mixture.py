#!/usr/bin/env python
"""Print the [[data.sources]] of a run for several corpora, with shares and epochs.

Natural shares are proportional to the tokens of each corpus. A temperature above 1 raises the share
of small corpora, as for the languages of a multilingual model (XLM-R and mT5 use about 3.3). With
--after, the lines are for a second stage that continues where a run stopped and repeats no
sequence.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deberta_ds.base.command_line import accept_old, natural, parser_for, positive, positive_number
from deberta_ds.base.errors import UserError, exit_cleanly

if TYPE_CHECKING:
    from deberta_ds.config.run_config import SourceConfig
    from deberta_ds.data.mixture import Stage


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="+", help="packed corpus directories, or one "
                        "directory made by build.py")
    parser.add_argument("--seq_len", type=positive, required=True, help="sequence length in tokens")
    parser.add_argument("--temperature", type=positive_number, default=1.0,
                        help="sampling temperature; 1: natural shares")
    parser.add_argument("--weights", type=positive_number, nargs="+", action="extend",
                        help="shares of the corpora, instead of a temperature")
    parser.add_argument("--sequences", type=natural, default=0,
                        help="sequences of the run; 0: as many as all corpora hold")
    parser.add_argument("--after", nargs="+", action="extend", default=[], metavar="RUN",
                        help="out_dir or checkpoint of each earlier stage, oldest first")
    parser.add_argument("--part", type=float, nargs=2, metavar=("FROM", "TO"),
                        help="range of the shards, such as 0.9 1; default: all, or as before")
    parser.add_argument("--cache", metavar="DIRECTORY",
                        help="directory for copies of corpora at a URL; default: that of the "
                        "last run of --after, else ~/.cache/deberta_ds")
    accept_old(parser, "--rows", "--sequences")
    accept_old(parser, "--stretch", "--part")
    args = parser.parse_args()

    from deberta_ds.config.toml_files import BUILT, read_built
    from deberta_ds.data.mixture import build_mixture, next_source, temperature_weights
    from deberta_ds.files.remote import Cache

    if len(args.corpus) == 1 and (Path(args.corpus[0]) / BUILT).is_file():
        built = read_built(args.corpus[0])["sources"]
        args.corpus = [source["path"] for source in built]
        if args.temperature == 1:
            args.weights = args.weights or [source["weight"] for source in built]
    stages = [_read_stage(path) for path in args.after]
    part = tuple(args.part) if args.part else None
    if part and not 0 <= part[0] < part[1] <= 1:
        raise UserError(f"--part {part[0]} {part[1]}: must be FROM TO with 0 <= FROM < TO <= 1")
    cache = stages[-1].cache if stages else Cache()
    if args.cache:
        cache = replace(cache, directory=args.cache)
    sources, corpora = zip(*[next_source(path, stages, seq_len=args.seq_len, part=part, cache=cache)
                             for path in args.corpus], strict=True)
    for corpus in corpora:  # a run has one tokenizer
        corpus.check_tokenizer(corpora[0].manifest.tokenizer_sha256, f"that of {args.corpus[0]}")
    sizes = [corpus.num_rows for corpus in corpora]
    if args.weights and len(args.weights) != len(corpora):
        raise UserError(f"{len(args.weights)} weights for {len(corpora)} corpora; give one each")
    weights = args.weights or temperature_weights(sizes, args.temperature)
    mixture = build_mixture(weights)
    rows = args.sequences or sum(sizes)
    used = mixture.consumed(rows)
    for source, size, share, weight, taken in zip(
        sources, sizes, mixture.shares(), weights, used, strict=True):
        first, last = source.first_sequence / size, (source.first_sequence + taken) / size
        print(f"[[data.sources]]  # {size:,} sequences, {share:.2%} of the run, "
              f"epochs {first:.2f} to {last:.2f} in {rows:,} sequences")
        print("\n".join(source_lines(source, weight)) + "\n")


def _read_stage(directory: str) -> "Stage":
    from deberta_ds.checkpoint import find  # imports torch, which a mixture alone does not need
    from deberta_ds.checkpoint.find import read_run_record
    from deberta_ds.data.mixture import stage_of

    path = find.newest(directory)
    record = read_run_record(path)
    return stage_of(path, config=record.config, sequences_seen=record.sequences_seen,
                    content_hashes=record.content_hashes)


def source_lines(source: "SourceConfig", weight: float) -> list[str]:
    """Return the TOML lines of a source, without those that are defaults."""
    lines = [f"path = {json.dumps(source.path, ensure_ascii=False)}", f"weight = {weight:.9g}"]
    lines += [f"first_sequence = {source.first_sequence}"] if source.first_sequence else []
    lines += [f"order = {list(source.order)}"] if source.order else []
    lines += [f"part = {list(source.part)}"] if source.part != (0.0, 1.0) else []
    return lines


if __name__ == "__main__":
    exit_cleanly(main)
