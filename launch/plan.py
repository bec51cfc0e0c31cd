"""Predict memory, speed, communication and days of a run on a cluster.

    python launch/plan.py --config launch/runs/v3_base.toml --gpu h200 --gpus 8

Allocates nothing and needs no GPU. For a GPU that is not listed, give its figures: --gpu NAME
--tflops 165 --memory_gb 24 (and the speed of its links). Any value of the run file can be
overridden, as in launch/pretrain.py.
"""

import argparse
import os

from deberta_ds.base.command_line import checked, parser_for, positive
from deberta_ds.base.errors import exit_cleanly


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the values of the run file that are overridden."""
    parser = parser_for(__doc__)
    parser.add_argument("--config", required=True, metavar="TOML",
                        help="run file (model, data, optimizer, steps)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero1_bf16.json", metavar="JSON",
                        help="precision, buckets and offload; every ZeRO stage is tried (default: "
                             "%(default)s)")
    parser.add_argument("--gpu", required=True, metavar="NAME",
                        help="h200, h100, h100pcie, a100, l40s, rtx4090, ...; for another GPU, "
                             "or other figures, use the options below")
    parser.add_argument("--tflops", type=_sheet_number,
                        help="dense peak TFLOP/s in the run's precision")
    parser.add_argument("--memory_gb", type=_sheet_number, help="memory of a GPU")
    parser.add_argument("--link_gb_s", type=_sheet_number,
                        help="GB/s to the other GPUs of a node, in one direction (PCIe 4.0 x16: "
                             "32)")
    parser.add_argument("--network_gb_s", type=_sheet_number,
                        help="GB/s between nodes per GPU (100 Gbit/s: 12.5)")
    parser.add_argument("--gpus", type=positive, default=8, help="GPUs per node (default: 8)")
    parser.add_argument("--nodes", type=positive, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--mfu", type=_share, default=0.4,
                        help="expected share of the GPUs' peak FLOP/s (default: 0.4)")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML report with a picture")
    return parser.parse_known_args()


def main() -> None:
    options, overrides = parse()
    # Nothing is computed here, and DeepSpeed, which checks its JSON, warns where it finds no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deberta_ds.config import run_config
    from deberta_ds.engine import ds_config
    from deberta_ds.release import shape

    run, origins = run_config.load(options.config, overrides, shape.complete)
    ds = ds_config.load(options.deepspeed_config)

    from deberta_ds.base.files import write_atomic  # heavy imports after the configs are known good
    from deberta_ds.base.numbers import format_count
    from deberta_ds.config.batch_schedule import rows_of_run
    from deberta_ds.model.backbone import count_parameters, on_meta
    from deberta_ds.objectives.build import build_model, objective_of
    from deberta_ds.planner.gpus import card_of
    from deberta_ds.planner.plan import advise, make_plan, offloaded, recommended
    from deberta_ds.report.small_pages import plan_page

    gpu = card_of(options.gpu, options.tflops, options.memory_gb, options.link_gb_s,
                  options.network_gb_s)
    choices = make_plan(run, ds, gpu=gpu, gpus=options.gpus, nodes=options.nodes,
                        mfu=options.mfu)
    ranks = options.gpus * options.nodes
    accumulation = ds_config.accumulation_steps(run, ranks)
    parameters = count_parameters(on_meta(build_model, run))
    tokens = rows_of_run(run.train) * run.data.seq_len
    facts = [
        f"{run.objective.kind} model of {format_count(parameters)} parameters, "
        f"{ds_config.precision(ds)}, {format_count(tokens)} tokens in "
        f"{run.train.steps:,} steps; vocabulary of "
        f"{run.model.vocab_size:,} ({origins['model.vocab_size']})",
        f"{options.nodes} x {options.gpus} {options.gpu.upper()}: {run.train.micro_batch_size} x "
        f"{run.data.seq_len} tokens a GPU, {accumulation} micro-batches a step, "
        f"{objective_of(run).flops_per_token(run) / 1e9:.3g} GFLOP a token, at an assumed MFU of "
        f"{options.mfu:.0%}", *offloaded(choices, options.gpus),
        *[f"the batch grows from {run.train.initial_batch_size:,} to "
          f"{run.train.global_batch_size:,} rows in {run.train.batch_warmup_steps:,} steps: the "
          "days are of all, the rest of a full one"] * (run.train.initial_batch_size > 0),
        *["frozen parts count as trained ones"] * bool(run.train.freeze),
        *["muon: its products and sums are not in the times"] * (run.optim.name == "muon"),
    ]
    print("\n".join(facts))
    for line in table(choices, ranks):
        print(line)
    best = recommended(choices)
    print(
        f"fastest that fits: ZeRO-{best.stage}, activation checkpointing {best.checkpointing}"
        if best
        else "nothing fits: use more GPUs, a smaller train.micro_batch_size, or offload")
    for line in advise(run, ds, choices, best, parameters, gpu=gpu, gpus=options.gpus,
                       nodes=options.nodes) if best else []:
        print(f"  {line}")
    if options.html:
        write_atomic(options.html, plan_page(run.name, facts, choices, options.gpu, gpu,
                                             ranks))
        print(f"page: {options.html}")


def _sheet_number(text: str) -> float:
    """Type of an option: a figure of a data sheet. The limit keeps sums in their unit finite."""
    return checked(text, float, lambda value: 0 < value < 1e9, "a number above 0 and below 1e9")


def _share(text: str) -> float:
    """Type of an option: a share in (0, 1]."""
    return checked(text, float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def table(choices: list, ranks: int) -> list[str]:
    """Return the printed table, sizes in GB (1e9 bytes) of one GPU."""
    lines = ["  ZeRO checkpt.   weights  optim.    work  update   PEAK  fits   step s  (comm.)"
             "   tok/s   days  GPU-hours"]
    for choice in choices:
        memory = choice.memory
        sizes = [memory.weights + memory.buffers, memory.optimizer, memory.work,
                 memory.update, memory.peak]
        weights, optimizer, work, update, peak = (size / 1e9 for size in sizes)
        lines.append(f"  {choice.stage:4} {choice.checkpointing:9} {weights:8.2f} {optimizer:7.2f} "
                     f"{work:7.2f} {update:7.2f} {peak:6.1f}  {'yes' if choice.fits else 'NO':4} "
                     f"{choice.step_seconds:8.3f} {choice.communication_seconds:8.3f} "
                     f"{choice.tokens_per_second:7,.0f} {choice.days:6.2f} "
                     f"{choice.days * 24 * ranks:10,.0f}")
    return lines


if __name__ == "__main__":
    exit_cleanly(main)
