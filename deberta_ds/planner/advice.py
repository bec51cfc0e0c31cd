"""What a plan recommends beside the stage, and why: a line each, with the figures it rests on."""

from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine import ds_config
from deberta_ds.planner.communication import (
    BUCKET,
    bandwidth,
    latency_seconds,
    step_seconds,
    traffic,
)
from deberta_ds.planner.goodput import goodput
from deberta_ds.planner.gpus import Gpu
from deberta_ds.planner.plan import RESERVED_BYTES, Choice

_MANY_RANKS = 256
_GAIN = 0.02  # of a step that is worth a line
_BUCKETS = (50_000_000, 100_000_000, 200_000_000, 500_000_000)  # elements
_MANY_RANKS_BUCKET = 200_000_000  # at least


def advise(run: RunConfig, ds: dict, choices: list[Choice], best: Choice, parameters: int, *,
           gpu: Gpu, gpus: int, nodes: int) -> list[str]:
    """Return what to set for `best` on this cluster, and the reasons."""
    ranks = gpus * nodes
    lines = [_stage(choices, best), _checkpointing(choices, best, gpu),
             *_micro_batch(run, best, ranks, gpu), *_overlap(run, ds, best, parameters, gpu, gpus,
                                                             nodes)]
    if ranks >= _MANY_RANKS:
        lines.append(f"reduce_bucket_size = {_MANY_RANKS_BUCKET:,} to {_BUCKETS[-1]:,}: "
                     f"{ranks:,} ranks make each message of a ring that much smaller")
        if ds_config.precision(ds) == "bf16" and "communication_data_type" not in ds:
            lines.append('communication_data_type = "fp32": sums of so many ranks in bf16 are '
                         "biased (it doubles what the gradients send)")
    found = goodput(parameters, ranks)
    lines.append(f"failures: one in {found.failure_hours:,.0f} h at Llama 3's rate; "
                 f"train.save_minutes = \"auto\" begins with {found.save_seconds / 60:.0f} (a copy "
                 f"of {found.pause_seconds:.2f} s); {found.share:.1%} of the time goes into steps")
    return lines


def offloaded(choices: list[Choice], gpus: int) -> list[str]:
    """Return what a host needs beside its GPUs, and what the times lack; [] without offload."""
    most = max(choice.memory.offloaded for choice in choices)
    return [f"offload: {gpus * most / 1e9:,.1f} GB of each host's memory (or disk, where the JSON "
            "says nvme); the CPU's Adam and the transfers are not in the times"] if most else []


def _stage(choices: list[Choice], best: Choice) -> str:
    others = [
        f"ZeRO-{other.stage} {other.step_seconds:.3f} s" + ("" if other.fits else " (does not fit)")
        for other in choices
        if other.checkpointing == best.checkpointing and other is not best
    ]
    others = others or ["no other stage goes with the rest of the DeepSpeed JSON"]
    return f"ZeRO-{best.stage}: a step takes {best.step_seconds:.3f} s; {', '.join(others)}"


def _checkpointing(choices: list[Choice], best: Choice, gpu: Gpu) -> str:
    limit = (gpu.memory - RESERVED_BYTES) / 1e9
    need = f"{best.memory.peak / 1e9:.1f} of {limit:.0f} GB"
    if best.checkpointing == "none":
        return f"no activation checkpointing: {need}"
    none = next(c for c in choices if c.stage == best.stage and c.checkpointing == "none")
    return (
        f'train.activation_checkpointing = "{best.checkpointing}": {need}; without it '
        f"{none.memory.peak / 1e9:.1f} GB {'fit, but are slower' if none.fits else 'do not fit'}"
    )


def _micro_batch(run: RunConfig, best: Choice, ranks: int, gpu: Gpu) -> list[str]:
    """Return a larger micro-batch that divides and fits; activations grow with its rows."""
    now, rows = run.train.micro_batch_size, run.train.global_batch_size // ranks
    memory = best.memory

    def fits(micro: int) -> bool:
        work = memory.work * micro / now
        return memory.held + max(work, memory.update) + RESERVED_BYTES < gpu.memory

    larger = [micro for micro in range(now + 1, rows + 1) if rows % micro == 0 and fits(micro)]
    return [f"train.micro_batch_size = {larger[-1]} would fit too: micro-batches a step "
            f"{rows // larger[-1]} instead of {rows // now}"] if larger else []


def _overlap(run: RunConfig, ds: dict, best: Choice, parameters: int, gpu: Gpu, gpus: int,
             nodes: int) -> list[str]:
    ranks = gpus * nodes
    if best.stage not in (1, 2) or ranks == 1:
        return []
    accumulation = ds_config.accumulation_steps(run, ranks)
    rate, latency = bandwidth(gpu, gpus, nodes), latency_seconds(ranks)

    def seconds(overlap: bool, bucket: int) -> float:
        zero = ds.get("zero_optimization", {}) | {
            "stage": best.stage, "overlap_comm": overlap, "reduce_bucket_size": bucket}
        staged = ds | {"zero_optimization": zero}
        sent = traffic(parameters, staged, ranks, accumulation)
        return step_seconds(sent, best.compute_seconds, rate, staged, accumulation, latency=latency)

    given = ds.get("zero_optimization", {})
    now = seconds(bool(given.get("overlap_comm")), int(given.get("reduce_bucket_size", BUCKET)))
    least = _MANY_RANKS_BUCKET if ranks >= _MANY_RANKS else 0
    bucket = min((size for size in _BUCKETS if size >= least), key=lambda one: seconds(True, one))
    hidden = seconds(True, bucket)
    if 1.0 - hidden / now < _GAIN:
        return []
    return [f"overlap_comm = true with reduce_bucket_size = {bucket:,}: {hidden:.3f} s a step "
            f"instead of {now:.3f}; all but the last bucket hides behind the backward pass"]
