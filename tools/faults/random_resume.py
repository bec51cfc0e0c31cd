"""Runs of random settings, killed twice and resumed, against the same run unbroken.

    python tools/faults/random_resume.py --seed 1 --minutes 20

A case draws a model, an objective, a mixture, a schedule and a DeepSpeed JSON. The killed run must
end with the unbroken one's metrics and checkpoint, bit for bit; stopped and resumed with the other
number of ranks it must see the same rows, at losses within 5 % (dropout is drawn per rank). What
differs is printed with its settings, and its directory stays.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import rank_helpers  # noqa: E402
from data_helpers import make_corpus, random_documents, tiny_tokenizer  # noqa: E402
from launching import losses, make_run  # noqa: E402

from deberta_ds.checkpoint.find import list_finished  # noqa: E402
from deberta_ds.tracking.log import read_metrics  # noqa: E402

STEPS = 9
EXACT = ("loss", "generator_loss", "discriminator_loss", "grad_norm", "lr", "sequences_seen",
         "tokens_seen")
OF_ROWS = ("sequences_seen", "tokens_seen")
# (option, values it is drawn from, how often it is given at all)
OPTIONS = [
    ("objective.kind", ["mlm", "rtd"], 1), ("data.seed", [0, 1, 2], 1),
    ("train.seed", [0, 1, 2], 1), ("train.micro_batch_size", [1, 2], 1),
    ("train.global_batch_size", [4, 8, 12], 1), ("train.eval_every", [3, 4, 100], 1),
    ("train.save_every", [2, 3, 100], 1), ("train.keep", [1, 2, 10], 1),
    ("train.activation_checkpointing", ["none", "full", "selective"], "full"),
    ("train.save_in_background", ["true", "false"], 1), ("data.workers", [0, 0, 1], 1),
    ("data.attend_across_documents", ["true", "false"], 1),
    ("optim.name", ["adamw", "muon", "adam_uncorrected"], 1),
    ("optim.schedule", ["linear", "cosine", "wsd", "constant", "deberta_linear"], 1),
    ("optim.warmup_steps", [0, 3], 1), ("optim.clip_norm", [0, 0.1, 1], 1),
    ("objective.mask.max_ngram", [1, 3], 1), ("objective.mask.final_rate", [0.05, 0.3], 0.3),
    ("objective.mask.selection", ["uniform", "deberta_window"], 0.5),
    ("model.conv_kernel", [0, 3], 0.4), ("model.position_buckets", [0, 16], 0.4),
    ("model.position_terms", ['["c2p"]', '["p2c"]'], 0.3), ("model.key_bias", ["false"], 0.3),
    ("model.share_position_projections", ["false"], 0.3), ("model.relative_norm", ["false"], 0.3),
    ("model.attention", ["reference", "tiled"], 0.4),
]
OF_RTD = [("objective.embedding_sharing", ["gdes", "es", "nes"], 1),
          ("objective.final_temperature", [0.5, 2.0], 0.4)]
GROWTH = [("train.initial_batch_size", [4], 1), ("train.batch_warmup_steps", [3, 5], 1)]
OF_ZERO = [("overlap_comm", [True, False], 0.4), ("contiguous_gradients", [True, False], 0.4),
           ("reduce_bucket_size", [5_000, 100_000], 0.4)]
OF_STAGE_3 = [("stage3_param_persistence_threshold", [0, 1_000, 3_000], 1),
              ("sub_group_size", [3_000, 20_000], 0.4),
              ("stage3_prefetch_bucket_size", [0, 5_000, 100_000], 0.4),
              ("stage3_max_reuse_distance", [0, 5_000], 0.3),
              ("stage3_max_live_parameters", [3_000, 50_000], 0.3)]
PRECISIONS = [{}, {}, {"bf16": {"enabled": True}},
              {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}]


def draw(random: Random, table: list[tuple]) -> dict:
    return {name: random.choice(values) for name, values, share in table if random.random() < share}


def draw_case(random: Random, root: Path) -> list[str]:
    """Write a run of random settings under `root`; return the arguments of pretrain.py."""
    run_file = make_run(root, dropout=random.choice([0.0, 0.1]), steps=str(STEPS))
    tokenizer, sources = tiny_tokenizer(), []
    for number in range(random.randint(1, 3)):
        texts = random_documents(random.choice([20, 60, 200]), 50 + number)
        make_corpus(root / f"source{number}", [tokenizer.encode(text) for text in texts], tokenizer)
        sources.append(f'{{path = "{root}/source{number}", weight = {random.choice([0.3, 1, 5])}, '
                       f"first_row = {random.choice([0, 0, 17])}}}")
    options = {"data.sources": f"[{', '.join(sources)}]"} | draw(random, OPTIONS)
    options |= draw(random, OF_RTD) if options["objective.kind"] == "rtd" else {}
    options |= draw(random, GROWTH) if random.random() < 0.3 else {}
    stage = random.choice([0, 1, 2, 3, 3, 3])
    zero = {"stage": stage} | draw(random, OF_ZERO) | (draw(random, OF_STAGE_3) if stage == 3
                                                       else {})
    precision = random.choice(PRECISIONS if stage else PRECISIONS[:2])
    (root / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero} | precision))
    return ["--config", str(run_file), "--deepspeed_config", str(root / "deepspeed.json"),
            *(f"--{name}={value}" for name, value in options.items())]


def run_and_kill(random: Random, ranks: int, command: list[str], out: Path, log: Path) -> None:
    """Start a run and end it after some step, at once or by asking."""
    step, sign = random.randrange(1, STEPS), random.choice([signal.SIGKILL, signal.SIGTERM])
    processes = rank_helpers.start(ranks, command, log)
    while any(process.is_alive() for process in processes) and max(losses(out), default=0) < step:
        time.sleep(0.01)
    time.sleep(0.3 * random.random())
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, sign)
    rank_helpers.wait(processes, 100)


def lines(out: Path, keys: tuple[str, ...]) -> dict:
    return {(line["kind"], line["step"]): [line.get(key) for key in keys]
            for line in read_metrics(out / "metrics.jsonl") if line["kind"] in ("train", "eval")}


def state(out: Path) -> dict[str, bytes]:
    newest = list_finished(out)[-1]
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def try_case(seed: int, root: Path) -> list[str]:
    """Return what differs."""
    random = Random(seed)
    ranks, command = random.choice([1, 2]), draw_case(random, root)

    def run(name: str, ranks: int, *options: str) -> Path:
        rank_helpers.run(ranks, [*command, f"--out_dir={root / name}", *options],
                         root / f"{name}.log")
        return root / name

    whole = run("whole", ranks)
    for _ in range(2):
        run_and_kill(random, ranks, [*command, f"--out_dir={root / 'killed'}"], root / "killed",
                     root / "killed.log")
    killed = run("killed", ranks)
    run("moved", ranks, f"--train.stop_after={random.randrange(1, STEPS)}")
    moved = run("moved", 3 - ranks)
    found = []
    if lines(whole, EXACT) != lines(killed, EXACT):
        found.append("metrics of the killed run")
    if state(whole) != state(killed):
        found.append("last checkpoint of the killed run")
    if lines(whole, OF_ROWS) != lines(moved, OF_ROWS):
        found.append(f"rows of {3 - ranks} ranks")
    if any(abs(losses(moved)[step] / loss - 1) > 0.05 for step, loss in losses(whole).items()):
        found.append(f"losses of {3 - ranks} ranks")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10, help="no case begins later")
    parser.add_argument("--work", type=Path, default=Path("runs/random_resume"))
    options = parser.parse_args()
    end, bad, tried = time.monotonic() + 60 * options.minutes, 0, 0
    for seed in range(options.seed, options.seed + options.cases):
        if time.monotonic() > end:
            break
        root, tried = options.work.resolve() / str(seed), tried + 1
        shutil.rmtree(root, ignore_errors=True)
        try:
            found = try_case(seed, root)
        except AssertionError as error:  # a run that failed
            found = [str(error)[-600:]]
        if found:
            bad += 1
            print(f"{seed}: {'; '.join(found)} ({root})", flush=True)
        else:
            shutil.rmtree(root)
    print(f"{tried} cases, {bad} differ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
