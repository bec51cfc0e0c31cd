"""What a model keeps when its tokenizer changes: held-out losses of starts by `[init] from`. CPU.

    python -m benchmarks.studies.vocabulary_transfer --texts DIR_OF_TXT --work DIR --out FILE.json

A small masked LM is trained with a unigram tokenizer, then goes on with the same one and more
subwords, with byte-level BPE, and with WordPiece. transferred: as vocabulary.py does; shared: what
both have keeps its vector, all else is random; random: all of the table is. Each is scored at once
and after some more steps. Losses compare within one tokenizer, not between two.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from deberta_ds.base.files import write_atomic
from deberta_ds.config.batch_schedule import Stretch
from deberta_ds.config.model import padded_rows
from deberta_ds.config.run_config import InitConfig, RunConfig, from_dict
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.extend_tokenizer import extend_tokenizer
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.tokenize import CleanOptions, tokenize_corpus
from deberta_ds.corpus.train_tokenizer import sample_texts, train_tokenizer
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset, eval_sequences
from deberta_ds.engine.optim import build_optimizer, learning_rate
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives.build import build_model, objective_of
from deberta_ds.release import vocabulary
from deberta_ds.release.initialize import initial_tensors
from deberta_ds.release.ours import release_of_state, write_ours
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.held_out import evaluate

LENGTH, SEQUENCES, PIECES, LEARNED, HELD_OUT = 128, 16, 4000, 500, 2
READ = ReadOptions()


def corpora(work: Path, name: str, texts: list[Path], tokenizer: Tokenizer, kind: str = "mlm"
            ) -> RunConfig:
    """Return a run of `tokenizer` on the texts, of which the last are held out."""
    for part, inputs in (("train", texts[:-HELD_OUT]), ("heldout", texts[-HELD_OUT:])):
        out = work / name / part
        tokenize_corpus(plan_units(list(map(str, inputs)), READ), out, tokenizer, read=READ,
                        clean=CleanOptions(), workers=1)
        pack_corpus(out, tokenizer, LENGTH)
    return run_of(work, name, tokenizer, kind)


def run_of(work: Path, name: str, tokenizer: Tokenizer, kind: str = "mlm") -> RunConfig:
    """Return a run of `tokenizer` on corpora that are there."""
    model = {"vocab_size": padded_rows(tokenizer.size), "hidden_size": 128, "num_layers": 4,
             "num_heads": 4, "intermediate_size": 512, "max_position": LENGTH,
             "position_buckets": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return from_dict({
        "name": name, "out_dir": str(work / name), "model": model, "objective": {"kind": kind},
        "data": {"sources": [{"path": str(work / name / "train")}], "seq_len": LENGTH,
                 "heldout": str(work / name / "heldout"), "tokenizer": str(tokenizer.path)},
        "optim": {"learning_rate": 1e-3, "warmup_steps": 10},
        "train": {"steps": 1, "global_batch_size": SEQUENCES, "micro_batch_size": SEQUENCES}})


def scorer(run: RunConfig, num_rows: int = 128) -> Callable[[torch.nn.Module], dict[str, float]]:
    """Return what gives a model's scores on fixed sequences of the run's held-out corpus."""
    rows = eval_sequences(run.data.heldout, Tokenizer(run.data.tokenizer), seq_len=LENGTH,
                          mask=run.objective.mask, eval_seed=1, num_rows=num_rows)
    return lambda model: evaluate(model, objective_of(run), torch.device("cpu"),
                                  {"heldout": rows}, SEQUENCES)


def train(run: RunConfig, tensors: dict[str, torch.Tensor], steps: int, every: int = 10**9,
          names: tuple[str, ...] = ("masked_loss",), scores: Callable | None = None
          ) -> tuple[torch.nn.Module, dict[str, list[float]]]:
    """Return the model after `steps` steps from `tensors`, and its held-out scores of these names
    before, each `every` steps and after.
    """
    tokenizer, scores = Tokenizer(run.data.tokenizer), scores or scorer(run)
    dataset = RowDataset(run.data.sources, tokenizer, seq_len=LENGTH, seed=run.train.seed,
                         mask=run.objective.mask)
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, seed=run.train.seed)
    model.load_state_dict(tensors, strict=False)
    optimizer = build_optimizer(model, run.optim)
    loader = build_loader(dataset, stretches=[Stretch(0, SEQUENCES, steps)], rank=0, world_size=1,
                          micro_batch_size=SEQUENCES, num_workers=0)
    points = [scores(model)]
    for step, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, steps)
        model.train()
        model(batch, {"targets": batch.num_targets, "tokens": batch.num_tokens})[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == steps:
            points.append(scores(model))
    return model, {name: [round(point[name], 4) for point in points] for name in names}


def starts() -> dict[str, Callable]:
    """Return {name: starting points of the tokens} of what is compared."""
    transferred = vocabulary.starting_points

    def shared(own: Tokenizer, theirs: Tokenizer):
        parts, kinds = transferred(own, theirs)
        return [one if kind == 0 else [] for one, kind in zip(parts, kinds, strict=True)], np.where(
            kinds == 0, 0, 2)

    def at_random(own: Tokenizer, theirs: Tokenizer):
        return [[]] * own.size, np.full(own.size, 2)

    return {"transferred": transferred, "shared": shared, "random": at_random}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--more_steps", type=int, default=50)
    options = parser.parse_args()
    texts, work = sorted(options.texts.glob("*.txt"))[:12], options.work
    units = plan_units(list(map(str, texts[:-HELD_OUT])), READ)
    recipe = TokenizerRecipe(vocab_size=PIECES, sample_bytes=1 << 22)
    base = train_tokenizer(units, work / "unigram.model", recipe, read=READ)
    run = corpora(work, "unigram", texts, base)
    model, losses = train(run, {}, options.steps)
    print("unigram", losses, flush=True)
    write_ours(release_of_state(model.state_dict(), run), work / "source")
    (work / "source/spm.model").write_bytes(base.path.read_bytes())
    others = {"grown": extend_tokenizer(base.path, work / "grown-tokenizer", [], LEARNED,
                                        sample_texts(units, 1 << 22, READ))[0]}
    others |= {kind: train_tokenizer(units, work / f"{kind}-tokenizer", replace(recipe, kind=kind),
                                     read=READ) for kind in ("byte_bpe", "wordpiece")}
    found, compared = {"unigram": {"base": losses["masked_loss"]}}, starts()
    for name, tokenizer in others.items():
        run, found[name] = corpora(work, name, texts, tokenizer), {}
        for start, points in compared.items():
            vocabulary.starting_points = points
            tensors, notes = initial_tensors(replace(run, init=InitConfig(
                source=str(work / "source"))))
            found[name][start] = train(run, tensors, options.more_steps)[1]["masked_loss"]
            print(name, start, found[name][start], notes[1], flush=True)
    write_atomic(options.out, json.dumps({"torch": torch.__version__, "steps": options.steps,
                                          "more_steps": options.more_steps,
                                          "held_out_loss": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
