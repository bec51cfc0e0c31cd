"""How many tokens a transplanted vocabulary needs, next to a random token embedding. CPU.

    python -m benchmarks.studies.vocabulary_tokens --texts DIR --work DIR            # the source
    python -m benchmarks.studies.vocabulary_tokens --texts DIR --work DIR --seed 0   # also 1, 2
    python -m benchmarks.studies.vocabulary_tokens --work DIR --out FILE.json

A small masked LM is trained with a unigram tokenizer on novels. A byte-level BPE made of other
novels then takes over, on those, at a constant learning rate. transferred: as `[init] from` does;
random: the token embedding and its biases are random; scratch: all is. The last command reads the
curves: after how many steps `transferred` has the losses that the others have later.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

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

SOURCE_STEPS, STEPS, EVERY, NOVELS = 1500, 200, 20, 10
AT = (60, 120, 200)  # steps of the others, whose losses `transferred` has to reach


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
    found, points = {}, study.starts()
    for start in ("transferred", "random"):
        vocabulary.starting_points = points[start]
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
        needed = {other: {f"{at} steps": [steps_to(one["transferred"], one[other][at // EVERY])
                                          for one in by_seed] for at in AT}
                  for other in ("random", "scratch")}
        write_atomic(options.out, json.dumps(
            {"torch": torch.__version__, "source_steps": SOURCE_STEPS,
             "tokens_per_step": study.SEQUENCES * study.LENGTH, "loss_every_steps": EVERY,
             "held_out_loss": by_seed, "steps_of_transferred_to_the_loss_of": needed},
            indent=1) + "\n")
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
