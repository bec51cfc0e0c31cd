"""What a run needs on a cluster: bytes per GPU, speed, communication, days.

Bytes of weights, gradients and optimizer follow what DeepSpeed 0.19.8 allocates (checked against
the allocator in tests/planner/test_plan.py):

    stage 0    w P weights, g P gradients, 8 P Adam (fp32 only: no separate masters)
    stage 1-2  w P weights, (4 + 8) P / N masters and Adam, gradients w P / N after reduction
               (stage 1 holds w P while it accumulates), one or two buckets
    stage 3    all of it / N, a bucket, and the weights gathered for the layers at work

with P parameters, N GPUs, w bytes a weight (Muon's matrices, 4 bytes less, are counted as Adam's).
The update itself needs gradients in fp32 on top. The peak is what is held + the larger of (forward
and backward) and (update).
"""

from dataclasses import dataclass, replace

from deberta_ds.base.errors import UserError
from deberta_ds.config.batch_schedule import micro_batches, problems_with_ranks, stretches
from deberta_ds.config.options import raise_problems
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine import ds_config
from deberta_ds.model.backbone import count_parameters, on_meta
from deberta_ds.model.precision import DTYPES
from deberta_ds.objectives.build import build_model, objective_of
from deberta_ds.planner.activations import Activations, trace
from deberta_ds.planner.communication import (
    BUCKET,
    bandwidth,
    host_seconds,
    latency_seconds,
    most_gathered,
    sending_seconds,
    step_seconds,
    traffic,
    weight_width,
)
from deberta_ds.planner.gpus import Gpu

RESERVED_BYTES = 3 << 30  # CUDA context, NCCL, workspaces, fragmentation
_LIVE = 1_000_000_000  # stage3_max_live_parameters


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU (and its share of host memory or disk)."""

    weights: int
    optimizer: int
    buffers: int
    work: int  # forward and backward: activations, gradients as they come, buckets, live weights
    update: int
    offloaded: int

    @property
    def held(self) -> int:
        """Bytes held between steps."""
        return self.weights + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        return self.held + max(self.work, self.update)


@dataclass(frozen=True)
class Choice:
    """One row of the plan: a ZeRO stage and a way of recomputing."""

    stage: int
    checkpointing: str  # of activations: none, selective or full
    memory: Memory
    fits: bool
    compute_seconds: float  # of a step
    communication_seconds: float  # of a step, hidden behind computing or not
    step_seconds: float
    tokens_per_second: float  # of the whole cluster
    days: float


def memory_of(parameters: int, ds: dict, ranks: int, activations: Activations,
              accumulates: bool) -> Memory:
    """Return the memory of one rank under a DeepSpeed dict."""
    zero = ds.get("zero_optimization", {})
    stage, width = ds_config.zero_stage(ds), weight_width(ds)
    part = -(-parameters // ranks)
    bucket = width * int(zero.get("reduce_bucket_size", BUCKET))
    away = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    # From the second micro-batch on, stages 0 and 1 hold whole gradients and stage 2 its part.
    if stage == 0:
        flat = 4 * min(parameters, BUCKET) if ranks > 1 else 0
        work = activations.peak(0.0) + width * parameters if accumulates else activations.peak(1.0)
        return Memory(width * parameters, 8 * parameters, 0, work, width * parameters + flat, 0)
    optimizer, update = 12 * part, (2 * width + 4) * part
    if stage == 3:
        live = width * min(parameters, int(zero.get("stage3_max_live_parameters", _LIVE)))
        group = min(part, int(zero.get("sub_group_size", _LIVE)))
        memory = Memory(width * part, optimizer, width * part + bucket,
                        activations.peak(0.0) + live, 4 * group, 0)
    else:
        share = 1.0 if stage == 1 else 1.0 / ranks
        work = activations.peak(0.0) + round(share * width * parameters) if accumulates \
            else activations.peak(1.0 / ranks)
        buckets = min(bucket * (2 if zero.get("overlap_comm") else 1), 2 * width * parameters)
        memory = Memory(width * parameters, optimizer, 0, work + buckets, update, 0)
    if away:
        memory = replace(memory, optimizer=0, update=0, offloaded=16 * part)
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        memory = replace(memory, weights=0, offloaded=memory.offloaded + width * part)
    return memory


def make_plan(run: RunConfig, ds: dict, *, gpu: Gpu, gpus: int, nodes: int, mfu: float
              ) -> list[Choice]:
    """Return every ZeRO stage x recomputation for `run` on `nodes` x `gpus` of a kind.

    `ds` gives precision, buckets and offload; its stage is replaced, by those that go with the
    rest of it. Times lack what offload and Muon cost. Raises UserError if the batch does not
    divide, the optimizer cannot go with the JSON, or the card has no bf16.
    """
    raise_problems("optimizer", ds_config.problems_with_optimizer(run.optim.name, ds))
    ranks = gpus * nodes
    accumulation = ds_config.accumulation_steps(run, ranks)
    precision = ds_config.precision(ds)
    peak_flops = gpu.peak(ds_config.product_precision(ds))
    if peak_flops is None:
        raise UserError("this card has no bf16: give a DeepSpeed JSON of fp16, such as "
                        "--deepspeed_config ds_configs/zero1_fp16.json")
    model = on_meta(build_model, run)
    sizes = [parameter.numel() for parameter in model.parameters()]
    parameters, tensors = count_parameters(model), len(sizes)
    raise_problems("batch", problems_with_ranks(run.train, ranks, 0))
    full, seq_len = run.train.global_batch_size, run.data.seq_len
    updates = stretches(run.train, 0, run.train.steps)
    compute_row = seq_len * objective_of(run).flops_per_token(run) / (ranks * peak_flops * mfu)
    rate, latency = bandwidth(gpu, gpus, nodes), latency_seconds(ranks)
    choices = []
    for name in ("none", "selective", "full"):
        train = replace(run.train, activation_checkpointing=name,
                        activation_checkpointing_interval=1)
        activations = trace(replace(run, train=train), DTYPES[precision], fused=True)
        for stage in (0, 1, 2, 3):
            staged = ds | {"zero_optimization": ds.get("zero_optimization", {}) | {"stage": stage}}
            if ds_config.problems_between(staged):
                continue  # pretrain would refuse it
            memory = memory_of(parameters, staged, ranks, activations, accumulation > 1)
            # Full recomputation repeats the forward pass: a third of forward + backward.
            row_seconds = compute_row * {"none": 1.0, "selective": 1.05, "full": 4 / 3}[name]
            weights = most_gathered(sizes, staged["zero_optimization"], ranks,
                                    run.model.num_layers)
            steps = {}  # by the rows of an update: seconds, and those of its communication
            for rows in {full, *(one.rows for one in updates)}:
                count = micro_batches(rows, ranks, run.train.micro_batch_size)
                sent = traffic(parameters, staged, ranks, count, weights)
                steps[rows] = sending_seconds(sent, rate, latency), step_seconds(
                    sent, rows * row_seconds, rate, staged, count, latency=latency,
                    host=host_seconds(tensors, ranks) if ranks > 1 else 0.0)
            sending, step = steps[full]
            run_seconds = sum(one.steps * steps[one.rows][1] for one in updates)
            choices.append(Choice(stage, name, memory, memory.peak + RESERVED_BYTES < gpu.memory,
                                  full * row_seconds, sending, step, full * seq_len / step,
                                  run_seconds / 86400))
    return choices


def recommended(choices: list[Choice]) -> Choice | None:
    """Return the fastest choice that fits, the lowest stage among equals; None if none fits."""
    fitting = [choice for choice in choices if choice.fits]
    return min(fitting, key=lambda c: (c.days, c.stage), default=None)
