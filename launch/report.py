"""Write the HTML report of one run, or of several side by side.

launch/report.py --run runs/demo [--run runs/other] [--out runs/demo/report.html]
"""

import argparse
from pathlib import Path

from deberta_ds.errors import exit_cleanly


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the HTML report of a pretraining run.")
    parser.add_argument("--run", action="append", required=True, type=Path, metavar="DIRECTORY",
                        help="a run's out_dir; give it again to compare runs")  # fmt: skip
    parser.add_argument("--out", type=Path, help="default: report.html in the first run")
    arguments = parser.parse_args()

    from deberta_ds.report import write_report

    out = arguments.out or arguments.run[0] / "report.html"
    write_report(out, arguments.run)
    print(f"report: {out} ({out.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    exit_cleanly(main)
