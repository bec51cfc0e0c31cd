"""Compare two runs bit for bit, and profile a run by operator; gpu_train.sh calls both.

  python -m benchmarks.gpu_train compare RUN OTHER --out FILE.json
  python -m benchmarks.gpu_train profile --out NAME -- PRETRAIN_OPTIONS...
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.measure import environment
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import MANIFEST, write_atomic
from deberta_ds.checkpoint.find import list_finished

SKIPPED_STEPS = 3  # of a profiled run: compilation and warming up
ROWS = 60


def lines(run: Path) -> list[dict]:
    """Return a run's training lines, in the order of steps."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def compare(run: Path, other: Path, out: Path) -> None:
    """Write losses and speed of `run`, and where `other` has another bit; then raise UserError."""
    ours = lines(run)
    speeds = sorted(line["tokens_per_second"] for line in ours[len(ours) // 2 :])
    differs = difference(run, other)
    result = {"steps": len(ours), "bit_identical": not differs, "differs": differs,
              "tokens_per_second": speeds[len(speeds) // 2], "lines": ours}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    document = {"benchmark": out.stem, "environment": environment(device), "results": result}
    write_atomic(out, json.dumps(document, indent=1) + "\n")
    if differs:
        raise UserError(f"{other}: {differs}; wrote {out}")
    print(f"{len(ours)} steps and all tensors are equal; wrote {out}")


def difference(run: Path, other: Path) -> str:
    """Return where the bits of two runs part first; empty if nowhere."""
    ours, theirs = lines(run), lines(other)
    for mine, yours in zip(ours, theirs, strict=False):
        decided = [key for key in mine if key.endswith(("loss", "norm"))]
        if differing := [key for key in decided if mine[key] != yours[key]]:
            return f"step {mine['step']} differs from {run} in {differing}"
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} steps, {run} has {len(ours)}"
    files = [json.loads((list_finished(path)[-1] / MANIFEST).read_text())["files"]
             for path in (run, other)]
    different = [name for name, entry in files[0].items()
                 if name.startswith("rank-") and files[1].get(name) != entry]
    return f"{different} of the last checkpoint differ from {run}" if different else ""


def profile(out: Path, options: list[str]) -> int:
    """Run launch/pretrain.py under torch's profiler; write the operators and the trace."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
    import pretrain

    from deberta_ds.training import loop

    chosen = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        chosen.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=2, repeat=1)
    profiler = torch.profiler.profile(activities=chosen, schedule=schedule)
    step = loop.train_step

    def profiled_step(*arguments, **named):
        result = step(*arguments, **named)
        profiler.step()
        return result

    loop.train_step = profiled_step
    sys.argv = ["pretrain.py", *options]
    with profiler:
        code = pretrain.main()
    averages = profiler.key_averages(group_by_input_shape=False)
    which = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    write_atomic(Path(f"{out}-operators.txt"), averages.table(sort_by=which, row_limit=ROWS) + "\n")
    profiler.export_chrome_trace(f"{out}-trace.json.gz")
    print(f"wrote {out}-operators.txt and {out}-trace.json.gz")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("compare")
    first.add_argument("run", type=Path)
    first.add_argument("other", type=Path)
    first.add_argument("--out", type=Path, required=True)
    second = commands.add_parser("profile")
    second.add_argument("--out", type=Path, required=True)
    second.add_argument("options", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.command == "profile":
        return profile(options.out, [word for word in options.options if word != "--"])
    compare(options.run, options.other, options.out)
    return 0


if __name__ == "__main__":
    exit_cleanly(main)
