"""Write a run file that fits a corpus, devices and hours, with a reason for every value.

    python launch/new.py --corpus shards --devices "4 x a100" --hours 24

It takes the shipped recipe of the largest model that gets enough tokens, from a few epochs of the
text and within the hours. The planner says how fast that is. It changes what has to differ, and
prints the commands to run.
"""

import os
from pathlib import Path

from deberta_ds.base.command_line import as_typed, parser_for, positive_number
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import write_atomic


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--corpus", required=True, metavar="DIR", help="directory made by "
                        "build.py, or a packed corpus")
    parser.add_argument("--heldout", metavar="DIR", help="packed held-out corpus")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer of the corpus")
    parser.add_argument("--devices", required=True, help='"2 cpu" (cores), "4 x a100", ...')
    parser.add_argument("--hours", required=True, type=positive_number, help="time for the run")
    parser.add_argument("--objective", choices=("rtd", "mlm"), default="",
                        help="default: mlm for the smallest model, rtd for the others")
    parser.add_argument("--out", default="new_run.toml", metavar="FILE",
                        help="run file to write; the run is called as it")
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing is computed here

    from deberta_ds.planner import new_run  # a heavy import

    if Path(options.out).exists():
        raise UserError(f"{options.out}: exists already; name another file with --out")
    corpus = new_run.open_corpus(options.corpus, options.heldout, options.tokenizer)
    devices = new_run.open_devices(options.devices)
    text, stage = new_run.choose(corpus, devices, options.hours, options.objective,
                                 Path(options.out).stem)
    write_atomic(options.out, text)
    print(f"{text}\nwrote {options.out}. Run:")
    print(as_typed(new_run.commands(options.out, corpus, devices, stage)))


if __name__ == "__main__":
    exit_cleanly(main)
