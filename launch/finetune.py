"""Fine-tune on one task, in one process or on several ranks under deepspeed or torchrun.

    python launch/finetune.py --task RTE --model MODEL --data DIR --out OUT
    deepspeed launch/finetune.py --task CB --seeds 5 --all.epochs=20 \\
        --init_from OUT/RTE/seed-1 --model MODEL --data DIR --out OUT
    python launch/finetune.py --task my_task.toml --look
    python launch/finetune.py --task my_task.toml --model MODEL --out OUT

Writes result.json, scores.json, model/, val_predictions.jsonl and submission/TASK.jsonl to
OUT/TASK/seed-N/, and OUT/results.json and OUT/report.html. Finished runs are reused.
"""

import os

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    from deberta_ds.cluster.launcher import check_environment

    check_environment(os.environ)
    from deberta_ds.finetuning import options

    parser = parser_for(__doc__)
    parser.add_argument("--task", required=True,
                        help="name of a SuperGLUE or GLUE task, or a TOML file of your own task "
                        "(docs/how-to/fine-tune.md)")
    parser.add_argument("--init_from", default="", metavar="DIRECTORY",
                        help="output of another task; its head is kept if the labels match")
    parser.add_argument("--look", action="store_true",
                        help="print how the tables are read, with ten rows of each, and end")
    parser.add_argument("--no_save_model", action="store_true", help="keep only the predictions")
    options.add_options(parser)
    given, overrides = parser.parse_known_args()  # settings: --TASK.KEY=VALUE
    if given.look:
        from deberta_ds.tasks.look import look

        (task,), _ = options.open_tasks(given, overrides, [given.task])
        for line in look(task, given.data or "."):
            print(line)
        return
    del given.look

    from deberta_ds.api.jobs import finetune  # heavy imports after the options are known good
    from deberta_ds.cluster import dist

    values = vars(given)
    task, init_from, unsaved = (values.pop(name) for name in ("task", "init_from", "no_save_model"))
    finetune(task, settings=overrides, init_from=init_from, save_models=not unsaved,
             show_scores=True, **values)
    dist.destroy()


if __name__ == "__main__":
    exit_cleanly(main)
