"""Look at this machine: print what a run depends on, and how fast it is, as text for an issue.

    python launch/doctor.py
    deepspeed launch/doctor.py        # also the links between GPUs and nodes
    python launch/doctor.py --model microsoft/deberta-v3-xsmall

With --model, it checks that a public model, or one of yours, is read right. It compares hidden
states and tokens with those of transformers, and fills a masked word. It ends with code 2 if
something would stop a run, or if the model differs.
"""

import argparse
import os

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it
    parser.add_argument("--model", help="look at a model instead: a directory, a run, a URL, or "
                        "OWNER/NAME of the Hugging Face Hub")
    source = parser.parse_args().model
    if source:
        from deberta_ds.evaluate.public_model import examine_model

        is_right = True
        for line in examine_model(source):
            print(line, flush=True)
            is_right &= not line.startswith("PROBLEM")
        print("right" if is_right else "WRONG: do not train from it; please report it")
        return 0 if is_right else 2
    from deberta_ds.cluster.launcher import check_environment

    check_environment(os.environ)
    from deberta_ds.cluster import dist
    from deberta_ds.training.doctor import examine

    problems = examine()
    dist.destroy()
    return 2 if problems else 0


if __name__ == "__main__":
    exit_cleanly(main)
