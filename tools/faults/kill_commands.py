"""Commands killed with kill -9 at random moments and given again, next to undisturbed ones.

    python tools/faults/kill_commands.py --kind upload --kills 20 --seed 1 --work DIR

upload    pretraining that saves after each step, with train.upload at an S3 server (moto)
evals     pretraining that evaluates and saves in the background after each step
finetune  launch/finetune.py inside an epoch; in turn a save after each update, or by the settings
ranks     torchrun with two ranks: one rank is killed, or the launcher alone

A moment is drawn uniformly over the life of the undisturbed command. A chain of up to four kills
ends undisturbed, and what it leaves is compared to the bit. After each kill everything that is
called whole, here and at the URL, is verified; every fourth time a run resumes from the URL. The
stages of a corpus are killed by data_faults.py. Prints a line per kill and the counts.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import psutil  # noqa: E402
import pytest  # noqa: E402
import rank_helpers  # noqa: E402
from data_helpers import tokenizer_path  # noqa: E402
from kill_sweep import began, half_written, newest_whole  # noqa: E402
from launching import ENVIRONMENT, ROOT, make_run  # noqa: E402
from random_resume import EXACT, lines, state  # noqa: E402
from s3_server import s3_bucket  # noqa: E402

from deberta_ds.checkpoint.find import (  # noqa: E402
    list_finished,
    local_copy,
    problems_of,
    step_of,
)
from deberta_ds.files.remote import file_system  # noqa: E402

KINDS = ("upload", "evals", "finetune", "ranks")
URL, CHAIN, STEPS = "s3://shop/run", 4, 16
WORKER = ROOT / "tests/workers/finetune_killed.py"


def command(kind: str, work: Path, out: Path, number: int) -> tuple[Path, list[str]]:
    """Return (script, arguments) of a command that writes to `out`."""
    if kind == "finetune":
        return WORKER, ["-1", ("each", "evals")[number % 2], "-1", "--model", "random:tiny",
                        "--tokenizer", tokenizer_path(), "--data",
                        str(ROOT / "tests/fixtures/superglue"), "--any_size", "--out", str(out),
                        "--task", "CB", "--all.epochs=4", "--all.evals_per_epoch=2",
                        "--all.global_batch_size=6", "--all.micro_batch_size=3",
                        "--all.train_rows=48", "--all.learning_rate=4e-3"]
    more = {"upload": [f"--train.upload={URL}", "--train.keep_every=[5]"], "ranks": [],
            "evals": ["--train.eval_every=1", "--train.best_metric=discriminator_loss"]}[kind]
    return rank_helpers.PRETRAIN, [
        "--config", str(work / "run.toml"), "--deepspeed_config",
        str(ROOT / "ds_configs/zero1_fp32.json"), f"--out_dir={out}", *more]


def live(kind: str, script: Path, words: list[str], log: Path, after: float | None,
         rng: random.Random) -> tuple[str, float]:
    """Run a command; return (what was killed `after` seconds, seconds until all had ended).

    "" was killed if it ended before, or without `after`.
    """
    log.write_text("")
    if kind != "ranks":
        (process,) = rank_helpers.start(1, words, log, script)
        process.join(after)
        killed = process.is_alive()
        rank_helpers.kill([process])
        assert killed or process.exitcode == 0, log.read_text()[-3000:]
        return "the process" if killed else "", 0.0
    with open(log, "w") as file:
        launcher = psutil.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                                 "--nproc_per_node=2", str(script), *words], cwd=ROOT,
                                env=ENVIRONMENT, stdout=file, stderr=file)
    try:
        assert launcher.wait(after) == 0, log.read_text()[-3000:]
        return "", 0.0
    except psutil.TimeoutExpired:
        pass
    family, ranks = launcher.children(recursive=True), launcher.children()
    victim = rng.choice([launcher, rng.choice(ranks)]) if ranks else launcher
    victim.kill()
    begin = time.monotonic()
    _, alive = psutil.wait_procs([launcher], timeout=120)
    while left := [one for one in family if one.is_running()
                   and one.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > begin + 120:
            alive += left
            break
        time.sleep(0.1)
    for one in alive:
        one.kill()
    assert not alive, f"orphans after 120 s: {alive}"
    return "the launcher" if victim == launcher else "a rank", time.monotonic() - begin


def result(kind: str, out: Path) -> tuple:
    """Return all that a run leaves which is a matter of its settings."""
    if kind != "finetune":
        return lines(out, EXACT), state(out), os.readlink(out / "best") if kind == "evals" else ""
    run = out / "CB/seed-1"
    files = {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*")
             if path.is_file() and path.name != "result.json"}
    return json.loads((run / "result.json").read_text()) | {"seconds": 0}, files


def steps_at_url() -> dict[int, set[str]]:
    """Return {step: places of its files} of what the URL has."""
    system, root = file_system(URL)
    system.invalidate_cache()
    found: dict[int, set[str]] = {}
    with suppress(FileNotFoundError):
        for place in system.find(root):
            if match := re.search(r"/step-(\d+)/", place):
                found.setdefault(int(match[1]), set()).add(place)
    return found


def complete_at_url() -> list[int]:
    return [step for step, places in steps_at_url().items()
            if any(place.endswith("/manifest.json") for place in places)]


def check_url(whole: Path, work: Path, resume_from: random.Random | None) -> str:
    """Verify what the URL calls whole; return "uploading" if something there is half uploaded."""
    found, complete = steps_at_url(), complete_at_url()
    for step in complete:
        with tempfile.TemporaryDirectory() as directory:
            here = Path(directory) / f"step-{step:08d}"
            here.mkdir()
            for place in found[step]:
                data = file_system(URL)[0].cat_file(place)
                (here / place.rpartition("/")[2]).write_bytes(data)
            assert not problems_of(here), (step, problems_of(here))
    if complete:
        assert step_of(local_copy(URL)) == max(complete)
    if resume_from and (early := [step for step in complete if step < STEPS]):
        step, out = resume_from.choice(early), work / "from_url"
        shutil.rmtree(out, ignore_errors=True)
        script, words = command("evals", work, out, 0)
        live("evals", script, [*words[:5], "--resume", f"{URL}/checkpoints/step-{step:08d}"],
             work / "from_url.log", None, resume_from)
        wanted = {key: value for key, value in lines(whole, EXACT).items() if key[1] > step}
        assert lines(out, EXACT) == wanted and state(out) == state(whole), f"resumed from {step}"
        print(f"resumed from {URL}, step {step}: the same", flush=True)
    return "uploading" if len(complete) < len(found) else ""


def checkpoints_of(kind: str, out: Path) -> Path:
    return out / "CB/seed-1/resume" if kind == "finetune" else out


def doing(kind: str, out: Path, log: Path) -> str:
    """Return what a command was at when it was killed."""
    if half_written(checkpoints_of(kind, out)):
        return "saving"
    if kind == "finetune":
        return "training" if list_finished(checkpoints_of(kind, out)) else "before the first save"
    if not began(log) or not (out / "metrics.jsonl").exists():
        return "starting"
    seen = lines(out, ("loss",))
    last = max((step for name, step in seen if name == "train"), default=0)
    return "evaluating" if kind == "evals" and last and ("eval", last) not in seen else "training"


def sweep(options: argparse.Namespace, work: Path) -> Counter:
    kind, rng, counts, log = options.kind, random.Random(options.seed), Counter(), work / "log"
    make_run(work, two_layers=True, steps=str(STEPS), save_every="1", keep="2", eval_every="8",
             warmup_steps="0", eval_sequences="16", activation_checkpointing='"none"')
    whole, out, number, chain, before = work / "whole", work / "killed", 0, 0, 0
    for _ in range(2):  # the first also imports
        shutil.rmtree(whole, ignore_errors=True)
        begin = time.monotonic()
        live(kind, *command(kind, work, whole, 1), log, None, rng)
        seconds = time.monotonic() - begin
    wanted = result(kind, whole)
    at_url = sorted(steps_at_url()) if kind == "upload" else []
    end = time.monotonic() + 60 * options.minutes
    while (more := counts["kills"] < options.kills and time.monotonic() < end) or chain:
        after = rng.uniform(0, seconds) if chain < CHAIN and more else None
        killed, gone = live(kind, *command(kind, work, out, number), log, after, rng)
        resumed = re.search(r"(?:resume at|goes on after) step ([\d,]+)", log.read_text())
        if int(resumed[1].replace(",", "")) != before if resumed else before and not killed:
            counts["lost"] += 1
            shutil.copy(log, work / f"lost-{number}-{chain}.log")
        run = checkpoints_of(kind, out)
        assert not [path for path in list_finished(run)[-1:] if problems_of(path)]
        before, chain = newest_whole(run), chain + 1 if killed else 0
        if killed:
            counts["kills"] += 1
            moment = doing(kind, out, log)
            if kind == "upload":
                uploading = check_url(whole, work, rng if counts["kills"] % 4 == 0 else None)
                counts["uploading"] += bool(uploading)
                moment += f", {uploading}" if uploading else ""
            for name in (killed, moment.split(",")[0]):
                counts[name] += 1
            counts["most seconds until all ended"] = max(
                counts["most seconds until all ended"], round(gone))
            print(f"{counts['kills']:3d} {killed} {after:.2f} s of {seconds:.2f}, {moment}, newest "
                  f"whole {before}, {gone:.1f} s", flush=True)
            continue
        is_wrong = result(kind, out) != wanted
        counts.update(compared=1, wrong=is_wrong)
        print(f"compared: {'WRONG' if is_wrong else 'the same'}", flush=True)
        if is_wrong:
            shutil.copytree(out, work / f"wrong-{number}")
        if kind == "upload":
            assert sorted(steps_at_url()) == sorted(complete_at_url()) == at_url, steps_at_url()
            system, root = file_system(URL)
            system.rm(root, recursive=True)
        shutil.rmtree(out)
        number, before = number + 1, 0
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60, help="no kill after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/kill_commands"))
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with pytest.MonkeyPatch.context() as patch, (
            s3_bucket(patch) if options.kind == "upload" else nullcontext()):
        patch.setenv("HOME", str(work))  # the cache of what a URL has
        counts = sweep(options, work)
    print(json.dumps({"kind": options.kind} | counts, indent=1))


if __name__ == "__main__":
    main()
