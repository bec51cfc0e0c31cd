"""How many tokens a transplanted vocabulary needs, next to a random token embedding. CPU.

    python -m benchmarks.studies.vocabulary_tokens --texts NOVELS --work DIR          # the source
    python -m benchmarks.studies.vocabulary_tokens --texts NOVELS --work DIR --seed 0   # also 1, 2
    python -m benchmarks.studies.vocabulary_tokens --work DIR --out FILE.json

A small model is trained with a unigram tokenizer on novels. A byte-level BPE then takes over, at a
constant learning rate: one made of other novels, on those, or with `--others DIR` of the texts
there. transferred: as `[init] from` does; random: the token embedding and its biases are random;
scratch: all is. `--kind rtd` does the same with a generator and a discriminator (GDES). The last
command reads all curves: after how many tokens `transferred` has the losses that the others have
later.

The discriminators of all starts are scored on the same samples: those of the generator of
`transferred` before its first step.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from benchmarks.studies import vocabulary_transfer as study
from deberta_ds.base.files import write_atomic
from deberta_ds.config.run_config import InitConfig, RunConfig
from deberta_ds.corpus.documents import plan_units
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.objectives.build import build_model
from deberta_ds.release import vocabulary
from deberta_ds.release.initialize import initial_tensors
from deberta_ds.release.ours import release_of_state, write_ours
from deberta_ds.tokenizer import Tokenizer

SOURCE_STEPS, STEPS = {"mlm": 1500, "rtd": 700}, {"mlm": 200, "rtd": 120}
EVERY, NOVELS, HELD_OUT_SEQUENCES = 20, 10, 64
AT = (60, 120, 200)  # steps of the others, whose losses `transferred` has to reach
LOSSES = {"mlm": ("masked_loss",), "rtd": ("generator_loss", "discriminator_loss")}
RECIPE = TokenizerRecipe(vocab_size=study.PIECES, sample_bytes=1 << 22)
DELTA = "discriminator.words.weight"


def source(kind: str, texts: list[Path], work: Path) -> None:
    """Train the source."""
    units = plan_units(list(map(str, texts[:-study.HELD_OUT])), study.READ)
    unigram = train_tokenizer(units, work / "unigram.model", RECIPE, read=study.READ)
    run = study.corpora(work, "source", texts, unigram, kind)
    model, losses = study.train(run, {}, SOURCE_STEPS[kind], names=LOSSES[kind])
    print("source", kind, losses, flush=True)
    write_ours(release_of_state(model.state_dict(), run), work / kind)
    (work / kind / "spm.model").write_bytes(unigram.path.read_bytes())


def second_run(kind: str, others: list[Path], work: Path, seed: int) -> RunConfig:
    """Return the run of the tokenizer that takes over, made of these texts if it is not there."""
    name = others[0].parent.name
    path = work / f"{name}-tokenizer"
    if path.exists():
        run = study.run_of(work, name, Tokenizer(path), kind)
    else:
        units = plan_units(list(map(str, others[:-study.HELD_OUT])), study.READ)
        bpe = train_tokenizer(units, path, replace(RECIPE, kind="byte_bpe"), read=study.READ)
        run = study.corpora(work, name, others, bpe, kind)
    return replace(run, out_dir=str(work / f"out-{kind}-{name}-{seed}"),
                   train=replace(run.train, seed=seed),
                   optim=replace(run.optim, schedule="constant"))


def scorer(run: RunConfig, judge: dict[str, torch.Tensor]) -> Callable:
    """Return what scores a model, its discriminator on the samples of the generator of `judge`."""
    own_scores = study.scorer(run, HELD_OUT_SEQUENCES)

    def scores(model: torch.nn.Module) -> dict[str, float]:
        found, state = own_scores(model), model.state_dict()
        if DELTA in state:
            delta = state["words.weight"] + state[DELTA] - judge["words.weight"]
            judged = build_model(run, Tokenizer(run.data.tokenizer).size)
            judged.load_state_dict({name: value if name.startswith("discriminator.") else
                                    judge[name] for name, value in state.items()} | {DELTA: delta})
            found["discriminator_loss"] = own_scores(judged)["discriminator_loss"]
        return found

    return scores


def curves(run: RunConfig, source_directory: Path) -> dict[str, dict[str, list[float]]]:
    """Return {start: {loss: held-out values each EVERY steps with the second tokenizer}}."""
    found, points, starts, kind = {}, study.starts(), {"scratch": {}}, run.objective.kind
    for start in ("random", "transferred"):
        vocabulary.starting_points = points[start]
        starts[start], notes = initial_tensors(replace(run, init=InitConfig(
            source=str(source_directory))))
    print(notes[1], flush=True)
    scores = scorer(run, starts["transferred"])
    for start, tensors in starts.items():
        found[start] = study.train(run, tensors, STEPS[kind], EVERY, LOSSES[kind], scores)[1]
        print(run.train.seed, start, found[start], flush=True)
    return found


def steps_to(losses: list[float], wanted: float) -> float | None:
    """Return after how many steps a curve first is at `wanted`, None if never."""
    for number, loss in enumerate(losses):
        if loss <= wanted:
            before = losses[number - 1] if number else loss
            part = (before - wanted) / (before - loss) if before > loss else 0.0
            return round(EVERY * (max(0, number - 1) + part), 1)
    return None


def with_interval(values: list[float]) -> list[float]:
    """Return the mean over the seeds and half its 95 % interval (Student's t)."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return [round(float(np.mean(values)), 4), round(float(half), 4)]


def summary(by_seed: list[dict]) -> dict:
    """Return the curves of one case, and what they say of the tokens that are saved."""
    found: dict[str, object] = {"held_out": by_seed}
    for loss, curve in by_seed[0]["random"].items():
        at = [step for step in AT if step // EVERY < len(curve)]
        found[loss] = {
            "mean_and_half_interval": {start: {f"{step} steps": with_interval(
                [one[start][loss][step // EVERY] for one in by_seed]) for step in (0, *at)}
                for start in by_seed[0]},
            "steps_of_transferred_to_the_loss_of": {other: {f"{step} steps": [steps_to(
                one["transferred"][loss], one[other][loss][step // EVERY]) for one in by_seed]
                for step in at} for other in ("random", "scratch")}}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--others", type=Path)
    parser.add_argument("--kind", choices=LOSSES, default="mlm")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out")
    options = parser.parse_args()
    work, kind = options.work, options.kind
    if options.out:
        cases: dict[str, list] = {}
        for path in sorted(work.glob("curves-*.json")):
            cases.setdefault(path.stem.split("-", 1)[1].rsplit("-", 1)[0], []).append(
                json.loads(path.read_text()))
        write_atomic(options.out, json.dumps(
            {"torch": torch.__version__, "source_steps": SOURCE_STEPS,
             "tokens_per_step": study.SEQUENCES * study.LENGTH, "scored_every_steps": EVERY,
             "cases": {name: summary(by_seed) for name, by_seed in cases.items()}},
            indent=1) + "\n")
        return
    novels = sorted(options.texts.glob("*.txt"))
    others = sorted(options.others.glob("*.*")) if options.others else novels[NOVELS:2 * NOVELS]
    if options.seed is None:
        source(kind, novels[:NOVELS], work)
        return
    run = second_run(kind, others, work, options.seed)
    write_atomic(work / f"curves-{kind}-{others[0].parent.name}-{options.seed}.json",
                 json.dumps(curves(run, work / kind)))


if __name__ == "__main__":
    main()
