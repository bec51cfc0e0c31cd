"""Make or check the leaderboard zip of SuperGLUE or GLUE.

    python launch/submit.py --run runs/sg --data superglue --zip superglue.zip
    python launch/submit.py --check superglue.zip --data superglue

`--run` is the output of launch/superglue.py or a directory of ten TASK.jsonl files. Of the runs of
a task, the one with the median validation score is used.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly, naming

if TYPE_CHECKING:
    from deberta_ds.tasks.task import Task


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--suite", choices=("SuperGLUE", "GLUE"), default="SuperGLUE",
                        help="benchmark of the leaderboard")
    parser.add_argument("--data", required=True, help="the suite's data: directory, zip or hub")
    parser.add_argument("--run", help="output of launch/superglue.py, or TASK.jsonl files")
    parser.add_argument("--zip", help="zip file to write")
    parser.add_argument("--check", help="only check this zip file")
    parser.add_argument("--leave_out", nargs="+", action="extend", default=[], metavar="TASK",
                        help="tasks that may be missing (the leaderboard takes no partial zip)")
    parser.add_argument("--any_size", action="store_true",
                        help="accept test files that are samples, not the official ones")
    args = parser.parse_args()

    from deberta_ds.tasks import submission
    from deberta_ds.tasks.readers import read_split
    from deberta_ds.tasks.task import SUITES

    if bool(args.check) == bool(args.zip and args.run):
        raise UserError("pass either --check ZIP, or --run DIR and --zip ZIP")
    tasks = SUITES[args.suite]
    unknown = set(args.leave_out) - {task.name for task in tasks}
    if unknown:
        raise UserError(f"--leave_out: no task is called {', '.join(sorted(unknown))}")
    tests = {task.name: read_split(task, args.data, "test", any_size=args.any_size).examples
             for task in tasks if task.name not in args.leave_out}
    if args.check:
        submission.check_zip(args.check, tests, args.leave_out, args.suite)
        print(f"{args.check}: {len(tests)} files, all as the leaderboard wants them")
        return
    files = {task.name: prediction_file(Path(args.run), task) for task in tasks}
    found = {name: file for name, file in files.items() if file and name not in args.leave_out}
    missing = [name for name, file in files.items() if file is None or name in args.leave_out]
    submission.reject_partial(missing, args.leave_out, args.run)
    submission.write_zip(args.zip, {name: text_of(file) for name, file in found.items()}, tests,
                         args.leave_out, found, args.suite)
    submission.check_zip(args.zip, tests, args.leave_out, args.suite)
    for name, file in found.items():
        print(f"  {name:<8} from {file}")
    print(f"wrote {args.zip}: {len(found)} files, checked")


def text_of(file: Path) -> str:
    """Return a file's text; UserError names it if it cannot be read."""
    with naming(file):
        return file.read_text("utf-8")


def prediction_file(root: Path, task: "Task") -> Path | None:
    """Return the submission file of `task` under `root`; of several seeds, the median one's."""
    if (root / f"{task.name}.jsonl").is_file():
        return root / f"{task.name}.jsonl"
    results = sorted((root / (task.predicted_by or task.name)).glob("seed-*/result.json"))
    found = {file: file.parent / "submission" / f"{task.name}.jsonl" for file in results}
    # A seed that diverged has none.
    scored = sorted((score_of(file), file) for file in results if found[file].is_file())
    return found[scored[(len(scored) - 1) // 2][1]] if scored else None


def score_of(result: Path) -> float:
    """Return the score in a run's result.json."""
    from deberta_ds.base.files import read_json

    score = read_json(result).get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise UserError(f"{result}: no score; the file is damaged, run this seed again")
    return score


if __name__ == "__main__":
    exit_cleanly(main)
