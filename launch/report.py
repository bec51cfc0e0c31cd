"""Write the HTML report of a pretraining run, of several compared, or of a fine-tuning sweep.

    python launch/report.py --run runs/demo --fill_mask "Returns a [MASK]."
    python launch/report.py --run runs/es runs/gdes --out compared.html
    python launch/report.py --superglue runs/superglue runs/superglue-random

A report is one self-contained file that needs no network, in light and dark.
"""

from pathlib import Path

from deberta_ds.base.command_line import local_path, parser_for
from deberta_ds.base.errors import UserError, exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", nargs="+", action="extend", type=Path, metavar="DIR",
                      help="out_dir of a run; several runs are compared")
    what.add_argument("--superglue", nargs="+", action="extend", type=Path, metavar="DIR",
                      help="--out of launch/sweep.py; others are compared with the first")
    parser.add_argument("--fill_mask", nargs="+", action="extend", default=[], metavar="TEXT",
                        help='show how each run fills the masks: "He was a [MASK] man."')
    parser.add_argument("--out", type=local_path, metavar="FILE",
                        help="default: report.html in the first directory")
    options = parser.parse_args()

    from deberta_ds.report import run_pages  # imports torch: not for --help

    directories = options.run or options.superglue
    out = options.out or directories[0] / run_pages.PAGE
    if options.run:
        run_pages.write_runs(out, directories, options.fill_mask)
    elif options.fill_mask:
        raise UserError("--fill_mask is for --run: a fine-tuned model has no masked-LM head")
    else:
        run_pages.write_sweep(out, directories)
    print(f"page: {out} ({out.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    exit_cleanly(main)
