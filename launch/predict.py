"""Predict with a fine-tuned model: one JSON line per row of a table of any size, in order.

    python launch/predict.py --model OUT/TASK/seed-1 --data a.csv --out a.jsonl
    deepspeed launch/predict.py ...

The table (.jsonl .csv .tsv .parquet .arrow) has the columns of the task. If it has labels,
their scores are printed and written to a.scores.json.
"""

import argparse
import sys
from dataclasses import replace

from deberta_ds.base.command_line import checked, local_path, natural, parser_for, positive
from deberta_ds.base.errors import exit_cleanly

TRUNCATIONS = ("first", "second", "longest_first", "head_tail", "windows_mean", "windows_max")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True, help="fine-tuned model, or the run that wrote it")
    parser.add_argument("--data", required=True, type=local_path, help="table to predict")
    parser.add_argument("--out", required=True, type=local_path, help="JSON lines to write")
    parser.add_argument("--keep", nargs="+", action="extend", default=[], metavar="COLUMN",
                        help="columns of the table to copy next to the predictions")
    parser.add_argument(
        "--global_batch_size", type=positive, default=32, help="rows per forward pass")
    parser.add_argument("--max_length", type=_row_length, metavar="N",
                        help="maximum length in tokens (default: as trained)")
    parser.add_argument("--truncation", choices=TRUNCATIONS, metavar="HOW",
                        help="what is cut of longer texts: " + ", ".join(TRUNCATIONS)
                        + " (default: as trained)")
    parser.add_argument("--max_bad", type=natural, default=0, metavar="N",
                        help="go on after up to N rows that cannot be used; their lines say why")
    parser.add_argument("--encoding", default="",
                        help="of a table of text (default: UTF-8, or UTF-16 if found)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()

    from deberta_ds.cluster import dist
    from deberta_ds.engine.engine import init_distributed
    from deberta_ds.finetuning.models import Finetuned, find_finetuned, load_finetuned
    from deberta_ds.finetuning.predict_file import predict_file
    from deberta_ds.tasks.settings import check_truncation
    from deberta_ds.training.start import versions

    device = init_distributed()
    dist.check_alike({"version of": versions()} | {
        f"--{name}": value for name, value in vars(given).items() if name != "local_rank"})

    def load() -> Finetuned:
        saved = load_finetuned(find_finetuned(given.model))
        if not given.truncation:
            return saved
        check_truncation(saved.task, given.truncation)
        return replace(saved, settings=replace(saved.settings, truncation=given.truncation))

    saved = dist.together(load)
    if dist.is_main() and saved.failure:
        print(f"warning: the run that trained {given.model} failed: {saved.failure}",
              file=sys.stderr)
    count = predict_file(saved, given.data, given.out, device,
                         global_batch_size=given.global_batch_size, keep=given.keep,
                         max_length=given.max_length or saved.settings.max_length,
                         max_bad=given.max_bad, encoding=given.encoding)
    if dist.is_main():
        print(f"wrote {given.out}: {count:,} predictions of {saved.task.name}", file=sys.stderr)
    dist.destroy()


def _row_length(text: str) -> int:
    """Type of an option: tokens that a row may have."""
    return checked(text, int, lambda value: value >= 8, "a whole number from 8 on")


if __name__ == "__main__":
    exit_cleanly(main)
