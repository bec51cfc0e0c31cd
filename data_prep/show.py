#!/usr/bin/env python
"""Print sequences as the model sees them: tokens, with the masked ones in color.

With a run file: show.py --config RUN.toml, with overrides as for a run. Without one: show.py CORPUS
--tokenizer spm.model --seq_len 512.
"""

import sys
from typing import TYPE_CHECKING

from deberta_ds.base.command_line import accept_old, natural, parser_for, positive
from deberta_ds.base.errors import exit_cleanly

if TYPE_CHECKING:
    from deberta_ds.config.run_config import DataConfig, ObjectiveConfig
    from deberta_ds.tokenizer import Tokenizer

_MASKED, _REPLACED, _KEPT, _SPECIAL, _PLAIN = (
    "\x1b[7;31m", "\x1b[7;35m", "\x1b[7;32m", "\x1b[2;36m", "\x1b[0m"
)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", nargs="?", help="packed corpus directory, without --config")
    parser.add_argument("--config", metavar="TOML", help="run file: its sources, masks and seed")
    parser.add_argument("--tokenizer", help="tokenizer of the corpus, without --config")
    parser.add_argument("--seq_len", type=positive, help="sequence length in tokens, without "
                                                         "--config")
    parser.add_argument("--sequences", type=positive, default=2,
                        help="number of sequences to print")
    accept_old(parser, "--rows", "--sequences")
    parser.add_argument("--first", type=natural, default=0,
                        help="number of the first sequence to print")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                        help="use colors; without them targets are in braces")
    args, overrides = parser.parse_known_args()
    if (args.corpus or "").startswith("--"):  # argparse takes what has spaces for no option
        overrides, args.corpus = [args.corpus, *overrides], None
    if (args.corpus is None) == (args.config is None):
        parser.error("name either a packed corpus or a run file with --config")
    if args.config and (args.tokenizer or args.seq_len):
        parser.error("a run file has its own tokenizer and seq_len: --data.seq_len=N, say")
    if args.corpus and not (args.tokenizer and args.seq_len):
        parser.error("a corpus needs --tokenizer and --seq_len; a run file has them")

    from deberta_ds.data.rows import RowDataset
    from deberta_ds.files.remote import Cache
    from deberta_ds.tokenizer import Tokenizer

    data, objective, rows_of_run = settings_of(args, overrides)
    tokenizer = Tokenizer(data.tokenizer)
    dataset = RowDataset(data.sources, tokenizer, seq_len=data.seq_len, seed=data.seed,
                         mask=objective.mask, attend_across_documents=data.attend_across_documents,
                         sample_by=objective.sample_by, rows_of_run=rows_of_run,
                         cache=Cache(data.cache, data.cache_gigabytes))
    color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    for g in range(args.first, args.first + args.sequences):
        row = dataset[g]
        source, number = dataset.locate(g)
        real, targets = int((row.segments > 0).sum()), int((row.labels >= 0).sum())
        print(f"sequence {g} (number {number} of {data.sources[source].path}): {real} of "
              f"{data.seq_len} tokens, {int(row.segments.max())} document segments, "
              f"{targets} targets ({targets / real:.1%})")
        print(render(row, tokenizer, color), end="\n\n")
    if color:
        print(f"{_MASKED}masked{_PLAIN} {_REPLACED}shown as another{_PLAIN} "
              f"{_KEPT}shown unchanged{_PLAIN} {_SPECIAL}special{_PLAIN}")


def settings_of(args, overrides: list[str]) -> tuple["DataConfig", "ObjectiveConfig", int]:
    """Return the data and objective sections of a run file and its rows, or of one corpus.

    Overrides are written as for a run: --objective.mask.rate=0.3 --data.seed=1
    """
    from deberta_ds.base.errors import ConfigError
    from deberta_ds.config import run_config, toml_files
    from deberta_ds.config.batch_schedule import rows_of_run
    from deberta_ds.config.options import validate
    from deberta_ds.release import shape

    if args.config:
        run, _ = run_config.load(args.config, overrides, shape.complete)
        return run.data, run.objective, rows_of_run(run.train)
    values = {"data": {"sources": [{"path": args.corpus}], "tokenizer": args.tokenizer,
                       "seq_len": args.seq_len}, "objective": {"kind": "mlm"}}
    for override in overrides:
        key, value = toml_files.parse_override(override)
        if not key.startswith(("data.", "objective.mask.")):
            raise ConfigError(f"{override}: a corpus alone takes --data.KEY=... and "
                              "--objective.mask.KEY=...; the rest belongs to a run file")
        toml_files.set_value(values, key, value)
    return (validate(run_config.DataConfig, values["data"], "[data]"),
            validate(run_config.ObjectiveConfig, values["objective"], "[objective]"), 0)


def render(row, tokenizer: "Tokenizer", color: bool) -> str:
    """Return the row as text; each target as its original, colored by what the model is shown."""
    special, parts = tokenizer.is_special(), []
    for shown, label, segment in zip(row.input_ids, row.labels, row.segments, strict=True):
        if segment == 0:
            break
        original = label if label >= 0 else shown
        text = tokenizer.readable([original])[0]
        if label < 0:
            style = _SPECIAL if special[shown] else ""
            text = f"\n{text}" if shown == tokenizer.cls_id and parts else text
        else:
            style = _MASKED if shown == tokenizer.mask_id else _KEPT
            style = _REPLACED if shown not in (tokenizer.mask_id, original) else style
            space = " " if text.startswith(" ") else ""
            text = text if color else f"{space}{{{text.strip()}}}"
        parts.append(f"{style}{text}{_PLAIN}" if color and style else text)
    return "".join(parts)


if __name__ == "__main__":
    exit_cleanly(main)
