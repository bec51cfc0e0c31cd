"""Look at this machine: print what a run depends on, and how fast it is, as text for an issue.

    python launch/doctor.py
    deepspeed launch/doctor.py        # also the links between GPUs and nodes

Ends with code 2 if something would stop a run.
"""

import argparse
import os

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it
    parser.parse_args()
    from deberta_ds.cluster.launcher import check_environment

    check_environment(os.environ)
    from deberta_ds.cluster import dist
    from deberta_ds.training.doctor import examine

    problems = examine()
    dist.destroy()
    return 2 if problems else 0


if __name__ == "__main__":
    exit_cleanly(main)
