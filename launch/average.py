"""Average the weights of a run's last checkpoints, or of any models of one shape.

    python launch/average.py --run runs/v3_base --last 5 --out DIR
    python launch/average.py --models runs/a runs/b/checkpoints/step-00002000 \\
        --out DIR

Averages are computed in float64 and written in fp32 as a new model that export.py, finetune.py and
the other commands read. A run keeps `train.keep` checkpoints (3 by default). The farther apart they
are and the higher the learning rate between them, the more averaging changes the model.
"""

import os
from pathlib import Path

from deberta_ds.base.command_line import checked, local, parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", help="out_dir of a run")
    source.add_argument("--models", nargs="+", action="extend", metavar="MODEL",
                        help="checkpoints, exports or public models, of one shape and tokenizer")
    parser.add_argument("--last", type=_at_least_two, metavar="N",
                        help="with --run: average the N newest checkpoints (default: 3)")
    parser.add_argument("--out", type=local, required=True, metavar="DIR", help="new directory")
    parser.add_argument("--to", choices=("hf", "ms", "ours"), default="hf",
                        help="format: Hugging Face (the default), microsoft's release, or the "
                             "weights and config of this project")
    options = parser.parse_args()
    if options.models and options.last:
        parser.error("--last is for --run")
    if options.models and len(options.models) < 2:
        parser.error("--models takes at least two")

    from deberta_ds.publish.average import average, last_checkpoints
    from deberta_ds.publish.convert import check_out, write_release

    if options.models and len({os.path.realpath(model) for model in options.models}) < len(
            options.models):
        parser.error("--models names a model twice")
    models = options.models or last_checkpoints(options.run, options.last or 3)
    check_out(options.out)
    source = "mean of " + ", ".join(map(str, models))
    summary = write_release(average(models), source, Path(options.out), options.to)
    for line in (*summary.notes, *summary.findings()):
        print(f"  {line}")
    print(f"wrote the mean of {len(models)} models to {options.out}")


def _at_least_two(text: str) -> int:
    return checked(text, int, lambda value: value >= 2, "a whole number from 2 on")


if __name__ == "__main__":
    exit_cleanly(main)
