"""How many tokens a transplanted vocabulary needs, next to a random token embedding. CPU.

    python -m benchmarks.studies.vocabulary_tokens --texts DIR --work DIR            # the source
    python -m benchmarks.studies.vocabulary_tokens --texts DIR --work DIR --seed 0   # also 1, 2
    python -m benchmarks.studies.vocabulary_tokens --work DIR --out FILE.json

Not run yet. A small masked LM is trained with a unigram tokenizer on novels. A byte-level BPE made of other
novels then takes over, on those, at a constant learning rate. transferred: as `[init] from` does;
mean: without biases that follow frequencies; random: token embedding random, biases follow
frequencies; plain_random: biases random, too; scratch. The last command reads the curves: by which
share of the tokens a start reaches the loss that `random` and `plain_random` have.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.studies import vocabulary_transfer as study
from deberta_ds.base.files import write_atomic
from deberta_ds.config.run_config import InitConfig, RunConfig
from deberta_ds.corpus.documents import plan_units
from deberta_ds.corpus.train_tokenizer import train_fast, train_tokenizer
from deberta_ds.release import vocabulary
from deberta_ds.release.initialize import initial_tensors
from deberta_ds.release.ours import release_of_state, write_ours
from deberta_ds.tokenizer import Tokenizer

SOURCE_STEPS, STEPS, EVERY, NOVELS = 500, 100, 10, 10
AT = (30, 60, 100)  # steps of random rows whose loss the others have to reach
STARTS = {"transferred": ("transferred", True), "mean": ("transferred", False),
          "random": ("random", True), "plain_random": ("random", False)}
T_OF_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by number of seeds


def source(texts: list[Path], others: list[Path], work: Path) -> None:
    """Train the source, and the tokenizer that takes over."""
    recipe = {"pieces": study.PIECES, "sample_bytes": 1 << 22, "read": study.READ}
    units, other_units = (plan_units(list(map(str, files[:-2])), study.READ)
                          for files in (texts, others))
    unigram = train_tokenizer(units, work / "unigram.model", **recipe)
    bpe = train_fast(other_units, work / "byte_bpe-tokenizer", kind="byte_bpe", **recipe)
    study.corpora(work, "byte_bpe", others, bpe)
    run = study.corpora(work, "unigram", texts, unigram)
    model, losses = study.train(run, {}, SOURCE_STEPS)
    print("source", losses, flush=True)
    write_ours(release_of_state(model.state_dict(), run), work / "source")
    (work / "source/spm.model").write_bytes(unigram.path.read_bytes())


def curves(run: RunConfig, source_directory: Path) -> dict[str, list[float]]:
    """Return {start: held-out loss each EVERY steps with the second tokenizer}."""
    found, follow, points = {}, vocabulary._follow_frequencies, study.starts()
    for start, (kind, follows) in STARTS.items():
        vocabulary.starting_points = points[kind]
        vocabulary._follow_frequencies = follow if follows else lambda *_: None
        tensors, notes = initial_tensors(replace(run, init=InitConfig(
            source=str(source_directory))))
        found[start] = study.train(run, tensors, STEPS, EVERY)[1]
        print(run.train.seed, start, found[start], notes[1], flush=True)
    found["scratch"] = study.train(run, {}, STEPS, EVERY)[1]
    print(run.train.seed, "scratch", found["scratch"], flush=True)
    return found


def steps_to(losses: list[float], wanted: float) -> float | None:
    """Return after how many steps a curve first is at `wanted`, None if never."""
    for number, loss in enumerate(losses):
        if loss <= wanted:
            before = losses[number - 1] if number else loss
            part = (before - wanted) / (before - loss) if before > loss else 0.0
            return EVERY * (max(0, number - 1) + part)
    return None


def share_of_tokens(by_seed: list[dict[str, list[float]]], start: str, other: str, at: int) -> dict:
    """Return the share of `at` steps of `other` after which `start` has its loss, by seed, with
    mean and 95 % interval (on the logarithm, Student's t); None where it never has.
    """
    took = [steps_to(one[start], one[other][at // EVERY]) for one in by_seed]
    ratios = [max(steps, 1.0) / at for steps in took if steps is not None]
    if len(ratios) < len(took):
        return {"by_seed": [None if steps is None else round(steps / at, 3) for steps in took]}
    logs = np.log(ratios)
    half = T_OF_95[len(logs)] * statistics.stdev(logs) / len(logs) ** 0.5
    return {"by_seed": [round(one, 3) for one in ratios],
            "mean": round(float(np.exp(logs.mean())), 3),
            "interval": [round(float(np.exp(logs.mean() + sign * half)), 3) for sign in (-1, 1)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out")
    options = parser.parse_args()
    work = options.work
    if options.out:
        by_seed = [json.loads(path.read_text()) for path in sorted(work.glob("curves-*.json"))]
        shares = {start: {other: {f"{at} steps": share_of_tokens(by_seed, start, other, at)
                                  for at in AT} for other in ("random", "plain_random")}
                  for start in ("transferred", "mean")}
        write_atomic(options.out, json.dumps(
            {"torch": torch.__version__, "source_steps": SOURCE_STEPS,
             "tokens_per_step": study.SEQUENCES * study.LENGTH, "loss_every_steps": EVERY,
             "held_out_loss": by_seed, "share_of_tokens": shares}, indent=1) + "\n")
        return
    texts = sorted(options.texts.glob("*.txt"))
    texts, others = texts[:NOVELS], texts[NOVELS:2 * NOVELS]
    if options.seed is None:
        source(texts, others, work)
        return
    run = study.run_of(work, "byte_bpe", Tokenizer(work / "byte_bpe-tokenizer"))
    run = replace(run, out_dir=str(work / f"out-{options.seed}"),
                  train=replace(run.train, seed=options.seed),
                  optim=replace(run.optim, schedule="constant"))
    write_atomic(work / f"curves-{options.seed}.json", json.dumps(curves(run, work / "source")))


if __name__ == "__main__":
    main()
