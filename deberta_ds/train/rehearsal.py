"""`--check`: everything that a start looks at, and one micro-batch forward and backward."""

import math
import socket
from dataclasses import replace

import torch

from deberta_ds import dist
from deberta_ds.config import RunConfig
from deberta_ds.formats.engine_state import check_restorable
from deberta_ds.train import engine
from deberta_ds.train.check import changed_values
from deberta_ds.train.loop import batches_of
from deberta_ds.train.preflight import preflight, room
from deberta_ds.train.setup import describe, join_group, open_run, versions
from deberta_ds.train.spikes import BadStepError, find_bad_gradients
from deberta_ds.train.start import first_weights
from deberta_ds.train.step import count_over_ranks, seed_step


def rehearse(run: RunConfig, ds_values: dict, *, resume: str, place: str,
             origins: dict[str, str]) -> None:
    """Check a run and take its first micro-batch forward and backward; nothing is written.

    Where it would go on from a checkpoint, that is verified; the micro-batch sees random weights.
    Raises UserError, on every rank, also if the loss or a gradient is not finite.
    """
    warnings = join_group(run, ds_values, place)
    found, record, inputs = open_run(run, ds_values, place, resume)
    if dist.is_main():
        print("\n".join(describe(run, inputs, origins)))
    lines = preflight(engine.local_device(), socket.gethostname(), versions())
    lines += [*warnings, *found.warnings()]
    if found.path:
        lines.append(f"would go on from {found.path}, step {record.step:,}")
        lines += [f"changed since the checkpoint: {line}" for line in changed_values(run, record)]
    lines.append(dist.together(lambda: room(run.out_dir, inputs.num_parameters, run.train.keep,
                                            bool(run.train.best))))
    if dist.is_main():
        print("\n".join(lines))
    tensors, notes = ({}, []) if record else first_weights(run)
    if notes:
        print("\n".join(notes))
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size, tensors)
    check_restorable(model_engine)
    full = replace(run.train, first_batch_rows=0, batch_growth_steps=0)
    batch = next(batches_of(replace(run, train=full), inputs, start=0, end=1))[0]
    counts = count_over_ranks([batch], model_engine.device)
    loss = torch.zeros((), dtype=torch.float64, device=model_engine.device)

    def forward(_micro_step: int) -> torch.Tensor:
        seed_step(run.train.seed, 0, 0, dist.rank())
        trained, *_ = model_engine(batch.to(model_engine.device), counts)
        loss.add_(trained.detach())
        return trained

    bad = find_bad_gradients(model_engine, [batch], forward)
    mean = dist.sum_over_ranks(loss).item()
    what = f"micro-batch of {run.train.micro_batch_rows} x {run.data.seq_len}"
    if not counts["targets"]:
        bad = "none of its tokens is masked; raise objective.mask.rate, or look at the rows with " \
              "data_prep/show.py"
    if bad or not math.isfinite(mean):
        raise BadStepError(f"check failed: {what}, loss {mean:.4f}: "
                           + (bad or "not finite; look at the weights of [init] and the precision"))
    if dist.is_main():
        print(f"check passed: {what}, loss {mean:.4f}")
