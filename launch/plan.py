"""Predict epochs, memory, speed, days and cost of a run on a cluster or on the cores of a CPU.

    python launch/plan.py --config RUN.toml --devices "8 x h200"
    python launch/plan.py --config RUN.toml --devices "16 cpu"

Allocates nothing and needs no GPU. For a GPU that is not listed, give its figures: --devices
"8 x NAME" --tflops 165 --memory_gb 24 (and the speed of its links). Any value of the run file can
be overridden, as in launch/pretrain.py.
"""

import argparse
import os

from deberta_ds.base.command_line import checked, columns, parser_for
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.base.numbers import fill, format_count


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the values of the run file that are overridden."""
    parser = parser_for(__doc__)
    parser.add_argument("--config", required=True, metavar="TOML",
                        help="run file (model, data, optimizer, steps)")
    parser.add_argument("--deepspeed_config", metavar="JSON",
                        help="precision, buckets and offload; every ZeRO stage is tried (default: "
                             "ds_configs/zero1_bf16.json; for a CPU zero1_fp32.json)")
    parser.add_argument("--devices", required=True,
                        help='as of new.py: "8 x h200", "16 x a100" (2 nodes of 8), "2 x 4 x a100" '
                             '(2 nodes of 4), "16 cpu" (cores); an unknown name lists all; for '
                             "another GPU, or other figures, use the options below")
    parser.add_argument("--tflops", type=_sheet_number,
                        help="dense peak TFLOP/s in the run's precision")
    parser.add_argument("--memory_gb", type=_sheet_number, help="memory of a GPU, or of a core")
    parser.add_argument("--link_gb_s", type=_sheet_number,
                        help="GB/s to the other GPUs of a node, in one direction (PCIe 4.0 x16: "
                             "32)")
    parser.add_argument("--network_gb_s", type=_sheet_number,
                        help="GB/s between nodes per GPU (100 Gbit/s: 12.5)")
    parser.add_argument("--mfu", type=_share,
                        help="expected share of the peak FLOP/s (default: by width and length of "
                             "the model, docs/explanation/scale.md)")
    parser.add_argument("--price_per_hour", type=_sheet_number,
                        help="price of a GPU (or core) per hour, to print the cost of the run")
    return parser.parse_known_args()


def main() -> None:
    options, overrides = parse()
    # Nothing is computed here, and DeepSpeed, which checks its JSON, warns where it finds no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deberta_ds.config import run_config
    from deberta_ds.engine import ds_config
    from deberta_ds.release import shape

    run, origins = run_config.load(options.config, overrides, shape.complete)

    # Heavy imports after the configs are known good.
    from deberta_ds.config.batch_schedule import rows_of_run
    from deberta_ds.objectives.build import objective_of, parameter_sizes
    from deberta_ds.planner.epochs import describe_epochs
    from deberta_ds.planner.new_run import open_devices
    from deberta_ds.planner.plan import advise, make_plan, offloaded, recommended
    from deberta_ds.planner.speed import expected_mfu

    devices = open_devices(options.devices, options.tflops, options.memory_gb, options.link_gb_s,
                           options.network_gb_s)
    gpu, gpus, nodes = devices.gpu, devices.gpus, devices.nodes
    ds = ds_config.load(options.deepspeed_config
                        or f"ds_configs/zero1_{'fp32' if gpu.is_cpu else 'bf16'}.json")
    where = options.devices + f", as {gpus} ranks of {devices.threads} threads" * gpu.is_cpu
    mfu = options.mfu or expected_mfu(run, gpu, ds)
    choices = make_plan(run, ds, gpu=gpu, gpus=gpus, nodes=nodes, mfu=mfu)
    ranks = gpus * nodes
    accumulation = ds_config.accumulation_steps(run, ranks)
    parameters = sum(parameter_sizes(run).values())
    tokens = rows_of_run(run.train) * run.data.seq_len
    facts = [
        *describe_epochs(run),
        f"{run.objective.kind} model of {format_count(parameters)} parameters, "
        f"{ds.precision}, {format_count(tokens)} tokens in "
        f"{run.train.steps:,} steps; vocabulary of "
        f"{run.model.vocab_size:,} ({origins['model.vocab_size']})",
        f"{where}: {run.train.micro_batch_size} x "
        f"{run.data.seq_len} tokens per GPU, {accumulation} micro-batches per step, "
        f"{objective_of(run).flops_per_token(run) / 1e9:.3g} GFLOP per token, at an assumed MFU of "
        f"{mfu:.0%} ({'--mfu' if options.mfu else 'expected for this width and length'})",
        *["step, comm., tok/s and days are bounds: nothing that is sent hides behind computing"
          ] * (ranks > 1),
        *offloaded(choices, gpus), *exceptions(run)]
    if best := recommended(choices):
        hours = best.days * 24 * ranks * devices.threads
        price = f", cost {hours * (options.price_per_hour or 0):,.2f}"
        facts.append(f"{best.days:.2f} days, {hours:,.1f} {'core' if gpu.is_cpu else 'GPU'}-hours"
                     + price * bool(options.price_per_hour))
    for fact in facts:
        print(fill(fact, columns() - 1, hanging=2))
    print("\n".join(table(choices)))
    print(f"recommended: ZeRO-{best.stage}, activation checkpointing {best.checkpointing}" if best
          else "nothing fits: use more GPUs, a smaller train.micro_batch_size, or offload")
    for line in advise(run, ds, best, parameters, gpu=gpu, ranks=ranks) if best else []:
        print(fill(f"  {line}", columns() - 1, hanging=4))


def exceptions(run) -> list[str]:
    """Return what the times of a run are not, or not all, of."""
    return [
        *[f"the batch grows from {run.train.initial_batch_size:,} to "
          f"{run.train.global_batch_size:,} sequences in {run.train.batch_warmup_steps:,} steps: "
          "the days are of all, the rest of a full one"] * (run.train.initial_batch_size > 0),
        *["frozen parts count as trained ones"] * bool(run.train.freeze),
        *["muon: its matmuls and sums are not in the times"] * (run.optim.name == "muon")]


def _sheet_number(text: str) -> float:
    """Type of an option: a figure of a data sheet. The limit keeps sums in their unit finite."""
    return checked(text, float, lambda value: 0 < value < 1e9, "a number above 0 and below 1e9")


def _share(text: str) -> float:
    """Type of an option: a share in (0, 1]."""
    return checked(text, float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def table(choices: list) -> list[str]:
    """Return the printed table, sizes in GB (1e9 bytes) of one GPU."""
    lines = ["ZeRO checkpt.  weights optim.   work   PEAK fits  step s comm. s   tok/s   days"]
    for choice in choices:
        memory = choice.memory
        sizes = (memory.weights + memory.buffers, memory.optimizer,
                 max(memory.work, memory.update), memory.peak)
        weights, optimizer, work, peak = (size / 1e9 for size in sizes)
        lines.append(f"{choice.stage:4} {choice.checkpointing:9} {weights:7.2f} {optimizer:6.2f} "
                     f"{work:6.1f} {peak:6.1f} {'yes' if choice.fits else 'NO':4} "
                     f"{choice.step_seconds:7.3f} {choice.communication_seconds:7.3f} "
                     f"{format_count(choice.tokens_per_second):>7} {choice.days:6.2f}")
    return lines


if __name__ == "__main__":
    exit_cleanly(main)
