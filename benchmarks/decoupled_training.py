"""Does the joint loss learn as well as the official two optimizers in turn? Plain PyTorch, CPU.

    python benchmarks/decoupled_training.py --config launch/runs/demo.toml [--section.key=value ...]

joint: L_G + lambda L_D, one backward, one global norm, one AdamW step (what pretrain.py does).
decoupled: the generator's step first, with its own norm; then the discriminator's, on the table
that this step has just changed (microsoft/DeBERTa rtd_task.py, decoupled_training=True).
Same initial weights, rows, masks and dropout seeds for both. Prints held-out scores, seed by seed.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F

from deberta_ds import config
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset, Source, eval_rows
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives.build import build_model
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.train.evaluate import evaluate
from deberta_ds.train.optim import build_optimizer
from deberta_ds.train.schedule import learning_rate
from deberta_ds.train.step import seed_step

SCORES = ("generator_loss", "discriminator_loss", "discriminator_gain", "roc_auc",
          "average_precision")


def train(run: config.RunConfig, mode: str, seed: int) -> dict[str, float]:
    """Return the held-out scores after training `run` from `seed`."""
    tokenizer = Tokenizer(run.data.tokenizer)
    data, rows = run.data, run.train.global_batch_rows
    dataset = RowDataset([Source(data.sources[0].path)], tokenizer, seq_len=data.seq_len, seed=seed,
                         mask=run.objective.mask)
    held_out = eval_rows(data.eval, tokenizer, seq_len=data.seq_len, mask=run.objective.mask,
                         eval_seed=1, num_rows=run.train.eval_rows)
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, seed)
    optimizer = build_optimizer(model, run.optim)
    detector = list(model.discriminator.parameters())
    generator = [model.words.weight, *model.generator.parameters()]
    loader = build_loader(dataset, start_row=0, global_batch_rows=rows, micro_batch_rows=rows,
                          rank=0, world_size=1, num_workers=0, num_steps=run.train.steps)
    for step, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, run.train.steps)
        seed_step(seed, step, 0, 0)
        norm = {"targets": batch.num_targets, "tokens": batch.num_tokens}
        if mode == "joint":
            model(batch, norm)[0].backward()
            _update(optimizer, [*generator, *detector], run.optim.clip_norm)
            continue
        generator_sum, _, ids_BL = model._replace_targets(batch)
        (generator_sum / norm["targets"]).backward()
        _update(optimizer, generator, run.optim.clip_norm)
        original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
        logits_BL = model.discriminator(model.words, ids_BL, batch)
        losses_BL = F.binary_cross_entropy_with_logits(
            logits_BL, (ids_BL != original_BL).float(), reduction="none")
        loss = (losses_BL * (batch.segments > 0)).sum() / norm["tokens"]
        (run.objective.rtd_weight * loss).backward()
        _update(optimizer, detector, run.optim.clip_norm)
    return evaluate(model, torch.device("cpu"), held_out, rows)


def _update(optimizer, parameters: list, clip_norm: float) -> None:
    """Step on the parameters that have a gradient: an optimizer skips the others."""
    torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options, overrides = parser.parse_known_args()
    run, _ = config.load(options.config, overrides)
    results = {"joint": [], "decoupled": []}
    for seed in range(options.seeds):
        for mode, scores in results.items():
            found = train(run, mode, seed)
            scores.append(found)
            print(json.dumps({"mode": mode, "seed": seed}
                             | {name: round(found[name], 5) for name in SCORES}), flush=True)
    for name in SCORES:
        columns = [f"{mode} {statistics.mean(values):.4f} +- {statistics.stdev(values):.4f}"
                   for mode, scores in results.items()
                   if (values := [score[name] for score in scores])]
        print(f"{name:22s} {'   '.join(columns)}")


if __name__ == "__main__":
    main()
