"""Does the joint loss learn as well as the official two optimizers in turn? Plain PyTorch, CPU.

    python -m benchmarks.studies.decoupled_training --config launch/runs/demo.toml \
        [--section.key=value ...]

joint: L_G + lambda L_D, one backward, one global norm, one AdamW step.
two_norms: as joint, but each network's gradient is clipped by its own norm (as pretrain.py does).
decoupled: the generator's step first, with its own norm; then the discriminator's, on the table
that this step has just changed (microsoft/DeBERTa rtd_task.py, decoupled_training=True).
Same initial weights, rows, masks and dropout seeds for both. Prints held-out scores, seed by seed.
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F

from deberta_ds.base.files import write_atomic
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import Stretch
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset, eval_sequences
from deberta_ds.engine.optim import build_optimizer, learning_rate
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives.build import build_model, objective_of
from deberta_ds.objectives.rtd import replace_targets
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.held_out import evaluate
from deberta_ds.training.step import seed_step

MODES = ("joint", "two_norms", "decoupled")
SCORES = ("generator_loss", "generator_accuracy", "discriminator_loss", "discriminator_gain",
          "roc_auc", "average_precision")


def train(run: run_config.RunConfig, mode: str, seed: int) -> dict[str, float]:
    """Return the held-out scores after training `run` from `seed`."""
    tokenizer = Tokenizer(run.data.tokenizer)
    data, rows = run.data, run.train.global_batch_size
    dataset = RowDataset(data.sources[:1], tokenizer, seq_len=data.seq_len, seed=seed,
                         mask=run.objective.mask)
    held_out = eval_sequences(data.heldout, tokenizer, seq_len=data.seq_len,
                              mask=run.objective.mask, eval_seed=1,
                              num_rows=run.train.eval_sequences)
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, seed)
    optimizer = build_optimizer(model, run.optim)
    detector = list(model.discriminator.parameters())
    generator = [model.words.weight, *model.generator.parameters()]
    loader = build_loader(dataset, stretches=[Stretch(0, rows, run.train.steps)],
                          micro_batch_size=rows, rank=0, world_size=1, num_workers=0)
    for step, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, run.train.steps)
        with seed_step(batch.rows.device, seed, step, 0, 0):
            normalizers = {"targets": batch.num_targets, "tokens": batch.num_tokens}
            if mode != "decoupled":
                model(batch, normalizers)[0].backward()
                nets = [[*generator, *detector]] if mode == "joint" else [generator, detector]
                _update(optimizer, nets, run.optim.clip_norm)
                continue
            generator_sum, _, ids_BL = replace_targets(
                model.words, model.generator, batch, seed=model.sampling_seed,
                temperature=run.objective.temperature, valid_vocab=model.valid_vocab)
            (generator_sum / normalizers["targets"]).backward()
            _update(optimizer, [generator], run.optim.clip_norm)
            original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
            logits_BL = model.discriminator(model.words, ids_BL, batch)
            losses_BL = F.binary_cross_entropy_with_logits(
                logits_BL, (ids_BL != original_BL).float(), reduction="none")
            loss = (losses_BL * (batch.segments > 0)).sum() / normalizers["tokens"]
            (run.objective.rtd_weight * loss).backward()
            _update(optimizer, [detector], run.optim.clip_norm)
    return evaluate(model, objective_of(run), torch.device("cpu"), {data.heldout: held_out}, rows)


def _update(optimizer, nets: list[list], clip_norm: float) -> None:
    """Clip each list to `clip_norm`; step on what has a gradient: an optimizer skips the others."""
    for parameters in nets:
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="benchmarks/results/decoupled_training.json")
    options, overrides = parser.parse_known_args()
    run, _ = run_config.load(options.config, overrides)
    jobs = [(mode, seed) for seed in range(options.seeds) for mode in options.modes]
    with ProcessPoolExecutor(options.workers) as pool:
        scores = pool.map(train, [run] * len(jobs), *zip(*jobs, strict=True))
        rows = [{"mode": mode, "seed": seed} | {name: round(found[name], 5) for name in SCORES}
                for (mode, seed), found in zip(jobs, scores, strict=True)]
    for row in rows:
        print(json.dumps(row))
    for name in SCORES:
        columns = []
        for mode in options.modes:
            values = [row[name] for row in rows if row["mode"] == mode]
            mean = statistics.mean(values)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            columns.append(f"{mode} {mean:.4f} +- {spread:.4f}")
        print(f"{name:22s} {'   '.join(columns)}")
    record = {"overrides": overrides, "torch": torch.__version__, "runs": rows}
    write_atomic(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
