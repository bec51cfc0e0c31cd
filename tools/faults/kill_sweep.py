"""kill -9 at random moments, resume, compare every loss with an unbroken run.

    python tools/faults/kill_sweep.py --stage 3 --kills 20 --seed 1 \\
        --out kill_sweep_zero3.json

Two ranks of a tiny RTD run. Two kills of five wait for a checkpoint to be half-written. Either all
ranks are killed at once, or one of them, and the rest a moment later. After each kill every line of
metrics.jsonl is kept for the comparison, and the next start must go on from the newest whole
checkpoint. A sweep adds its kills to those that the file has already.
"""

import argparse
import json
import random
import re
import shutil
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(TESTS))

import rank_helpers  # noqa: E402
from data_helpers import Tokenizer, make_corpus, random_documents, tokenizer_path  # noqa: E402

from deberta_ds.base.files import write_atomic  # noqa: E402
from deberta_ds.checkpoint.find import MANIFEST, list_finished, list_steps, step_of  # noqa: E402

SAVE_EVERY = 2
RUN_FILE = """name = "sweep"
out_dir = "{out}"
[model]
preset = "tiny"
vocab_size = 640
num_layers = 2
[objective]
kind = "rtd"
generator_layers = 2
[data]
sources = [{{path = "{work}/train"}}]
tokenizer = "{work}/spm.model"
seq_len = 64
workers = 0
[optim]
learning_rate = 1e-3
[train]
steps = {steps}
global_batch_size = 4
micro_batch_size = 2
log_every = 1
save_every = {save_every}
keep = 2
"""


def losses(out: Path) -> dict[int, tuple]:
    """Return {step: (loss, gradient norm)} of the whole lines of metrics.jsonl."""
    found = {}
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n") and '"kind": "train"' in line:
            record = json.loads(line)
            found[record["step"]] = (record["loss"], record["grad_norm"])
    return found


def half_written(out: Path) -> list[Path]:
    return [path for path in list_steps(out) if not (path / MANIFEST).exists()]


def newest_whole(out: Path) -> int:
    return max(map(step_of, list_finished(out)), default=0)


def began(log: Path) -> bool:
    """Whether the ranks have resumed or started, and metrics.jsonl is cut back to that step."""
    return log.exists() and " at step " in log.read_text(errors="replace")


def kill_once(out: Path, arguments: list[str], log: Path, rng: random.Random,
              in_save: bool) -> dict:
    """Start two ranks, kill them at a random moment; return what happened."""
    before, target = newest_whole(out), None
    log.unlink(missing_ok=True)
    processes = rank_helpers.start(2, arguments, log)
    wanted = before + rng.choice([0, 0, 1, 2, 3, 4])  # 0: as soon as it has begun
    delay = rng.random() * (0.03 if in_save else 0.3)
    old_remains = set(half_written(out))
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and all(p.is_alive() for p in processes):
        if in_save and set(half_written(out)) - old_remains:
            break
        if not in_save and began(log) and max(losses(out), default=0) >= wanted:
            break
        old_remains &= set(half_written(out))
        time.sleep(0.001 if in_save else 0.01)
    time.sleep(delay)
    ended = [p.exitcode for p in processes]
    kind = rng.choice(["all", "all", "rank 0", "rank 1"])
    if kind != "all":
        target = processes[int(kind[-1])]
        target.kill()
        time.sleep(rng.random())
    rank_helpers.kill(processes)
    text = log.read_text(errors="replace")
    resumed = re.search(r"resume at step ([\d,]+)", text)
    return {"killed": kind, "in_save": bool(half_written(out)),
            "resumed_from": int(resumed[1].replace(",", "")) if resumed else 0,
            "newest_whole_before": before, "ended_before_kill": [c for c in ended if c is not None]}


def sweep(options: argparse.Namespace, work: Path) -> dict:
    rng = random.Random(options.seed)
    out = work / "out"
    steps = 100_000
    run_file, config = work / "run.toml", work / "ds.json"
    run_file.write_text(RUN_FILE.format(out=out, work=work, steps=steps, save_every=SAVE_EVERY))
    zero = {"stage": options.stage}
    if options.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config.write_text(json.dumps({"zero_optimization": zero}))
    base = ["--config", str(run_file), "--deepspeed_config", str(config)]
    trials, seen = [], {}
    started = time.monotonic()
    for number in range(options.kills):
        if time.monotonic() - started > options.minutes * 60:
            break
        trial = kill_once(out, base, work / "log", rng, in_save=number % 5 < 2)
        trial["lost"] = trial["resumed_from"] != trial["newest_whole_before"]
        if trial["ended_before_kill"]:
            sys.exit(f"a rank ended by itself: {trial}\n{(work / 'log').read_text()[-3000:]}")
        for step, value in losses(out).items():
            seen.setdefault(step, set()).add(value)
        trials.append(trial)
        print(f"{number + 1:4d} {trial}", flush=True)
    last = max(seen, default=0)
    reference = ["--out_dir=" + str(work / "reference"), f"--train.stop_after={last}",
                 f"--train.save_every={last}"]
    rank_helpers.run(2, base + reference, work / "reference.log")
    expected = losses(work / "reference")
    differing = [step for step, values in seen.items() if values != {expected[step]}]
    return {"zero_stage": options.stage, "ranks": 2, "kills": len(trials),
            "killed_while_saving": sum(t["in_save"] for t in trials),
            "one_rank_only": sum(t["killed"] != "all" for t in trials),
            "not_resumed_from_newest_whole": sum(t["lost"] for t in trials),
            "steps_compared": len(seen), "differing_losses": len(differing),
            "minutes": round((time.monotonic() - started) / 60, 1), "trials": trials}


def together(before: dict, now: dict) -> dict:
    """Return two sweeps of one kind as one: counts and trials are added up."""
    assert before["zero_stage"] == now["zero_stage"] and before["ranks"] == now["ranks"]
    added = now.keys() - {"zero_stage", "ranks"}
    return {key: before[key] + now[key] if key in added else now[key] for key in now}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60, help="stop killing after this long")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/kill_sweep"))
    parser.add_argument("--out", type=Path, help="JSON file to write, or to add to")
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copy(tokenizer_path(), work / "spm.model")
    tokenizer = Tokenizer(work / "spm.model")
    make_corpus(work / "train", [tokenizer.encode(t) for t in random_documents(400)], tokenizer)
    result = sweep(options, work)
    print(json.dumps({k: v for k, v in result.items() if k != "trials"}, indent=1))
    if options.out:
        if options.out.exists():
            result = together(json.loads(options.out.read_text()), result)
        write_atomic(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
