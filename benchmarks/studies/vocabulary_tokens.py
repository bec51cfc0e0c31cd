"""How many tokens a transplanted vocabulary needs, next to a random token embedding. CPU.

    python -m benchmarks.studies.vocabulary_tokens --texts DIR_OF_TXT --work DIR --seed 0
    python -m benchmarks.studies.vocabulary_tokens --work DIR --out FILE.json

A small masked LM is trained with a unigram tokenizer on the first novels. A byte-level BPE made of
other novels then takes over, on those: transferred (as `[init] from` does), random (layers kept,
token embedding random) and from scratch. The learning rate is constant, so that a curve does not
depend on where it ends. The second command reads the curves of all seeds: by which share of the
tokens a start reaches the held-out loss that random rows have at several points.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.studies.vocabulary_transfer import (
    LENGTH,
    PIECES,
    READ,
    SEQUENCES,
    corpora,
    starts,
    train,
)
from deberta_ds.base.files import write_atomic
from deberta_ds.config.run_config import InitConfig, RunConfig
from deberta_ds.corpus.documents import plan_units
from deberta_ds.corpus.train_tokenizer import train_fast, train_tokenizer
from deberta_ds.release import vocabulary
from deberta_ds.release.initialize import initial_tensors
from deberta_ds.release.ours import release_of_state, write_ours

STEPS, MORE_STEPS, EVERY = 400, 400, 20
AT = (100, 200, 400)  # steps of random rows whose loss the others have to reach
T_OF_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by number of seeds


def curves(texts: list[Path], work: Path, seed: int) -> dict[str, list[float]]:
    """Return {start: held-out loss each EVERY steps with the second tokenizer}."""
    recipe = {"pieces": PIECES, "sample_bytes": 1 << 22, "read": READ}

    def of_seed(run: RunConfig) -> RunConfig:
        return replace(run, train=replace(run.train, seed=seed),
                       optim=replace(run.optim, schedule="constant"))

    first, others = texts[:12], texts[12:24]
    units, other_units = (plan_units(list(map(str, files[:-2])), READ) for files in (first, others))
    unigram = train_tokenizer(units, work / "unigram.model", **recipe)
    byte_bpe = train_fast(other_units, work / "byte_bpe-tokenizer", kind="byte_bpe", **recipe)
    run = of_seed(corpora(work, "unigram", first, unigram))
    model, losses = train(run, {}, STEPS)
    found = {"source": losses}
    write_ours(release_of_state(model.state_dict(), run), work / "source")
    (work / "source/spm.model").write_bytes(unigram.path.read_bytes())
    run = of_seed(corpora(work, "byte_bpe", others, byte_bpe))
    for start, points in starts().items():
        if start == "shared":
            continue
        vocabulary.starting_points = points
        tensors, _ = initial_tensors(replace(run, init=InitConfig(source=str(work / "source"))))
        found[start] = train(run, tensors, MORE_STEPS, EVERY)[1]
        print(seed, start, found[start], flush=True)
    found["scratch"] = train(run, {}, MORE_STEPS, EVERY)[1]
    print(seed, "scratch", found["scratch"], flush=True)
    return found


def steps_to(losses: list[float], wanted: float) -> float | None:
    """Return after how many steps a curve first is at `wanted`, None if never."""
    for number, loss in enumerate(losses):
        if loss <= wanted:
            before = losses[number - 1] if number else loss
            part = (before - wanted) / (before - loss) if before > loss else 0.0
            return EVERY * (max(0, number - 1) + part)
    return None


def summary(by_seed: list[dict[str, list[float]]]) -> dict:
    """Return for each point of random rows the share of its steps that the transferred start took,
    by seed, with mean and 95 % interval (on the logarithm, Student's t).
    """
    shares: dict = {}
    for at in AT:
        ratios = []
        for one in by_seed:
            took = steps_to(one["transferred"], one["random"][at // EVERY])
            if took is None:
                raise SystemExit(f"transferred has not reached the loss of random rows at {at}")
            ratios.append(max(took, 1.0) / at)
        logs = np.log(ratios)
        half = T_OF_95[len(ratios)] * statistics.stdev(logs) / len(ratios) ** 0.5
        shares[f"{at} steps"] = {
            "share_of_tokens": [round(one, 3) for one in ratios],
            "mean": round(float(np.exp(logs.mean())), 3),
            "interval": [round(float(np.exp(logs.mean() + sign * half)), 3) for sign in (-1, 1)]}
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.seed is not None:
        # Other novels for each seed: the interval is over texts, too.
        texts = sorted(options.texts.glob("*.txt"))
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(options.seed))
        work = options.work / f"{options.seed}"
        found = curves([texts[number] for number in order[:24]], work, options.seed)
        write_atomic(work / "curves.json", json.dumps(found))
        return
    by_seed = [json.loads(path.read_text()) for path in
               sorted(options.work.glob("*/curves.json"))]
    write_atomic(options.out, json.dumps(
        {"torch": torch.__version__, "source_steps": STEPS, "tokens_per_step": SEQUENCES * LENGTH,
         "loss_every_steps": EVERY, "held_out_loss": by_seed, "transferred": summary(by_seed)},
        indent=1) + "\n")


if __name__ == "__main__":
    main()
