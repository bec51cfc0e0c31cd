"""How long the host needs for a training step, part by part; on a GPU also the time at few rows.

  python -m benchmarks.host_time                              # processor time; kernels do nothing
  python -m benchmarks.host_time --cuda --rows 1 16 64 128    # on a card: time of a micro-batch
  python -m benchmarks.host_time --cuda --rows 64 --graph off auto    # and whether losses are equal
  TRY=1 python -m benchmarks.host_time --cuda --rows 1 2    # the same code on a CPU, small models

Without a card: DeepSpeed's engine as a run has it (ZeRO-1, bf16) on tensors of one sequence of 64
tokens and 64 columns, Triton kernels replaced by functions that do nothing, processor time, the
least of some steps. On a card the time of a micro-batch of one row is the host's: the kernels of
one row take a fraction of it.
"""

import argparse
import json
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from benchmarks.measure import RESULTS, environment
from benchmarks.train_step import make_batch
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.base.files import write_atomic
from deberta_ds.config import run_config
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine import engine, passes
from deberta_ds.engine.ds_config import CompleteConfig, load, resolve
from deberta_ds.model import choose
from deberta_ds.training import step as training_step

# name: objective, layers, generator's layers, hidden size, heads
MODELS = {"rtd_v3_base": ("rtd", 12, 6, 768, 12), "mlm_12x192": ("mlm", 12, 0, 192, 3),
          "rtd_7x256": ("rtd", 7, 3, 256, 4)}
COLUMNS, LENGTH, CARD_LENGTH = 64, 64, 512


def run_of(name: str, rows: int, micro_batches: int, on_card: bool, graph: str) -> RunConfig:
    """Return the run that is timed."""
    kind, layers, generator_layers, size, heads = MODELS[name]
    length = CARD_LENGTH if on_card else LENGTH
    run, _ = run_config.load("launch/runs/v3_base.toml", [
        f"--train.micro_batch_size={rows}", f"--train.global_batch_size={rows * micro_batches}",
        f"--data.seq_len={length}", f"--train.cuda_graph={graph}",
        *([] if on_card else ["--model.vocab_size=2048"])])
    if not on_card:
        size, heads = COLUMNS, 1
    model = replace(run.model, num_layers=layers, hidden_size=size, num_heads=heads,
                    intermediate_size=(4 if on_card else 2) * size)
    objective = replace(run.objective, kind=kind, generator_layers=generator_layers)
    return replace(run, model=model, objective=objective)


def json_of(run: RunConfig) -> CompleteConfig:
    return resolve(run, load("ds_configs/zero1_bf16.json"), 1)


class Nothing:
    """A Triton kernel that launches nothing, and counts."""

    launches = 0

    def __getitem__(self, _grid):
        Nothing.launches += 1
        return lambda *_, **__: None


def triton_kernels() -> list[tuple[object, str]]:
    """Return (module, name) of each."""
    from deberta_ds.model.kernels import fused_cross_entropy, fused_norm
    from deberta_ds.model.kernels.attention import backward, blocks, forward, position_bias

    return [(module, name) for module in (
        backward, blocks, forward, position_bias, fused_norm, fused_cross_entropy)
        for name in vars(module) if name.endswith("_kernel")]


@contextmanager
def kernels_that_do_nothing():
    """Take the kernels of a card, whose launches do nothing; their results are zeros."""
    from deberta_ds.model.kernels import fused_norm
    from deberta_ds.model.kernels.attention import ops

    def pick(idea, _request, mode="auto"):
        return next((one, "") for one in choose.KERNELS
                    if one.idea == idea and mode in ("auto", one.name))

    def new_zeros(tensor, *shape, **options):
        return torch.Tensor.new_zeros(tensor, *shape, **options)

    stand_ins = [(choose, "pick", pick), (torch.Tensor, "new_empty", new_zeros),
                 (torch, "empty_like", torch.zeros_like), (torch, "empty", torch.zeros)]
    stand_ins += [(module, "empty_like", torch.zeros_like) for module in (ops, fused_norm)
                  if hasattr(module, "empty_like")]
    stand_ins += [(module, name, Nothing()) for module, name in triton_kernels()]
    patches = [patch.object(*stand_in) for stand_in in stand_ins]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


def processor_ms(name: str, micro_batches: int, rounds: int) -> dict[str, float]:
    """Return the least processor milliseconds of a step by part, and its launches of Triton."""
    run = run_of(name, 1, micro_batches, on_card=False, graph="off")
    made = engine.build_pretraining_engine(run, json_of(run), None)
    made.passes = passes.HookedPasses(made)  # without a graph that is what a card waits for
    engine.set_learning_rate(made, 0.0)
    batches = [make_batch(run.model, 1, LENGTH) for _ in range(micro_batches)]
    parts: dict[str, float] = {}

    @contextmanager
    def span(part: str):
        start = time.process_time()
        yield
        parts[part] = parts.get(part, 0.0) + (time.process_time() - start) * 1e3

    best: dict[str, float] = {}
    with patch.object(training_step, "span", span), patch.object(passes, "span", span):
        for number in range(rounds + 3):
            parts.clear()
            Nothing.launches, start = 0, time.process_time()
            training_step.train_step(made, batches, step=number, seed=1, raise_if_bad=False)
            parts["step"] = (time.process_time() - start) * 1e3
            if number >= 3:
                best = {key: min(value, best.get(key, value)) for key, value in parts.items()}
    return {key: round(value, 1) for key, value in best.items()} | {"launches": Nothing.launches}


def card_ms(name: str, rows: int, micro_batches: int, graph: str, rounds: int) -> dict[str, float]:
    """Return milliseconds of a micro-batch, tokens a second, the most memory, and the losses."""
    trial = "TRY" in os.environ
    run = run_of(name, rows, micro_batches, on_card=not trial, graph=graph)
    made = engine.build_pretraining_engine(run, json_of(run), None)
    engine.set_learning_rate(made, 1e-4)
    batches = [make_batch(run.model, rows, run.data.seq_len) for _ in range(micro_batches)]
    if not trial:
        batches = [batch.pin_memory() for batch in batches]
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for number in range(rounds + 3):
        start = time.perf_counter()
        losses.append(training_step.train_step(made, batches, step=number, seed=1).loss)
        if not trial:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    least = min(seconds[3:]) / micro_batches
    found = {"ms": round(least * 1e3, 2), "losses": losses,
             "tokens_per_second": round(rows * run.data.seq_len / least)}
    if not trial:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        del made
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cuda", action="store_true", help="time real kernels on this card")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128])
    parser.add_argument("--graph", nargs="+", default=["off"], choices=("auto", "on", "off"))
    parser.add_argument("--out")
    options = parser.parse_args()
    out = options.out or str(RESULTS / f"host_time{'-cuda' * options.cuda}.json")
    if not options.cuda or "TRY" in os.environ:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
    engine.init_distributed()
    results = []
    for name in options.models:
        for micro_batches in options.micro_batches:
            about = {"model": name, "micro_batches": micro_batches}
            if not options.cuda:
                with kernels_that_do_nothing():
                    results.append(about | processor_ms(name, micro_batches, options.rounds))
                print(json.dumps(results[-1]), flush=True)
                continue
            for rows in options.rows:
                first: list[float] = []
                for graph in options.graph:
                    found = card_ms(name, rows, micro_batches, graph, options.rounds)
                    losses = found.pop("losses")
                    first = first or losses
                    results.append(about | {"rows": rows, "graph": graph, "loss": losses[-1],
                                            "same_losses": losses == first} | found)
                    print(json.dumps(results[-1]), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    document = {"benchmark": "host_time", "environment": environment(device), "results": results}
    write_atomic(out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    exit_cleanly(main)
