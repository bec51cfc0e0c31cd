"""Write the HTML report of a pretraining run, of several compared, or of a fine-tuning sweep.

    python launch/report.py --run runs/demo --fill_mask "Returns a [MASK]."
    python launch/report.py --run runs/demo --live 60
    python launch/report.py --run runs/es runs/gdes --out compared.html
    python launch/report.py --superglue runs/superglue runs/superglue-random

A report is one self-contained file that needs no network, in light and dark. Curves can be drawn
over steps, tokens or time, on a logarithmic scale, and smoothed. `--live` writes it again, and the
open page reloads itself, until the run ends.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deberta_ds.base.command_line import local_path, parser_for, positive, positive_number
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
    parser.add_argument("--price_per_hour", type=positive_number, metavar="PRICE",
                        help="of one GPU (or CPU rank), in any currency; the report says the cost")
    parser.add_argument("--live", type=positive, nargs="?", const=30, metavar="SECONDS",
                        help="write the report again this often (default: 30) until the run ends")
    parser.add_argument("--out", type=local_path, metavar="FILE",
                        help="default: report.html in the first directory")
    options = parser.parse_args()

    from deberta_ds.report import run_pages  # imports torch: not for --help

    directories = options.run or options.superglue
    out = options.out or directories[0] / run_pages.PAGE
    if options.run:
        write = partial(run_pages.write_runs, out, directories, options.fill_mask,
                        options.price_per_hour, options.live or 0)
        while _goes_on(write, directories, options.live):
            time.sleep(options.live)
    elif options.fill_mask or options.live or options.price_per_hour:
        raise UserError("--fill_mask, --live and --price_per_hour are for --run")
    else:
        run_pages.write_sweep(out, directories)
    print(f"report: {out} ({out.stat().st_size / 1024:.0f} KiB)")


def _goes_on(write: Callable, directories: list[Path], live: int | None) -> bool:
    """Write the report; return whether it is to be written again, as its run goes on."""
    from deberta_ds.cluster import lock

    try:
        return any(run.is_running for run in write()) and live is not None
    except UserError as error:  # a run that has just begun has no records
        if live is None or not any(map(lock.is_held, directories)):
            raise
        print(f"not written yet: {error}", flush=True)
        return True


if __name__ == "__main__":
    exit_cleanly(main)
