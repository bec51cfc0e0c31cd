"""Fine-tune a model on several tasks with several seeds each: your own, and those of benchmarks.

    deepspeed launch/sweep.py --tasks tickets.toml mails.toml --model MODEL \\
        --seeds 5 --out OUT
    deepspeed launch/sweep.py --tasks RTE tickets.toml --data superglue \\
        --model MODEL --seeds 5 --out OUT

Prints a table and writes OUT/results.json and OUT/report.html. Finished runs are reused: after an
interruption, run the same command again.
"""

import os
from pathlib import Path

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main(about: str = __doc__, is_suite: bool = False) -> None:
    from deberta_ds.cluster.launcher import check_environment

    check_environment(os.environ)
    from deberta_ds.finetuning import options

    parser = parser_for(about)
    if is_suite:
        parser.add_argument("--suite", choices=("SuperGLUE", "GLUE"), default="SuperGLUE",
                            help="the benchmark")
    parser.add_argument("--tasks", nargs="+", action="extend", default=[],
                        required=not is_suite, metavar="TASK",
                        help="names of benchmarks' tasks, or TOML files of your own"
                        + " (default: all of the suite)" * is_suite)
    parser.add_argument("--init_from", nargs="+", action="extend", default=[], metavar="TASK=DIR",
                        help="start a task from the output of another, such as CB=runs/MNLI/seed-1")
    parser.add_argument("--save_models", action="store_true", help="keep the weights of every run")
    parser.add_argument("--compare", type=Path, metavar="OUT",
                        help="another sweep to compare with, such as one without pretraining")
    options.add_options(parser)
    given, overrides = parser.parse_known_args()  # settings: --TASK.KEY=VALUE

    from deberta_ds.api.jobs import finetune  # heavy imports after the options are known good
    from deberta_ds.cluster import dist
    from deberta_ds.tasks.task import SUITES

    values = vars(given)
    names, init_from, save_models, other = (
        values.pop(name) for name in ("tasks", "init_from", "save_models", "compare"))
    suite = values.pop("suite", None)
    names = names or [task.name for task in SUITES[suite] if task.predicted_by is None]
    finetune(names, settings=overrides, init_from=init_from, save_models=save_models,
             compare_with=other, **values)
    dist.destroy()


if __name__ == "__main__":
    exit_cleanly(main)
